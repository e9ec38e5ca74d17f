"""Marks the cells of tables by their length.

On a phone, cells that hold a sentence get a legible width and numbers stay narrow. On wide pages, cells of two or three
short or hyphenated words stay on one line, and so do differences with their intervals.
"""

from __future__ import annotations

import html
import re
from typing import Any

CELL = re.compile(r"<(t[dh])\b([^>]*)>(.*?)</\1>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
VERDICT = re.compile(r"\) (?:ahead|behind|level)$")  # a difference with its interval
SENTENCE = 20  # letters; a cell with numbers, units and an interval has fewer
SHORT = 15  # characters


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with each page's HTML."""
    return CELL.sub(_marked, content)


def _marked(cell: re.Match[str]) -> str:
    tag, attributes, inner = cell.groups()
    text = html.unescape(TAG.sub("", inner)).strip()
    if VERDICT.search(text):
        name = "verdict"
    elif sum(map(str.isalpha, text)) > SENTENCE:
        name = "sentence"
    elif tag == "td" and (" " in text or "-" in text) and len(text) <= SHORT:
        name = "short"
    else:
        return cell[0]
    return f'<{tag}{attributes} class="{name}">{inner}</{tag}>'
