"""The regret of losses over several data sets, from hand-made files of studies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.study import regret as regret_module
from benchmarks.study.regret import (
    LossRegret,
    Regret,
    SetRuns,
    _regrets,
    compute_regret,
    read_runs,
    regret_after,
    set_rows,
)
from benchmarks.study.runs import StudyError
from bucketrank.evaluation.bootstrap import NUM_DRAWS

Curve = tuple[float, float]  # AP at a quarter and at the end


def record(
    data: str,
    loss: str,
    seed: int,
    curve: Curve,
    *,
    draws: Sequence[float] | None = None,
    steps: tuple[int, int] = (250, 1000),
    recipe: str = "atss-laptop",
) -> dict[str, Any]:
    """Return a run in the form of losses.json; without ``draws``, its AP is the same in all draws."""
    name = f"{data}-{loss}-lr0.001-fixed-seed{seed}"
    drawn = [NUM_DRAWS * [curve[0]], NUM_DRAWS * [curve[1]] if draws is None else list(draws)]
    return {
        "name": name,
        "command": f"bucketrank train {recipe} --data {data} --out runs/{name} --loss {loss} --trainer.seed {seed}",
        "commit": "0123456",
        "modified": False,
        "processor": "abacus",
        "date": "d",
        "metrics": dict.fromkeys(("AP", "AP50", "AP75", "oLRP"), curve[1]),
        "curve": [list(steps), list(curve)],
        "bootstrap": {str(step): {"AP": ap, "draws": of} for step, ap, of in zip(steps, curve, drawn, strict=True)},
    }


def write(path: Path, runs: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text(json.dumps({"trials": [], "runs": runs}))
    return path


def regret_of(path: Path, runs: Sequence[Mapping[str, Any]]) -> Regret:
    return compute_regret(read_runs([write(path / "losses.json", runs)]))


def test_regret_by_hand(tmp_path: Path) -> None:
    aps: dict[tuple[str, str], tuple[Curve, Curve]] = {
        ("cells", "rs"): ((30, 50), (30, 54)),
        ("cells", "focal"): ((36, 52), (34, 53)),
        ("nuclei", "rs"): ((20, 40), (20, 40)),
        ("nuclei", "focal"): ((10, 43), (10, 45)),
        ("road_signs", "rs"): ((9, 63), (9, 63)),
        ("road_signs", "focal"): ((8, 60), (8, 60)),
    }
    runs = [record(*key, seed, curve) for key, curves in aps.items() for seed, curve in enumerate(curves)]
    regret = regret_of(tmp_path, runs)
    # Cells: RS 52, focal 52.5. Nuclei: RS 40, focal 44. Road signs: RS 63, focal 60.
    assert set_rows(regret) == [["RS", "0.5", "4.0", "0.0", "4.0", "1.5"], ["focal", "0.0", "0.0", "3.0", "3.0", "1.0"]]
    rs, focal = regret.end
    assert rs.worst.without_one == (0.5, 4.0)
    assert rs.mean.without_one == (0.25, 2.25)
    assert focal.worst.without_one == (0.0, 3.0)
    # After a quarter: RS 30, 20, 9; focal 35, 10, 8.
    assert [each.worst.value for each in regret.quarter] == [5.0, 10.0]
    assert regret.steps["cells"] == (250, 1000)


def test_intervals_contain_the_true_regret(monkeypatch: pytest.MonkeyPatch) -> None:
    """In studies like ours, simulated with images and seeds that matter as much as in these."""
    monkeypatch.setattr(regret_module, "NUM_REPLICATES", 400)
    random = np.random.default_rng(0)
    losses = ["rs", "focal", "qfl", "vfl"]
    truth = 50 - np.array([[0, 1, 5, 6], [1, 4, 1, 0], [0, 2, 0, 1], [0, 4, 6, 5], [1, 3, 1, 0], [2, 1, 2, 3]])
    behind = truth.max(1, keepdims=True) - truth
    inside = []
    for _ in range(200):
        sets = []
        for aps in truth:
            images = random.normal(size=(len(losses), 101))  # the validation images, then draws of them
            noise = images[:, :1] + random.normal(scale=1.5, size=(len(losses), 3))
            of_seeds = aps[:, None] + noise + random.normal(scale=3, size=3)  # the last changes all losses alike
            sets.append(SetRuns("cells", (0, 1, 2), 1000, of_seeds, of_seeds[..., None] + images[:, None, 1:]))
        for loss, regret in enumerate(_regrets(losses, sets)):
            for estimate, summary in ((regret.worst, np.max), (regret.mean, np.mean)):
                inside.append(estimate.low <= summary(behind[:, loss]) <= estimate.high)
    assert 0.94 <= np.mean(inside) < 0.995


def test_regret_after_some_steps_varies_over_seeds_alone(tmp_path: Path) -> None:
    aps = {
        ("cells", "rs"): (30, 40),
        ("cells", "focal"): (35, 34),
        ("apples", "rs"): (50, 50),
        ("apples", "focal"): (48, 45),
    }
    steps = {"cells": (80, 1000), "apples": (130, 600)}

    def early(draws: list[float] | None) -> tuple[tuple[LossRegret, ...], dict[str, int]]:
        runs = [
            record(data, loss, seed, (ap, 60), draws=draws, steps=steps[data])
            for (data, loss), of_seeds in aps.items()
            for seed, ap in enumerate(of_seeds)
        ]
        return regret_after(read_runs([write(tmp_path / "losses.json", runs)]), 100)

    (rs, focal), evaluations = early(None)
    assert evaluations == {"cells": 80, "apples": 130}
    assert (rs.by_set, focal.by_set) == ({"cells": 0, "apples": 0}, {"cells": 0.5, "apples": 3.5})
    assert 0 == focal.worst.low < 3.5 < focal.worst.high
    noise = [0.0, 90.0] * (NUM_DRAWS // 2)
    assert early(noise)[0] == (rs, focal), "draws of images do not count"


def test_the_best_loss_is_chosen_in_each_draw(tmp_path: Path) -> None:
    """Two losses that take turns are both 0 or 10 behind, and never ahead."""
    half = NUM_DRAWS // 2
    draws = {"rs": half * [40.0] + half * [50.0], "focal": half * [50.0] + half * [40.0]}
    regret = regret_of(tmp_path, [record("cells", loss, 0, (0, 45), draws=draws[loss]) for loss in draws])
    for each in regret.end:
        assert (each.worst.value, each.worst.low, each.worst.high) == (0.0, 0.0, 10.0)
        assert each.worst.without_one is None
        assert each.smallest_worst == each.smallest_mean == pytest.approx(0.5, abs=0.05)
    assert sum(each.smallest_mean for each in regret.end) == pytest.approx(1.0)


def test_losses_share_images_and_seeds(tmp_path: Path) -> None:
    """Seeds and images that change the AP of all losses alike do not change the regret."""
    runs = [
        record("cells", loss, seed, (0, 45 + 9 * seed - gap), draws=[40 + n / 50 + 9 * seed - gap for n in range(500)])
        for loss, gap in (("rs", 0), ("focal", 2))
        for seed in range(3)
    ]
    rs, focal = regret_of(tmp_path, runs).end
    assert (rs.worst.low, rs.worst.high) == (0.0, 0.0)
    assert (focal.worst.low, focal.worst.high) == pytest.approx((2.0, 2.0))
    assert [(each.smallest_worst, each.smallest_mean) for each in (rs, focal)] == [(1.0, 1.0), (0.0, 0.0)]


def test_draws_without_objects_are_not_used(tmp_path: Path) -> None:
    draws = [float("nan")] + (NUM_DRAWS - 1) * [45.0]
    runs = [record("cells", "rs", 0, (0, 45), draws=draws), record("cells", "focal", 0, (0, 44))]
    _, focal = regret_of(tmp_path, runs).end
    assert (focal.mean.low, focal.mean.high) == (1.0, 1.0)


def test_sets_with_fewer_seeds_and_losses_without_runs(tmp_path: Path) -> None:
    first = [record("cells", loss, seed, (0, 50)) for loss in ("rs", "focal", "qfl") for seed in range(3)]
    second = [record("raccoon", loss, seed, (0, 60), steps=(150, 600)) for loss in ("rs", "focal") for seed in range(2)]
    second.append(record("raccoon", "rs", 2, (0, 90), steps=(150, 600)))
    files = [write(tmp_path / "one.json", first), write(tmp_path / "two.json", second)]
    regret = compute_regret(read_runs(files))
    assert regret.sets == {"cells": (0, 1, 2), "raccoon": (0, 1)}, "the seed that focal lacks does not count"
    assert regret.left_out == ("qfl",)
    assert [each.worst.value for each in regret.end] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "expected finished runs of study losses, got none"),
        ([record("a", "rs", 0, (1, 2))], "expected at least two losses with runs on all of a, got 1"),
        (
            [record("a", "rs", 0, (1, 2)), record("a", "focal", 1, (1, 2))],
            "a: expected a seed that all losses have, got none",
        ),
        (
            [record("a", "rs", 0, (1, 2)), record("a", "focal", 0, (1, 2), steps=(150, 600))],
            "expected runs of one length with the same evaluations, got runs that end after 600, 1000 steps",
        ),
        (
            [record("a", "rs", 0, (1, 2)), record("b", "rs", 0, (1, 2), recipe="paa-laptop")],
            "expected runs of one recipe, got atss-laptop, paa-laptop",
        ),
        (
            [record("a", "rs", 0, (1, 2)), record("a", "focal", 0, (1, 2)) | {"bootstrap": {}}],
            "a-focal-lr0.001-fixed-seed0: expected bootstrap draws after step 250, got none",
        ),
        (
            [record("a", "rs", 0, (1, 2)) | {"command": "bucketrank train atss-laptop --data a --out runs/a"}],
            "a-rs-lr0.001-fixed-seed0: expected a run of study losses, got another",
        ),
    ],
)
def test_runs_that_do_not_fit_together(tmp_path: Path, runs: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        regret_of(tmp_path, runs)


def test_runs_of_later_files_replace_earlier_ones(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "one.json", [record("a", "rs", seed, (1, 2)) for seed in range(2)]),
        write(tmp_path / "two.json", [record("a", "rs", 1, (3, 4))]),
    ]
    assert [run.metrics["AP"] for run in read_runs(files).values()] == [2, 4]
    assert [run.metrics["AP"] for run in read_runs(files[::-1]).values()] == [2, 2]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [record("road_signs", loss, seed, (3, 5)) for loss in ("rs", "focal") for seed in range(2)]
    file = write(tmp_path / "losses.json", runs)
    out = tmp_path / "out"
    assert main(["study", "regret", "--merge", str(file), "--out", str(out)]) == 0
    assert "| loss | road signs | worst (95 %) | without one set |" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {f"regret.{ending}" for ending in ("md", "json", "png", "svg")}
    assert json.loads((out / "regret.json").read_text())["end"][0]["worst"]["value"] == 0.0
    for words, message in (
        ([], "regret: expected --merge, the losses.json files"),
        (["--merge", str(file), "--seeds", "2"], "takes --merge and --out; remove --seeds"),
    ):
        assert main(["study", "regret", *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["study", "regret", "--merge", str(tmp_path / "missing.json")]) == 1
    assert "missing.json: cannot be read" in capsys.readouterr().err
