"""EMA, early stopping, accumulation and loggers, in whole and in resumed runs."""

import copy
import csv
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress as ProgressBar
from safetensors.torch import load_file
from torch.testing import assert_close

from bucketrank.data import find_splits
from bucketrank.errors import RecipeError
from bucketrank.settings import from_dict, load_recipe
from bucketrank.training import log
from bucketrank.training.checkpoints import Checkpoints, Progress
from bucketrank.training.log import CsvTable, RunLog
from bucketrank.training.loop import Loop
from bucketrank.training.optimiser import EMA
from bucketrank.training.processes import Interrupted
from bucketrank.training.run import train
from bucketrank.weights.load import build_detector

from . import tiny
from .test_resume import assert_same_run

# Without calibration the weights files hold exactly what was averaged.
AVERAGED = """
  --schedule.ema 0.9 --data.augment scale_jitter,zoom_out,iou_crop --trainer.checkpoint_steps 1
  --trainer.calibrate false
"""


def test_the_average_of_two_updates_by_hand():
    model: Any = build_detector(tiny.recipe(), num_classes=2)
    average = EMA(model, decay=0.15)
    weights = [copy.deepcopy(model.head.classes.weight.detach())]
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
            for buffer in model.buffers():
                buffer.add_(1)
        weights.append(copy.deepcopy(model.head.classes.weight.detach()))
        average.update(model)
    # The ramp gives decays of 1/10 and 2/11, of which the second is limited to 0.15.
    first = 0.1 * weights[0] + 0.9 * weights[1]
    averaged: Any = average.detector
    torch.testing.assert_close(averaged.head.classes.weight.detach(), 0.15 * first + 0.85 * weights[2])
    assert all(torch.equal(a, b) for a, b in zip(average.detector.buffers(), model.buffers(), strict=True))
    assert not average.detector.training


@pytest.fixture(scope="module")
def averaged(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averaged") / "run"
    tiny.run(folder, shapes, AVERAGED)
    return folder


def test_the_average_is_evaluated_and_saved(averaged, shapes, tmp_path, monkeypatch):
    updated = []
    usual = EMA.update

    def kept(average, detector):
        usual(average, detector)
        updated.append({name: tensor.clone() for name, tensor in average.detector.state_dict().items()})

    monkeypatch.setattr(EMA, "update", kept)
    tiny.run(tmp_path / "run", shapes, AVERAGED)
    assert len(updated) == 6, "one update per step"
    saved = load_file(tmp_path / "run" / "weights.safetensors")
    assert all(torch.equal(tensor, updated[-1][name]) for name, tensor in saved.items())
    plain = tiny.run(tmp_path / "plain", shapes, AVERAGED.replace("--schedule.ema 0.9", "")).folder
    assert not torch.equal(
        load_file(plain / "weights.safetensors")["head.classes.weight"], saved["head.classes.weight"]
    )
    assert_same_run(tmp_path / "run", averaged)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4])
def test_a_resumed_run_has_the_same_average(step, averaged, shapes, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=step)
        with pytest.raises(Interrupted):
            tiny.run(tmp_path / "run", shapes, AVERAGED)
    tiny.run(tmp_path / "run", shapes, AVERAGED, resume=True)
    assert_same_run(tmp_path / "run", averaged)


def test_the_decay_stays_in_a_resumed_run(averaged, shapes):
    with pytest.raises(RecipeError, match=r"began with schedule\.ema 0\.9, got 0\.5"):
        tiny.run(averaged, shapes, AVERAGED.replace("0.9", "0.5"), resume=True)


