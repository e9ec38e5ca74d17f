"""A run calibrates its final weights, and a resumed one ends with the same files."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.testing import assert_close

from bucketrank.evaluation.calibration import ScoreMap
from bucketrank.evaluation.calibration import fitting as calibrate_model
from bucketrank.training import train
from bucketrank.training.checkpoints import Checkpoints
from bucketrank.weights.files import read_weights

from . import tiny

A, B = 2.0, 3.0
FILES = ("weights.safetensors", "best.safetensors")


@pytest.fixture
def fixed_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the place of the fit: the detections of a tiny run are hardly ever right."""
    monkeypatch.setattr(calibrate_model, "fitted", lambda *_: ScoreMap((A,), (B,)))


def bytes_of(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


def trained_model(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the last checkpoint."""
    checkpoint = Checkpoints(folder / "checkpoints").load()
    assert checkpoint is not None
    model: dict[str, torch.Tensor] = checkpoint[0]["model"]
    return model


@pytest.mark.usefixtures("fixed_map")
def test_the_last_layer_holds_the_map_and_the_file_says_so(shapes: Path, tmp_path: Path) -> None:
    result = tiny.run(tmp_path / "run", shapes)
    before, (state, meta) = trained_model(tmp_path / "run"), read_weights(result.weights)
    changed = {name for name, tensor in state.items() if not torch.equal(tensor, before[name])}
    assert changed == {"head.classes.weight", "head.classes.bias"}
    assert_close(state["head.classes.weight"], before["head.classes.weight"] * A)
    assert_close(state["head.classes.bias"], before["head.classes.bias"] * A + B)
    assert meta.images == {"train": 12, "val": 3}
    assert meta.calibration is not None
    assert (meta.calibration.a, meta.calibration.b, meta.calibration.images) == ((A,), (B,), 12)
    errors = {"calibration/D-ECE before", "calibration/D-ECE after"}
    assert errors <= meta.metrics.keys()
    assert errors <= result.metrics.keys()
    with (tmp_path / "run" / "validation.csv").open(encoding="utf-8") as file:
        chosen = float(list(csv.DictReader(file))[-1]["threshold"])
    assert meta.threshold == pytest.approx(ScoreMap((A,), (B,)).threshold(chosen))


@pytest.mark.slow
@pytest.mark.usefixtures("fixed_map")
def test_a_run_resumed_at_its_end_writes_the_same_files(shapes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tiny.run(folder, shapes)
    whole = bytes_of(folder)
    assert all(read_weights(folder / name)[1].calibration is not None for name in FILES)
    tiny.run(folder, shapes, resume=True)
    assert bytes_of(folder) == whole
    (folder / "weights.safetensors").unlink()  # as if killed after best.safetensors was calibrated
    tiny.run(folder, shapes, resume=True)
    assert bytes_of(folder) == whole


@pytest.mark.slow
@pytest.mark.usefixtures("fixed_map")
def test_the_best_epoch_is_calibrated_once_if_it_is_not_the_last(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bucketrank.training.loop import Loop

    usual = Loop.evaluate

    def worse_in_the_second_epoch(loop: Loop) -> None:
        usual(loop)
        loop.progress.metrics["boxes/AP"] = 0.5 if loop.progress.epoch == 0 else 0.1

    monkeypatch.setattr(Loop, "evaluate", worse_in_the_second_epoch)
    folder = tmp_path / "run"
    tiny.run(folder, shapes)
    (best, best_meta), (last, _) = (read_weights(folder / f"{name}.safetensors") for name in ("best", "weights"))
    assert best_meta.metrics["boxes/AP"] == 0.5
    assert best_meta.calibration is not None
    assert not torch.equal(best["head.boxes.weight"], last["head.boxes.weight"])
    whole = bytes_of(folder)
    tiny.run(folder, shapes, resume=True)
    assert bytes_of(folder) == whole, "not folded a second time"


@pytest.mark.usefixtures("fixed_map")
def test_the_setting_turns_it_off(shapes: Path, tmp_path: Path) -> None:
    result = tiny.run(tmp_path / "run", shapes, "--trainer.calibrate false")
    state, meta = read_weights(result.weights)
    assert_close(state, dict(trained_model(tmp_path / "run")), rtol=0, atol=0)
    assert meta.calibration is None
    assert "calibration/D-ECE after" not in result.metrics


@pytest.mark.slow
@pytest.mark.usefixtures("fixed_map")
def test_the_number_of_images_is_a_setting(shapes: Path, tmp_path: Path) -> None:
    result = tiny.run(tmp_path / "run", shapes, "--trainer.calibration_images 5")
    calibration = read_weights(result.weights)[1].calibration
    assert calibration is not None
    assert calibration.images == 5


def test_scores_that_cannot_be_calibrated_stay_and_the_run_says_why(shapes: Path, tmp_path: Path) -> None:
    printed = io.StringIO()
    train(tiny.recipe("--loss focal"), shapes, tmp_path / "run", console=Console(file=printed, width=500))
    assert "The scores are not calibrated: " in printed.getvalue()
    assert "class score times a predicted quality" in printed.getvalue()
    state, meta = read_weights(tmp_path / "run" / "weights.safetensors")
    assert_close(state, dict(trained_model(tmp_path / "run")), rtol=0, atol=0)
    assert meta.calibration is None
