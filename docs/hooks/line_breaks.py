"""Says where a line may end: flags, quantities, dates and names like R-CNN stay whole, long paths may break.

Without it a browser may end a line after each hyphen, even after ``--``, and breaks a long name at any letter.
"""

from __future__ import annotations

import html
import re
from typing import Any

BLOCK = re.compile(r"(<pre.*?</pre>|<math.*?</math>|<[^>]*>)", re.DOTALL)  # everything that is not plain text
INLINE_CODE = re.compile(r"(?<!<pre>)<code>([^<\n]+)</code>")
HYPHENATED = re.compile(r"(?<![\w./:*,-])[\w./:*,]*-[\w./:*,-]{1,40}")
LONG_NAME = re.compile(r"[\w./:(]{26,}")
EXTRAS = re.compile(r"(?:\"|&quot;)\.\[[\w,]+\](?:\"|&quot;)")  # ".[fast,detect]"
BREAK = re.compile(r"(?<=\w)([/(]|\.(?!json\b))(?=\w{4})")  # where a long name may end a line
UNIT = r"(?<=\d) (?=(?:%|s|ms|µs|MB|KB|TB/s)(?![\w/]))"
DEVIATION = r"(?<=\d) (?=± \d)|(?<=\d ±) (?=\d)"
PAIR = r"(?<=\d) (?=/ \d)|(?<=\d /) (?=\d)|(?<=\d) (?=\(\d)"
LIST = r"(?<=\S) (?=· \d)"  # a dot between quantities ends a line and never begins one
SUM = r"(?<=RS) (?=\+ QFL)|(?<=RS \+) (?=QFL)"  # the name of a loss
QUANTITY = re.compile(f"{UNIT}|{DEVIATION}|{PAIR}|{LIST}|{SUM}")
# Names of models and measures (R-CNN, Co-DETR, D-ECE), dates and numbers (2026-11-17, 8e-4).
NAME = r"[A-Z]\w*(?:-[A-Z0-9]\w*)+"
NUMBER = r"\d[\d.]*e?(?:-\d+)+"
HYPHENATED_TEXT = re.compile(rf"(?<![\w/.&-])(?:{NAME}|{NUMBER})(?![\w/-])")
INTERVAL = re.compile(r"\([+-]?[\d.]+ to [+-]?[\d.]+\)|\[[\d.,]+, [\d.,]+\]|\([\d.]+(?:, [\d.]+)+\)")
SHORT = 20  # characters of code that stay on one line
SPACE_BEFORE_BRACKET = re.compile(r"</code>\s+\)")  # mkdocstrings leaves one after the default of an argument
NO_BREAK = "\N{NO-BREAK SPACE}"


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with each page's HTML."""
    parts = BLOCK.split(content)
    parts[::2] = [_quantities(text) for text in parts[::2]]
    return SPACE_BEFORE_BRACKET.sub("</code>)", INLINE_CODE.sub(_code, "".join(parts)))


def _quantities(text: str) -> str:
    text = INTERVAL.sub(lambda interval: interval[0].replace(" ", NO_BREAK), QUANTITY.sub(NO_BREAK, text))
    return HYPHENATED_TEXT.sub(lambda word: _whole(word, longest=14), text)


def _code(code: re.Match[str]) -> str:
    words = code[1].split(" ")
    if len(words) > 1 and len(html.unescape(code[1])) <= SHORT:  # no-break spaces would be copied into a terminal
        return f'<code><span class="whole">{code[1]}</span></code>'
    return f"<code>{' '.join(_word(word) for word in words)}</code>"


def _word(word: str) -> str:
    if EXTRAS.fullmatch(word):
        return f'<span class="whole">{word}</span>'
    if "-" in word:
        return HYPHENATED.sub(_whole, word)
    return LONG_NAME.sub(lambda name: BREAK.sub(r"\1<wbr>", name[0]), word)


def _whole(word: re.Match[str], longest: int = 40) -> str:
    return f'<span class="whole">{word[0]}</span>' if len(word[0]) <= longest else word[0]
