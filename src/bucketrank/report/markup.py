"""HTML from Python: what is not markup already is escaped, so that a class may be called anything."""

from __future__ import annotations

import json
from html import escape
from typing import Any

EMPTY = frozenset({"br", "circle", "image", "input", "line", "path", "rect", "use"})  # elements without content


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, *content: str | Html, **attributes: Any) -> Html:
    """An element; an attribute that is None or False is left out, True has no value.

    ``class_`` is ``class``; other underscores become hyphens.

    >>> tag("td", "1 < 2", class_="number", data_run=0)
    '<td class="number" data-run="0">1 &lt; 2</td>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.removesuffix("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escape(_text(value))}"')
    inner = join(*content)
    if name in EMPTY and not inner:
        return Html(f"<{' '.join(words)}/>")
    return Html(f"<{' '.join(words)}>{inner}</{name}>")


def join(*parts: str | Html) -> Html:
    """The parts one after the other, those that are plain text escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def data(content: Any, **attributes: Any) -> Html:
    """Values for the scripts: JSON in which nothing can end the element that holds it."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json", **attributes)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