def fix_ap(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Replace the AP of each evaluation by the next of ``values``."""
    usual, left = Loop.close_epoch, iter(values)

    def close(loop, *, evaluated):
        loop.progress.metrics = {**loop.progress.metrics, "boxes/AP": next(left)}
        usual(loop, evaluated=evaluated)

    monkeypatch.setattr(Loop, "close_epoch", close)


def evaluated_epochs(folder: Path) -> list[str]:
    with (folder / "validation.csv").open() as file:
        return [row["epoch"] for row in csv.DictReader(file)]


@pytest.mark.slow
def test_a_run_stops_after_evaluations_without_a_higher_ap(shapes, tmp_path, monkeypatch):
    flags = "--schedule.epochs 6 --schedule.early_stop 2"
    with monkeypatch.context() as patch:
        fix_ap(patch, [0.1, 0.3, 0.2, 0.3])
        result = tiny.run(tmp_path / "run", shapes, flags)
    assert evaluated_epochs(result.folder) == ["1", "2", "3", "4"]
    assert result.steps == 12
    assert (result.folder / "weights.safetensors").is_file()
    again = tiny.run(result.folder, shapes, flags, resume=True)
    assert again.steps == 12, "a run that stopped early has ended"
    with monkeypatch.context() as patch:
        fix_ap(patch, [0.1, 0.2, 0.15, 0.3, 0.25, 0.4])
        assert tiny.run(tmp_path / "other", shapes, flags).steps == 18, "a higher AP starts the count again"


@pytest.mark.slow
def test_a_resumed_run_remembers_how_long_it_has_waited(shapes, tmp_path, monkeypatch):
    flags = "--schedule.epochs 6 --schedule.early_stop 2"
    with monkeypatch.context() as patch:
        fix_ap(patch, [0.3, 0.2])
        tiny.stop_in(patch, step=6)
        with pytest.raises(Interrupted):
            tiny.run(tmp_path / "run", shapes, flags)
    with monkeypatch.context() as patch:
        fix_ap(patch, [0.25])
        assert tiny.run(tmp_path / "run", shapes, flags, resume=True).steps == 9


def test_the_tables_hold_the_mean_of_the_parts_of_a_step(shapes, tmp_path, monkeypatch):
    losses: list[float] = []
    usual = Loop.compute_loss

    def kept(loop, batch):
        loss = usual(loop, batch)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(Loop, "compute_loss", kept)
    # 6 parts of 2 images per epoch, in steps of 4 parts: the last step of an epoch has 2.
    run = tiny.run(tmp_path / "run", shapes, "--schedule.accumulate 4 --data.batch_size 8 --schedule.epochs 2").folder
    steps = [losses[0:4], losses[4:6], losses[6:10], losses[10:12]]
    with (run / "train.csv").open() as file:
        logged = [float(row["loss"]) for row in csv.DictReader(file)]
    assert logged == pytest.approx([sum(parts) / len(parts) for parts in steps], rel=1e-5)


def test_a_csv_logger_gets_what_the_tables_get_and_changes_nothing(shapes, tmp_path, monkeypatch):
    plain = tiny.run(tmp_path / "plain", shapes).folder
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=4)
        with pytest.raises(Interrupted):
            tiny.run(tmp_path / "run", shapes, "--trainer.loggers csv")
    tiny.run(tmp_path / "run", shapes, "--trainer.loggers csv", resume=True)
    assert_same_run(tmp_path / "run", plain)
    logged = sorted((tmp_path / "run" / "csv").glob("version_*/metrics.csv"))
    assert len(logged) == 2, "one for each start"
    assert "boxes/AP" in logged[-1].read_text()


@pytest.mark.slow
def test_a_logger_that_fails_is_left_out_and_the_run_goes_on(shapes, tmp_path, monkeypatch, capfd):
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("server\x1b[2J does not answer")

    monkeypatch.setattr("lightning.fabric.loggers.csv_logs.CSVLogger.log_metrics", refuse)
    run = tiny.run(tmp_path / "run", shapes, "--trainer.loggers csv").folder
    assert (run / "weights.safetensors").is_file()
    (line,) = [each for each in capfd.readouterr().err.splitlines() if "loggers" in each]
    assert line == (
        r"bucketrank: trainer.loggers: CSVLogger failed at step 1 (ConnectionError: server\x1b[2J does not answer); "
        "the run continues without it, and train.csv and validation.csv have all numbers"
    )


def test_a_logger_that_fails_at_the_end_costs_no_weights(shapes, tmp_path, monkeypatch, capfd):
    def refuse(*_: object) -> None:
        raise ConnectionError("server does not answer")

    monkeypatch.setattr("lightning.fabric.loggers.csv_logs.CSVLogger.finalize", refuse)
    run = tiny.run(tmp_path / "run", shapes, "--trainer.loggers csv").folder
    assert (run / "weights.safetensors").is_file()
    assert "CSVLogger failed at the end (ConnectionError: server does not answer)" in capfd.readouterr().err


def test_every_step_has_the_mean_gradient_of_its_parts(shapes, tmp_path, monkeypatch):
    """The last step of an epoch may have fewer parts than ``schedule.accumulate``."""
    scales: list[float] = []

    def kept(loop, batch):
        loss = usual(loop, batch).detach()
        factor = torch.ones((), requires_grad=True)
        factor.register_hook(lambda gradient: scales.append(gradient.item() / loss.item()))
        return loss * factor

    usual = Loop.compute_loss
    monkeypatch.setattr(Loop, "compute_loss", kept)
    tiny.run(tmp_path / "run", shapes, "--schedule.accumulate 4 --data.batch_size 8 --schedule.epochs 1")
    assert scales == pytest.approx([1 / 4] * 4 + [1 / 2] * 2)


def test_a_logger_that_cannot_start_is_named_before_the_first_step(shapes, tmp_path, monkeypatch):
    def refuse(_: Path) -> None:
        raise RuntimeError("no store\nat all")

    monkeypatch.setitem(log._LOGGERS, "csv", refuse)
    with pytest.raises(
        RecipeError, match=r"^trainer.loggers: csv cannot start \(RuntimeError: no store\); set it up or leave it out$"
    ):
        train(tiny.recipe("--trainer.loggers csv"), shapes, tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_only_the_first_process_has_loggers(tmp_path, monkeypatch):
    assert len(log.build_loggers(["csv"], tmp_path)) == 1
    monkeypatch.setenv("RANK", "1")
    assert log.build_loggers(["csv"], tmp_path) == []


def test_mlflow_writes_a_database_in_the_run_folder_unless_a_server_is_named(tmp_path, monkeypatch):
    given: list[dict[str, Any]] = []
    loggers = SimpleNamespace(MLFlowLogger=lambda **arguments: given.append(arguments))
    monkeypatch.setitem(sys.modules, "lightning.pytorch.loggers", loggers)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log.build_loggers(["mlflow"], tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    log.build_loggers(["mlflow"], tmp_path)
    assert [each["tracking_uri"] for each in given] == [
        f"sqlite:///{tmp_path.as_posix()}/mlflow/mlflow.db",
        "http://127.0.0.1:5000",
    ]
    assert (tmp_path / "mlflow").is_dir(), "SQLite creates no folders"


def test_a_terminal_shows_a_bar_that_leaves_only_the_epochs(shapes, tmp_path, monkeypatch):
    usual = ProgressBar.update
    # Otherwise a thread draws ten times a second, which misses the shortest steps.
    monkeypatch.setattr(ProgressBar, "update", lambda *args, **options: usual(*args, **options, refresh=True))
    printed = io.StringIO()
    terminal = Console(file=printed, force_terminal=True, width=100)
    train(tiny.recipe("--schedule.epochs 2"), shapes, tmp_path / "run", console=terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.getvalue())
    assert "evaluating" in text
    assert re.search(r"epoch 2/2 .*\d+/\d+ .* left .*rank \d", text)
    for epoch in (1, 2):
        assert text.count(f"epoch {epoch}/2  AP ") == 1


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_of_a_logger_is_named(name, shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(log, "find_spec", lambda _: None)
    with pytest.raises(RecipeError, match=f"trainer.loggers: {name} needs the package {name}; install with: pip"):
        train(tiny.recipe(f"--trainer.loggers {name}"), shapes, tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_held_out_images_are_evaluated_and_their_detections_kept(shapes, tmp_path):
    result = tiny.run(tmp_path / "run", shapes, "--data.holdout 0.25 --trainer.keep_detections")
    splits = find_splits(shapes).with_holdout(0.25)
    assert splits.train is not None
    assert splits.val is not None
    parts = (splits.train, splits.val)
    train_ids, held_out_ids = ({image["id"] for image in split.read()["images"]} for split in parts)
    assert not train_ids & held_out_ids
    assert train_ids | held_out_ids == {
        image["id"] for image in json.loads((shapes / "train.json").read_text())["images"]
    }
    files = sorted((result.folder / "detections").iterdir())
    assert len(files) == 2
    kept = json.loads(files[-1].read_text())
    assert {record["image_id"] for record in kept} <= held_out_ids
    assert kept


def test_unknown_names_are_refused():
    atss = {"detector": {"name": "atss"}}
    with pytest.raises(
        RecipeError, match=r"trainer\.loggers: expected one of .*got 'wandbb'; the nearest is \"wandb\""
    ):
        from_dict({**atss, "trainer": {"loggers": ["wandbb"]}})
    with pytest.raises(RecipeError, match=r"data\.augment: expected one of .*got 'zoom'"):
        from_dict({**atss, "data": {"augment": ["zoom"]}})
    with pytest.raises(RecipeError, match=r"schedule\.ema: expected a number above 0 and below 1"):
        from_dict({**atss, "schedule": {"ema": 1.0}})


def test_a_recipe_that_needs_weights_to_start_from(shapes, tmp_path):
    with pytest.raises(RecipeError, match=r"init: expected the weights of a mask_rcnn trained on COCO.*--init RUN/"):
        train("mask-rcnn-r50-cityscapes-rs", shapes, out=tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def checkpoint(folder: Path) -> dict[str, Any]:
    loaded = Checkpoints(folder / "checkpoints").load()
    assert loaded is not None
    return loaded[0]


class SlowSteps:
    """A clock on which each training step takes ``step`` seconds and each evaluated batch takes ``evaluation``."""

    def __init__(self, patch: pytest.MonkeyPatch, *, step: float = 1.0, evaluation: float = 0.0) -> None:
        self.now = 0.0
        patch.setattr("bucketrank.training.loop.time", SimpleNamespace(monotonic=lambda: self.now))
        for name, seconds in (("compute_loss", step), ("evaluate_batch", evaluation)):
            patch.setattr(Loop, name, self._slow(getattr(Loop, name), seconds))

    def _slow(self, usual: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slow(loop: Loop, batch: Any) -> Any:
            self.now += seconds
            return usual(loop, batch)

        return slow


def test_a_time_budget_replaces_the_epochs(shapes, tmp_path, monkeypatch):
    SlowSteps(monkeypatch)
    result = tiny.run(tmp_path / "run", shapes, "--trainer.max_time 40s --trainer.validate_every 3")
    assert result.steps == 40, "two epochs would have 6 steps"
    steps, rates = CsvTable(tmp_path / "run" / "train.csv").column("lr")
    assert steps[-1] == 40
    # The milestone after the first of two epochs stands in the middle of the run.
    assert [rate for rate in rates[10:] if rate != rates[-1]] == [rates[10]] * 10
    assert_close(rates[-1], rates[10] / 10)
    evaluated, _ = CsvTable(tmp_path / "run" / "validation.csv").column("boxes/AP")
    assert evaluated == [9, 18, 27, 36, 40]


def test_a_time_budget_counts_evaluations(shapes, tmp_path, monkeypatch):
    images = len(json.loads((shapes / "val.json").read_text())["images"])
    SlowSteps(monkeypatch, evaluation=3.0 / images)  # an epoch: three steps and an evaluation of three seconds
    assert tiny.run(tmp_path / "run", shapes, "--trainer.max_time 42s").steps == 21


def test_the_time_left_is_within_the_budget(tmp_path, capsys):
    fabric: Any = SimpleNamespace(is_global_zero=True)
    schedule: Any = SimpleNamespace(total_steps=10**9, total_epochs=3)
    run_log = RunLog(
        tmp_path,
        Console(),
        fabric=fabric,
        schedule=schedule,
        log_every=1,
        max_seconds=60.0,
    )
    run_log.epoch(Progress(step=1, seconds=20.0), evaluated=False)
    run_log.epoch(Progress(step=1, seconds=70.0), evaluated=False)
    first, second = capsys.readouterr().out.splitlines()
    assert (first, second) == ("epoch 1/3    40 s left", "epoch 1/3    0 s left")


def test_a_time_budget_ends_the_run_with_an_evaluation(shapes, tmp_path):
    result = tiny.run(tmp_path / "run", shapes, "--trainer.max_time 0.001s --trainer.validate_every 5")
    assert result.steps == 1
    assert result.weights.is_file()
    assert "boxes/AP" in result.metrics
    assert checkpoint(tmp_path / "run")["seconds"] > 0
    assert tiny.run(tmp_path / "run", shapes, "--trainer.max_time 0.001s", resume=True).steps == 1, "it is finished"


def test_a_resumed_run_keeps_its_used_time(shapes, tmp_path, monkeypatch):
    SlowSteps(monkeypatch)
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=13)
        with pytest.raises(Interrupted):
            tiny.run(tmp_path / "run", shapes, "--trainer.max_time 30s")
    before = checkpoint(tmp_path / "run")
    assert (before["seconds"], before["planned"]) == (14.0, 30)
    assert tiny.run(tmp_path / "run", shapes, "--trainer.max_time 30s", resume=True).steps == 30


def test_another_time_extends_a_finished_run(shapes, tmp_path, monkeypatch):
    SlowSteps(monkeypatch)
    assert tiny.run(tmp_path / "run", shapes, "--trainer.max_time 12s").steps == 12
    first = (tmp_path / "run" / "weights.safetensors").read_bytes()
    assert checkpoint(tmp_path / "run")["epoch"] == 4, "of 3 steps each"
    assert tiny.run(tmp_path / "run", shapes, "--trainer.max_time 20s", resume=True).steps == 20
    assert checkpoint(tmp_path / "run")["epoch"] == 7, "the last one is cut short"
    assert tiny.run(tmp_path / "run", shapes, "--trainer.max_time 24s", resume=True).steps == 24
    assert checkpoint(tmp_path / "run")["epoch"] == 8, "the seventh was reopened"
    assert (tmp_path / "run" / "weights.safetensors").read_bytes() != first
    assert tiny.run(tmp_path / "run", shapes, "--trainer.max_time 16s", resume=True).steps == 24, "over already"


@pytest.mark.parametrize("time", ["2", "0h", "-1h", "2 hours", "nan", "1d"])
def test_a_time_needs_a_unit(time):
    with pytest.raises(RecipeError, match=r"trainer\.max_time: expected a time above 0 such as 2h, 90m or 45s, got"):
        load_recipe("atss-laptop", {"trainer.max_time": time})
