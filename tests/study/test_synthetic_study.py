"""The study that trains nothing."""

import csv

import pytest

from bucketrank.bench.losses.loss_results import LossBenchSettings
from bucketrank.study.synthetic_study import COLUMNS, run_synthetic_study


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("synthetic")
    settings = LossBenchSettings(
        sizes=(1_000, 400_000), percent=(1.0,), repeats=4, max_seconds_per_cell=0.5, memory=False
    )
    run_synthetic_study(out, settings=settings)
    return out


@pytest.mark.slow
def test_files(folder):
    assert {path.name for path in folder.iterdir()} == {
        *(f"losses.{ending}" for ending in ("json", "md", "png", "svg")),
        *(f"synthetic.{ending}" for ending in ("md", "csv", "tex")),
    }


def test_every_loss_and_size_is_a_row(folder):
    lines = [line for line in (folder / "synthetic.md").read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == list(COLUMNS)
    assert [row[:3] for row in cells[2:]] == [[loss, size, "1 %"] for loss in ("AP", "RS") for size in ("1K", "400K")]
    # Pairwise on 400,000 logits would exceed the limit, so its time is an estimate, marked as one.
    assert [row[3].startswith("\N{ALMOST EQUAL TO}") for row in cells[2:]] == [False, True, False, True]
    assert [row[9].startswith("\N{ALMOST EQUAL TO}") for row in cells[2:]] == [False, True, False, True]


def test_numbers_of_the_csv(folder):
    rows = list(csv.DictReader((folder / "synthetic.csv").read_text().splitlines()))
    slow = {(row["loss"], row["logits"]) for row in rows if row["contender"] == "pairwise" and row["estimated"] == "1"}
    assert slow == {("ap", "400000"), ("rs", "400000")}
    assert all(float(row["seconds"]) > 0 for row in rows)


def test_latex(folder):
    text = (folder / "synthetic.tex").read_text()
    assert r"AP & 1K & 1 \% & " in text
    assert text.count(r"\midrule") == 2
