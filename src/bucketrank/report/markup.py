"""HTML elements from Python; all text that is not :class:`Html` is escaped, so class names may hold any characters."""

from __future__ import annotations

import json
from html import escape
from typing import Any

EMPTY = frozenset({"br", "circle", "image", "input", "line", "path", "rect", "use"})  # elements without content


class Html(str):
    """Text that is already markup and must not be escaped."""

    __slots__ = ()


def tag(name: str, *content: str | Html, **attributes: Any) -> Html:
    """Return an element; an attribute that is None or False is omitted, one that is True has no value.

    ``class_`` stands for ``class``; other underscores in names become hyphens.

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
    """Concatenate the parts, escaping those that are plain text."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def data(content: Any, **attributes: Any) -> Html:
    """Return a script element with JSON for the page's scripts; no string in it can close the element."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json", **attributes)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
