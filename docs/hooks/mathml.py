"""Turns formulas into MathML while the site is built: the browser loads nothing and runs no script for them."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves behind: \(...\) in a span, \[...\] in a div; and the punctuation behind a span, which
# must not begin a line.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>([.,;:)]*)', re.DOTALL)
# TeX sets thin spaces around a function's name and none around the bars of a size; the converter says neither.
THIN = '<mspace width="0.167em"/>'
FUNCTION = re.compile(
    r"((?<!&#x02308;)</mi>|</mfrac>|29;</mo>)?(<mi>(?:ln|log)</mi>|<msub><mi>log</mi>.*?</msub>)(<mi>(?!&#x0230[89]))?"
)
BAR = '<mo stretchy="false">&#x0007C;</mo>'


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with each page's HTML."""
    return FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    tag, latex, punctuation = match.groups()
    # The parts of a display, set apart by \qquad, go below each other where the page is narrow.
    parts = html.unescape(latex).split(r"\qquad")
    formulas = [_formula(part.strip(), "inline" if tag == "span" else "block") for part in parts]
    return f'<{tag} class="formula">{"".join(formulas)}{punctuation}</{tag}>'


def _formula(latex: str, display: str) -> str:
    formula = FUNCTION.sub(_spaced, convert(latex, display=display))
    return formula.replace(BAR, BAR.replace("stretchy", 'lspace="0" rspace="0" stretchy'))


def _spaced(match: re.Match[str]) -> str:
    before, function, after = match.groups()
    return (before + THIN if before else "") + function + (THIN + after if after else "")
