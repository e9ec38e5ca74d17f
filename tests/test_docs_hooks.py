"""Hooks of the documentation: where a line may end, and the width of the cells of tables."""

import pytest

from docs.hooks import line_breaks, tables

SPACE = "\N{NO-BREAK SPACE}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("takes 3 ms", f"takes 3{SPACE}ms"),
        ("in 3 steps", "in 3 steps"),
        ("54.0 ± 0.8", f"54.0{SPACE}±{SPACE}0.8"),
        ("+0.3 (-1.0 to +1.7) level", f"+0.3 (-1.0{SPACE}to{SPACE}+1.7) level"),
        ("R-CNN, 2026-11-17", '<span class="whole">R-CNN</span>, <span class="whole">2026-11-17</span>'),
        ("a score-based loss", "a score-based loss"),
    ],
)
def test_quantities_and_names_stay_whole(text: str, expected: str) -> None:
    assert line_breaks.on_page_content(f"<p>{text}</p>") == f"<p>{expected}</p>"


def test_flags_stay_whole_and_long_names_may_break() -> None:
    shown = line_breaks.on_page_content(
        "<code>--loss.delta 0.25</code> <code>bucketrank.integrations.torchvision</code>"
    )
    assert shown == (
        '<code><span class="whole">--loss.delta</span> 0.25</code> '
        "<code>bucketrank.<wbr>integrations.<wbr>torchvision</code>"
    )


def test_code_blocks_and_formulas_are_left_alone() -> None:
    page = "<pre><code>x = 3 ms</code></pre><math><mn>3</mn> <mi>s</mi></math>"
    assert line_breaks.on_page_content(page) == page


def test_cells_are_marked_by_their_length() -> None:
    row = "<td>54.0</td><td>blood cells</td><td>chosen on held-out training images</td><th>blood cells</th>"
    assert tables.on_page_content(row) == (
        '<td>54.0</td><td class="short">blood cells</td>'
        '<td class="sentence">chosen on held-out training images</td><th>blood cells</th>'
    )
