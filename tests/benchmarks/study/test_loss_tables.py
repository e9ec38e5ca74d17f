"""The tables of losses in README and on the results page."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.figures.loss_tables import BLOCK, PAGES, Studies, regret_table, renew, tables


@pytest.fixture(scope="module")
def studies() -> Studies:
    return Studies.read()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_study(page: Path, studies: Studies) -> None:
    text = page.read_text(encoding="utf-8")
    assert BLOCK.search(text)
    assert renew(text, studies) == text, "run python -m docs.figures.loss_tables"


def test_the_results_page_shows_every_table(studies: Studies) -> None:
    shown = {match[1] for match in BLOCK.finditer(PAGES[1].read_text(encoding="utf-8"))}
    assert shown == set(tables(studies))


def test_regret_is_the_distance_to_the_best_loss_of_each_set() -> None:
    aps = {"bccd-rs": (50, 54), "bccd-focal": (52, 53), "nuclei-rs": (40, 40), "nuclei-focal": (43, 45)}
    runs = [
        {
            "name": f"{name}-seed{seed}",
            "command": f"train --loss {name.split('-')[1]} --seed {seed}",
            "metrics": {"AP": ap},
        }
        for name, of_seeds in aps.items()
        for seed, ap in enumerate(of_seeds)
    ]
    losses = [{"loss": "rs"}, {"loss": "focal"}]
    table = regret_table({"sets": [{"data": name, "losses": losses} for name in ("bccd", "nuclei")], "runs": runs})
    # Blood cells: RS 52, focal 52.5. Nuclei: RS 40, focal 44.
    assert table.splitlines()[2:] == ["| RS | 0.5 | 4.0 | 4.0 |", "| focal | 0.0 | 0.0 | 0.0 |"]


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
