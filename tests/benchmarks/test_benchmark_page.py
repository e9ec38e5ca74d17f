"""The tables of the benchmark page, and the figures that are drawn from them."""

import csv
import re

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torchvision")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from benchmarks.detectors import report as detectors
from benchmarks.losses import report as losses
from docs.figures import benchmark
from docs.figures.benchmark_tables import (
    BLOCK,
    CSV_FILES,
    PAGE,
    milliseconds,
    read_table,
    renew,
    sections,
    table_of,
    write_tables,
)
from docs.figures.palette import PALETTES
from tests.benchmarks import test_detectors
from tests.benchmarks.fixed_time_bench import fixed_time_bench

DOCUMENTS = {
    "losses.md": losses.to_markdown(fixed_time_bench(), "losses.svg"),
    "detectors.md": detectors.to_markdown(test_detectors.fixed_time_bench(), "detectors.svg"),
}


def test_every_block_of_the_page_is_a_section_that_the_benchmark_writes():
    text = PAGE.read_text(encoding="utf-8")
    blocks = [(match[1], match[2]) for match in BLOCK.finditer(text)]
    assert len(blocks) == text.count("<!-- end -->") == 3
    assert [block for block in blocks if block[1] not in sections(DOCUMENTS[block[0]])] == []
    assert [path.name for path in CSV_FILES.values() if f"](assets/{path.name})" not in text] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_new_measurement_replaces_the_blocks_of_its_file_only(name):
    text = PAGE.read_text(encoding="utf-8")
    page = renew(text, name, DOCUMENTS[name])
    (command,) = re.findall(r"^`(python -m benchmarks .*)`$", DOCUMENTS[name], re.MULTILINE)
    assert f"<!-- {name}: command and machine -->\n\n`{command}`\n" in page
    before = [match[0] for match in BLOCK.finditer(text) if match[1] != name]
    assert [match[0] for match in BLOCK.finditer(page) if match[1] != name] == before
    assert BLOCK.sub("", page) == BLOCK.sub("", text)
    assert renew(page, name, DOCUMENTS[name]) == page


def test_a_new_measurement_replaces_the_csv_files(tmp_path):
    files = {title: tmp_path / path.name for title, path in CSV_FILES.items()}
    write_tables(DOCUMENTS["losses.md"], files)
    for title, path in files.items():
        with path.open(encoding="utf-8", newline="") as file:
            assert [*csv.reader(file)] == table_of(sections(DOCUMENTS["losses.md"])[title])
        assert {*read_table(title)[0]} >= {"logits", "positives", "exact, fused kernel", "focal loss"}


def test_a_section_that_does_not_exist_is_an_error():
    with pytest.raises(KeyError, match="Targets"):
        renew("<!-- losses.md: Targets -->\n\n<!-- end -->\n", "losses.md", "# Losses\n\n## Notes\n\nnone\n")


@pytest.mark.parametrize(
    ("cell", "time"),
    [("395 µs [311, 489] · 0.810", 0.395), ("1,200 ms [850, 1,300]", 1200), ("skipped, ≈ 2.48 min", 148_800)],
)
def test_times_are_read_from_cells(cell, time):
    assert milliseconds(cell) == pytest.approx(time)


def drawn(figure: Figure) -> dict[object, tuple[np.ndarray, np.ndarray]]:
    """Return the x and y of each line of a figure by its label."""
    (axes,) = figure.axes
    plt.close(figure)
    return {line.get_label(): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in axes.lines}


def test_figures_draw_the_numbers_of_the_tables():
    times = [row["exact, fused kernel"] for row in read_table("RS loss: time") if row["positives"] == "1 %"]
    _, exact = drawn(benchmark.over_logits("RS", PALETTES["light"]))["exact, compiled"]
    np.testing.assert_allclose(exact, [milliseconds(cell) for cell in times])
    ratios, _ = drawn(benchmark.per_step(PALETTES["light"]))["RS, exact"]
    cells = [row["rs/exact"] for row in read_table("T_iter")]
    assert all(f" · {ratio:.3f}" in cell for ratio, cell in zip(ratios, cells, strict=True))
