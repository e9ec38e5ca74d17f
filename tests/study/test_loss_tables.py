"""The tables of losses in README and on the results page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs.figures.loss_tables import BLOCK, PAGES, Studies, renew, tables

STUDIES = Studies.read()
DOCUMENTS = {
    "ATSS in one head": STUDIES.one_head,
    "Mask R-CNN": STUDIES.masks,
    "bucketed": STUDIES.bucketed,
    **STUDIES.published,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_study(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = [match[1] for match in BLOCK.finditer(text)]
    assert "headline" in names
    assert renew(text, STUDIES) == text, "run python -m docs.figures.loss_tables"


def test_the_results_page_shows_every_table() -> None:
    shown = {match[1] for match in BLOCK.finditer(PAGES[1].read_text(encoding="utf-8"))}
    assert shown == set(tables(STUDIES))


def test_a_table_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError, match="oranges"):
        renew("<!-- losses: oranges -->\n\n<!-- end -->\n", STUDIES)


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_every_run_names_its_command_commit_and_machine(document: dict[str, Any]) -> None:
    for record in (*document["trials"], *document["runs"]):
        assert record["command"].startswith("bucketrank train ")
        assert f"--out runs/{record['name']} " in record["command"]
        assert len(record["commit"]) == 40
        assert record["processor"]
    assert all("--data.holdout 0.2" in trial["command"] for trial in document["trials"])
    assert not any("holdout" in run["command"] for run in document["runs"])
