"""Sets docstrings as Markdown for the API page: examples as code blocks, roles as plain names."""

from __future__ import annotations

import re
from typing import Any

import griffe

# A paragraph that opens with a prompt: the example, to its last line.
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
# :func:`~package.name` and the like.
ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")


class Markdown(griffe.Extension):
    """Rewrites each docstring as it is collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe with every module, class, function and attribute."""
        if obj.docstring:
            fenced = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = ROLE.sub(r"`\1`", fenced)
