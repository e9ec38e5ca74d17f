"""Shows sections of a page as tabs: those between ``<!-- tabs -->`` and ``<!-- end tabs -->``, one per heading.

GitHub shows the same sections below each other, and the code in them is not indented, so the tests run it.
"""

from __future__ import annotations

import re
from typing import Any

REGION = re.compile(r"^<!-- tabs -->$(.*?)^<!-- end tabs -->$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page's Markdown."""
    return REGION.sub(lambda region: _tabs(region[1]), markdown)


def _tabs(sections: str) -> str:
    """Write each section as a tab block of pymdown-extensions; text before the first heading stays above the tabs."""
    opening, *parts = HEADING.split(sections)
    blocks = (
        f"/// tab | {title}\n{body.rstrip()}\n\n///\n" for title, body in zip(parts[::2], parts[1::2], strict=True)
    )
    return "\n".join([opening, *blocks])
