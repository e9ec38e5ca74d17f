"""Keeps flags and names with hyphens in one piece: a browser may end a line after each hyphen, even after ``--``."""

from __future__ import annotations

import re
from typing import Any

# Code in a sentence or a table. Code blocks hold further tags.
INLINE_CODE = re.compile(r"<code>([^<\n]*-[^<\n]*)</code>")
HYPHENATED = re.compile(r"(?<![\w./:-])[\w./:]*-[\w./:-]{1,40}")


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with each page's HTML."""
    return INLINE_CODE.sub(_whole, content)


def _whole(code: re.Match[str]) -> str:
    return f"<code>{HYPHENATED.sub(_unbroken, code[1])}</code>"


def _unbroken(word: re.Match[str]) -> str:
    return f'<span class="whole">{word[0]}</span>' if len(word[0]) <= 40 else word[0]
