"""Marks the cells of tables that hold a sentence: on a phone they get a legible width, and numbers stay narrow."""

from __future__ import annotations

import html
import re
from typing import Any

CELL = re.compile(r"<(t[dh])\b([^>]*)>(.*?)</\1>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
SENTENCE = 20  # letters; a cell with numbers, units and an interval has fewer


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with each page's HTML."""
    return CELL.sub(_marked, content)


def _marked(cell: re.Match[str]) -> str:
    tag, attributes, inner = cell.groups()
    letters = sum(map(str.isalpha, html.unescape(TAG.sub("", inner))))
    return f'<{tag}{attributes} class="sentence">{inner}</{tag}>' if letters > SENTENCE else cell[0]
