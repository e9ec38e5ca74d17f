"""The tables of losses on the results page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.study.regret import title_of
from docs.figures.loss_tables import BLOCK, PAGES, Studies, regret_table, renew, tables
from docs.figures.losses import NAMES


@pytest.fixture(scope="module")
def studies() -> Studies:
    return Studies.read()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_study(page: Path, studies: Studies) -> None:
    text = page.read_text(encoding="utf-8")
    assert BLOCK.search(text)
    assert renew(text, studies) == text, "run python -m docs.figures.loss_tables"


def test_the_results_page_shows_every_table(studies: Studies) -> None:
    shown = {match[1] for match in BLOCK.finditer(PAGES[0].read_text(encoding="utf-8"))}
    assert shown == set(tables(studies))


def test_regret_is_over_all_files(studies: Studies) -> None:
    sets = [each["data"] for study in (studies.one_head, *studies.more) for each in study["sets"]]
    assert list(studies.regret.sets) == sets
    head, _, *rows = (line.strip("| ").split(" | ") for line in regret_table(studies.regret).splitlines())
    assert head[1:] == [*(NAMES.get(name, title_of(name)) for name in sets), "worst (95 %)", "mean (95 %)"]
    for _, *cells in rows:
        *by_set, worst, mean = (float(cell.split()[0]) for cell in cells)
        assert worst == max(by_set)
        assert mean == pytest.approx(sum(by_set) / len(sets), abs=0.11)  # of rounded cells


def test_a_table_that_does_not_exist_is_an_error(studies: Studies) -> None:
    with pytest.raises(KeyError, match="oranges"):
        renew("<!-- losses: oranges -->\n\n<!-- end -->\n", studies)


def test_every_run_names_its_command_commit_and_machine(studies: Studies) -> None:
    for document in studies.every:
        for record in (*document["trials"], *document["runs"]):
            assert record["command"].startswith("bucketrank train ")
            assert f"--out runs/{record['name']} " in record["command"]
            assert len(record["commit"]) == 40
            assert record["processor"]
        assert all("--data.holdout 0.2" in trial["command"] for trial in document["trials"])
        assert not any("holdout" in run["command"] for run in document["runs"])
