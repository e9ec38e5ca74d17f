"""The figure and the tables of empty images, look-alikes and rare classes, against the runs behind them."""

from __future__ import annotations

import shlex
from itertools import chain

import matplotlib.pyplot as plt
import numpy as np
import pytest

from benchmarks.study.regret import read_runs
from docs.figures.losses import LONGER_TRIALS, STUDIES
from docs.figures.regimes import (
    LOOK_ALIKES,
    MEMORY_SET,
    MEMORY_SHARES,
    RARE_SET,
    Study,
    class_table,
    memory_table,
    over_empty,
    read,
    read_empty,
    side_by_side,
)
from docs.figures.theme import PALETTES

LOSSES = ["rs", "ap", "focal", "qfl", "vfl", "mal"]


def cells(table: str) -> tuple[list[str], list[list[str]]]:
    """Split a Markdown table into its columns and its rows."""
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return head, rows


def final_aps(study: Study, loss: str) -> list[float]:
    """Return the AP of the runs of a loss, from their own records."""
    return [run["metrics"]["AP"] for run in study["runs"] if f" --loss {loss} " in run["command"]]


def test_empty_images_have_every_loss_and_two_seeds():
    studies = read_empty()
    assert {0, *MEMORY_SHARES} <= set(studies[MEMORY_SET])
    for by_share in studies.values():
        assert len(by_share) >= 2
        assert list(by_share) == sorted(by_share)
        for study in by_share.values():
            assert [entry["loss"] for entry in study["sets"][0]["losses"]] == LOSSES
            assert all(len(final_aps(study, loss)) == 2 for loss in LOSSES)


def test_runs_with_empty_images_kept_them_and_differ_in_nothing_else():
    for data, by_share in read_empty().items():
        for share, study in by_share.items():
            for run in study["runs"]:
                words = shlex.split(run["command"])
                values = dict(zip(words[3::2], words[4::2], strict=True))
                assert values["--data"] == (f"{data}-{share}" if share else data)
                assert values["--data.keep_empty"] == "true"
                assert values["--schedule.max_steps"] == "300"
                assert "--loss.memory" not in values


def test_the_figure_shows_the_mean_of_each_loss_at_each_share():
    studies = read_empty()
    figure = over_empty(studies, PALETTES["light"])
    for axes, by_share in zip(figure.axes, studies.values(), strict=True):
        drawn = {bars.get_label(): bars[0].get_ydata() for bars in axes.containers}
        assert list(drawn) == ["RS", "AP", "focal", "QFL", "VFL", "MAL"]
        for loss, line in zip(LOSSES, drawn.values(), strict=True):
            np.testing.assert_allclose(line, [np.mean(final_aps(study, loss)) for study in by_share.values()])
        assert [label.get_text() for label in axes.get_xticklabels()] == [f"{share} %" for share in by_share]
    plt.close(figure)


def test_a_difference_is_that_of_the_means():
    studies = {LOOK_ALIKES[name]: read(f"look-alikes-{name}") for name in LOOK_ALIKES}
    columns, rows = cells(side_by_side(studies))
    assert columns == ["loss", *chain.from_iterable((f"AP: {title}", "RS minus this") for title in studies)]
    for place in (1, 3):
        ours, *others = ((float(row[place]), row[place + 1]) for row in rows)
        assert ours[1] == "\N{EN DASH}"
        for ap, difference in others:
            assert float(difference.split()[0]) == pytest.approx(ours[0] - ap, abs=0.11)  # rounded cells


def test_the_memory_is_compared_with_the_same_runs_without_it():
    plain = read_empty()[MEMORY_SET]
    memory = {share: read(f"memory-{MEMORY_SET}-{share}") for share in MEMORY_SHARES}
    assert all("--loss.memory 1024" in run["command"] for study in memory.values() for run in study["runs"])
    columns, rows = cells(memory_table(plain, memory))
    assert len(columns) == 1 + 3 * len(MEMORY_SHARES)
    for loss, (_, *numbers) in zip(("rs", "ap"), rows, strict=True):
        for place, share in enumerate(MEMORY_SHARES):
            without, remembered, difference = numbers[3 * place : 3 * place + 3]
            assert without == f"{np.mean(final_aps(plain[share], loss)):.1f}"
            assert remembered == f"{np.mean(final_aps(memory[share], loss)):.1f}"
            assert float(difference.split()[0]) == pytest.approx(float(remembered) - float(without), abs=0.11)


def test_classes_are_averaged_over_the_seeds():
    runs = read_runs([*STUDIES, *LONGER_TRIALS])
    columns, rows = cells(class_table(runs, RARE_SET))
    assert columns[1:] == ["blackpod", "frostypod", "healthy", "mirid"]
    assert [row[0] for row in rows] == ["RS", "focal", "QFL", "VFL", "soft BCE", "RS + QFL", "AP"]
    own = [run["class_ap"]["healthy"] for run in read("atss-600")["runs"] if run["name"].startswith(f"{RARE_SET}-rs-")]
    assert len(own) == 3
    assert rows[0][3].startswith(f"{np.mean(own):.1f} ")
    longer = [
        run["class_ap"]["healthy"] for run in read("trials-300-cacao")["runs"] if " --loss focal " in run["command"]
    ]
    assert rows[1][3].startswith(f"{np.mean(longer):.1f} ")
