"""Hooks of the documentation: where a line may end, the width of table cells, and sections as tabs."""

import pytest

from docs.hooks import line_breaks, mathml, tables, tabs

SPACE = "\N{NO-BREAK SPACE}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("takes 3 ms", f"takes 3{SPACE}ms"),
        ("in 3 steps", "in 3 steps"),
        ("54.0 ± 0.8", f"54.0{SPACE}±{SPACE}0.8"),
        ("+0.3 (-1.0 to +1.7) level", f"+0.3 (-1.0{SPACE}to{SPACE}+1.7) level"),
        ("14.8 (14.6, 15.4)", f"14.8{SPACE}(14.6,{SPACE}15.4)"),
        ("RS + QFL ends", f"RS{SPACE}+{SPACE}QFL ends"),
        ("R-CNN, 2026-11-17", '<span class="whole">R-CNN</span>, <span class="whole">2026-11-17</span>'),
        ("a score-based loss", "a score-based loss"),
    ],
)
def test_quantities_and_names_stay_whole(text: str, expected: str) -> None:
    assert line_breaks.on_page_content(f"<p>{text}</p>") == f"<p>{expected}</p>"


def test_flags_stay_whole_and_long_names_may_break() -> None:
    shown = line_breaks.on_page_content(
        "<code>--trainer.loggers tensorboard</code> <code>bucketrank.integrations.torchvision</code>"
    )
    assert shown == (
        '<code><span class="whole">--trainer.loggers</span> tensorboard</code> '
        "<code>bucketrank.<wbr>integrations.<wbr>torchvision</code>"
    )


def test_short_code_and_the_ends_of_file_names_stay_whole() -> None:
    shown = line_breaks.on_page_content(
        "<code>classes[label - 1]</code> <code>annotations/instances_train2017.json</code>"
        '<code>pip install ".[torchvision,fast]"</code>'
    )
    assert shown == (
        '<code><span class="whole">classes[label - 1]</span></code> '
        "<code>annotations/<wbr>instances_train2017.json</code>"
        '<code>pip install <span class="whole">".[torchvision,fast]"</span></code>'
    )


@pytest.mark.parametrize(
    ("latex", "gaps"),
    [(r"\log_2 n", 1), (r"\frac{1}{L} \ln x", 2), (r"\lceil \log_2 n \rceil", 1), (r"\log_2 (2P)", 0), ("n", 0)],
)
def test_names_of_functions_are_set_apart(latex: str, gaps: int) -> None:
    page = mathml.on_page_content(f'<span class="arithmatex">\\({latex}\\)</span>')
    assert page.count(mathml.THIN) == gaps


def test_code_blocks_and_formulas_are_left_alone() -> None:
    page = "<pre><code>x = 3 ms</code></pre><math><mn>3</mn> <mi>s</mi></math>"
    assert line_breaks.on_page_content(page) == page


def test_cells_are_marked_by_their_length() -> None:
    row = (
        "<td>54.0</td><td>blood cells</td><td>score-based</td><td>chosen on held-out training images</td>"
        "<td>+0.3 (-1.3 to +2.0) level</td><th>blood cells</th>"
    )
    assert tables.on_page_content(row) == (
        '<td>54.0</td><td class="short">blood cells</td><td class="short">score-based</td>'
        '<td class="sentence">chosen on held-out training images</td>'
        '<td class="verdict">+0.3 (-1.3 to +2.0) level</td><th>blood cells</th>'
    )


def test_sections_between_the_marks_become_tabs() -> None:
    page = "## Before\n\n<!-- tabs -->\n\n## One\n\nfirst\n\n## Two\n\nsecond\n\n<!-- end tabs -->\n\n## After\n"
    shown = tabs.on_page_markdown(page)
    assert " ".join(shown.split()) == "## Before /// tab | One first /// /// tab | Two second /// ## After"


def test_defaults_that_are_constants_appear_as_their_values() -> None:
    griffe = pytest.importorskip("griffe")
    from docs.hooks.docstrings import Markdown

    module = griffe.load("bucketrank.losses.functional", extensions=griffe.load_extensions(Markdown))
    assert str(module["rank_sort_loss"].parameters["delta"].default) == "0.5"
    assert str(module["rank_sort_loss"].parameters["method"].default) == "'exact'"
