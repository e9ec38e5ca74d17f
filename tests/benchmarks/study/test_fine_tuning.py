"""The fine-tuning study, with the smallest possible settings."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.study import fine_tuning
from benchmarks.study.fine_tuning import COLUMNS, FineTuningSettings, run_fine_tuning, table
from bucketrank.evaluation import BootstrapAP
from bucketrank.integrations.torchvision import use_ranking_loss

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_both_losses_start_from_the_same_weights_with_new_classes(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ranked, said = [], [], io.StringIO()
    steps: list[int] = []
    usual = fine_tuning.train

    def record(model: Any, split: Any, **options: Any) -> None:
        steps.append(options["steps"])
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        started.append((len(split.read()["images"]), options["lr"], options["seed"], weights))
        usual(model, split, **options)

    monkeypatch.setattr(fine_tuning, "train", record)
    monkeypatch.setattr(fine_tuning, "BATCH", 2)
    monkeypatch.setattr(fine_tuning, "use_ranking_loss", lambda model: ranked.append(use_ranking_loss(model)))
    settings = FineTuningSettings(
        shapes,
        (shapes,),
        name="test_efficientnet",
        rates=(1e-4, 1e-3),
        seeds=2,
        pretraining_steps=2,
        steps=1,
        size=64,
    )
    path = run_fine_tuning(settings, tmp_path / "out", console=Console(file=said))

    assert steps == [2] + [1] * 8
    _, *runs = started
    assert [run[0] for run in runs] == [10, 10, 12, 12] * 2, "trials hold out a fifth of 12 images"
    assert [run[2] for run in runs] == [0, 0, 0, 1] * 2
    document = json.loads(path.with_suffix(".json").read_text())
    for loss, of_loss in (("own", runs[:4]), ("rs", runs[4:])):
        chosen = document["results"][0][loss]["lr"]
        assert [run[1] for run in of_loss] == [1e-4, 1e-3, chosen, chosen]
    for first, second in zip(runs[:4], runs[4:], strict=True):
        assert all(torch.equal(first[3][name], tensor) for name, tensor in second[3].items()), "own and RS"
    key = "head.classification_head.cls_logits.weight"
    assert not torch.equal(started[0][3][key], runs[0][3][key]), "new class layers"
    assert len(ranked) == 4
    lines = [line.split(":")[0] for line in said.getvalue().splitlines()[:3]]
    assert lines == ["pretrained on shapes", "shapes, own", "shapes, rs"]
    assert document["table"] in path.read_text()


def test_the_table_says_whether_rs_is_ahead() -> None:
    def results(*aps: float) -> dict[str, Any]:
        runs = [BootstrapAP(ap, ap + np.array([-0.1, 0.0, 0.1])) for ap in aps]
        return {"lr": 5e-4, "trials": {}, "runs": runs}

    head, _, own, rs = table([{"data": "nuclei", "own": results(20.0, 21.0), "rs": results(30.0, 31.0)}]).splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == list(COLUMNS)
    assert own == "| nuclei | own (focal and L1) | 0.0005 | 20.5 ± 0.7 | \N{EN DASH} |"
    assert rs == "|  | RS | 0.0005 | 30.5 ± 0.7 | +10.0 (+10.0 to +10.0) ahead |"


def test_wrong_flags_are_one_line(shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fine-tuning", str(shapes), "--data", str(shapes), "--seeds", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    expected = "expected --seeds, --pretraining-steps, --steps and --size of at least 1 and --rates above 0"
    assert f"{expected}, got 0, 1000, 300, 256 and 2.5e-4" in line
