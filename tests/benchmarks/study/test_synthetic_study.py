"""The study that trains nothing."""

import csv

import pytest

from benchmarks.study import synthetic
from benchmarks.study.synthetic import COLUMNS, run_synthetic_study
from tests.benchmarks.fixed_time_bench import SECONDS, fixed_time_bench


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the files of a study whose times are fixed; pairwise is estimated at a million logits."""
    out = tmp_path_factory.mktemp("synthetic")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(synthetic, "measure_losses", lambda settings, progress: fixed_time_bench())
        run_synthetic_study(out)
    return out


def test_files(folder):
    assert {path.name for path in folder.iterdir()} == {
        *(f"losses.{ending}" for ending in ("json", "md", "png", "svg")),
        *(f"synthetic.{ending}" for ending in ("md", "csv", "tex")),
    }


def test_every_loss_and_size_is_a_row(folder):
    lines = [line for line in (folder / "synthetic.md").read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == list(COLUMNS)
    grid = [[size, percent] for size in ("10K", "1M") for percent in ("1 %", "5 %")]
    assert [row[:3] for row in cells[2:]] == [[loss, *cell] for loss in ("AP", "RS") for cell in grid]
    # Pairwise on a million logits would exceed the limit, so its time is an estimate, marked as one.
    assert [row[3].startswith("\N{ALMOST EQUAL TO}") for row in cells[2:]] == 2 * [False, False, True, True]
    assert [row[9].startswith("\N{ALMOST EQUAL TO}") for row in cells[2:]] == 2 * [False, False, True, True]


def test_numbers_of_the_csv(folder):
    rows = list(csv.DictReader((folder / "synthetic.csv").read_text().splitlines()))
    slow = {(row["loss"], row["logits"]) for row in rows if row["contender"] == "pairwise" and row["estimated"] == "1"}
    assert slow == {("ap", "1000000"), ("rs", "1000000")}
    seconds = {row["contender"]: row["seconds"] for row in rows if row["logits"] == "10000"}
    assert {name: float(text) for name, text in seconds.items()} == {name: SECONDS[name] for name in seconds}


def test_latex(folder):
    text = (folder / "synthetic.tex").read_text()
    assert r"AP & 10K & 1 \% & " in text
    assert text.count(r"\midrule") == 2
