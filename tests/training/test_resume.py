"""An interrupted and resumed run ends bit-identical to an uninterrupted one."""

import csv
import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from rich.console import Console
from safetensors.torch import load_file

from bucketrank.errors import DataError, RecipeError
from bucketrank.settings import load_recipe, parse_flags
from bucketrank.training import run as run_module
from bucketrank.training.checkpoints import Checkpoints
from bucketrank.training.loop import Loop
from bucketrank.training.processes import Interrupted
from bucketrank.training.run import train
from bucketrank.weights.files import read_weights, save_weights
from bucketrank.weights.load import load_model

from . import tiny

# Multi-scale inputs and flips: what is drawn by chance must be drawn again. aLRP carries a state of its own.
FLAGS = "--loss alrp --inputs.min_size 48,64 --trainer.checkpoint_steps 2 --schedule.epochs 3"


@pytest.fixture(scope="module")
def whole(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that never was interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    tiny.run(folder, shapes, FLAGS)
    return folder


def assert_same_run(one: Path, other: Path) -> None:
    for name in ("weights", "best"):
        mine, theirs = load_file(one / f"{name}.safetensors"), load_file(other / f"{name}.safetensors")
        assert mine.keys() == theirs.keys()
        for key, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=0, equal_nan=True)
    for name in ("train.csv", "validation.csv"):
        assert rows(one / name) == rows(other / name)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


@pytest.fixture
def ctrl_c():
    """Ctrl-C as a terminal has it; whoever started the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("step", [0, 1, 2, 4, 8], ids=lambda step: f"in step {step + 1}")
def test_after_ctrl_c(step, whole, shapes, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT)  # Python's own, unless the tests run in the background
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=step)
        with pytest.raises(Interrupted):  # in the last step, too: the evaluation is left
            tiny.run(tmp_path / "run", shapes, FLAGS)
    assert signal.getsignal(signal.SIGINT) is before
    assert Checkpoints(tmp_path / "run" / "checkpoints").load() is not None
    tiny.run(tmp_path / "run", shapes, FLAGS, resume=True)
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_from_the_checkpoint_before_a_damaged_one(whole, shapes, tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=6)
        with pytest.raises(Interrupted):
            tiny.run(tmp_path / "run", shapes, FLAGS)
    last = tmp_path / "run" / "checkpoints" / "last.safetensors"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    tiny.run(tmp_path / "run", shapes, FLAGS, resume=True)
    assert "resuming from" in caplog.text
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_with_a_score_memory(shapes, tmp_path, monkeypatch):
    """The queues belong to the checkpoint: the steps after a resume rank the same scores."""
    flags = "--loss.memory 32 --schedule.epochs 2"
    tiny.run(tmp_path / "whole", shapes, flags)
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=2)
        with pytest.raises(Interrupted):
            tiny.run(tmp_path / "stopped", shapes, flags)
    tiny.run(tmp_path / "stopped", shapes, flags, resume=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    stored = load_file(tmp_path / "whole" / "weights.safetensors")["criterion.memory.targets"]
    assert (stored[0, :, -1] >= 0).all()  # both kinds are full


def test_a_finished_run_is_only_written_out_again(whole, shapes, tmp_path):
    tiny.run(tmp_path / "run", shapes, FLAGS)
    (tmp_path / "run" / "weights.safetensors").unlink()
    tiny.run(tmp_path / "run", shapes, FLAGS, resume=True)
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("name", ["atss-laptop", "faster-rcnn-laptop"])
def test_a_laptop_recipe_as_it_is(name, shapes, tmp_path, monkeypatch):
    """The recipe's own optimiser, backbone, memory format and input sizes; only the run is short."""
    flags = "--backbone.weights null --data.workers 0 --schedule.epochs 2 --trainer.log_every 1 --trainer.pictures 0"

    def train_here(folder: str, *, resume: bool = False) -> None:
        torch.set_num_threads(1)
        with Path(os.devnull).open("w") as nowhere:
            chosen = load_recipe(name, parse_flags(flags.split()))
            train(chosen, shapes, tmp_path / folder, resume=resume, console=Console(file=nowhere))

    train_here("whole")
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=2)
        with pytest.raises(Interrupted):
            train_here("stopped")
    train_here("stopped", resume=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.usefixtures("ctrl_c")
def test_mixed_images_are_mixed_again(shapes, tmp_path, monkeypatch):
    flags = "--data.mosaic 0.7 --data.mixup 0.5 --data.copy_paste 0.5"
    assert tiny.recipe(flags).schedule.optimiser == "adamw"
    tiny.run(tmp_path / "whole", shapes, flags)
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=1)  # in the middle of the first epoch; the second is not mixed
        with pytest.raises(Interrupted):
            tiny.run(tmp_path / "run", shapes, flags)
    tiny.run(tmp_path / "run", shapes, flags, resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    tiny.run(tmp_path / "plain", shapes)
    assert rows(tmp_path / "plain" / "train.csv")[0] != rows(tmp_path / "whole" / "train.csv")[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fp16 is not supported on CPU")  # Lightning then uses bfloat16
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_trains_and_resumes(precision, shapes, tmp_path, monkeypatch):
    # In 64 pixels the last map has one pixel, for which torch 2.15 gives NaN gradients in bfloat16 on a CPU.
    flags = f"--trainer.precision {precision} --schedule.clip 1 --inputs.min_size 160 --inputs.max_size 160"
    tiny.run(tmp_path / "whole", shapes, flags)
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=2)
        with pytest.raises(Interrupted):
            tiny.run(tmp_path / "run", shapes, flags)
    tiny.run(tmp_path / "run", shapes, flags, resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_the_gradient_scaler_resumes_with_its_scale(shapes, tmp_path, monkeypatch):
    """Lightning has no scaler on a CPU, so the test brings one that begins with overflows and then grows."""

    def build(settings, folder):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-16, growth_interval=1)
        plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        fabrics.append(Fabric(accelerator="cpu", devices=1, plugins=[plugin]))
        return fabrics[-1]

    fabrics: list[Fabric] = []
    monkeypatch.setattr(run_module, "build_fabric", build)
    flags = "--trainer.precision 16-mixed --schedule.clip 1"
    tiny.run(tmp_path / "whole", shapes, flags)
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=3)
        with pytest.raises(Interrupted):
            tiny.run(tmp_path / "run", shapes, flags)
    state, _ = Checkpoints(tmp_path / "run" / "checkpoints").load() or ({}, None)
    assert state["precision"]["scale"] not in (2.0**40, 0.0), "the scale has changed, and is saved"
    tiny.run(tmp_path / "run", shapes, flags, resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    scales = [fabric.strategy.precision.state_dict()["scale"] for fabric in fabrics]
    assert scales[2] == scales[0] != scales[1]


@pytest.mark.slow
def test_a_finished_run_keeps_the_weights_that_the_user_calibrated(shapes, tmp_path):
    tiny.run(tmp_path / "run", shapes)
    path = tmp_path / "run" / "weights.safetensors"
    state, meta = read_weights(path)
    model, _ = load_model(path)
    save_weights(path, model, dataclasses.replace(meta, threshold=0.123))
    before = path.read_bytes()
    tiny.run(tmp_path / "run", shapes, resume=True)
    assert path.read_bytes() == before
    path.write_bytes(b"damaged")
    tiny.run(tmp_path / "run", shapes, resume=True)
    again, _ = read_weights(path)
    assert all(torch.equal(tensor, again[name]) for name, tensor in state.items())


def test_an_edited_recipe_file_is_noticed(shapes, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=2)
        with pytest.raises(Interrupted):
            tiny.run(tmp_path / "run", shapes)
    stored = tmp_path / "run" / "recipe.yaml"
    text = stored.read_text()
    assert "lr: 0.001" in text
    stored.write_text(text.replace("lr: 0.001", "lr: 0.002"))
    with pytest.raises(RecipeError, match=r"trained with schedule.lr 0.001, got 0.002; undo the change"):
        train(None, None, tmp_path / "run", resume=True)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("content", [None, "[]", "{", '{"data": 3}'])
def test_a_missing_or_damaged_environment_asks_for_the_data_once(content, shapes, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=2)
        with pytest.raises(Interrupted):
            tiny.run(tmp_path / "run", shapes)
    path = tmp_path / "run" / "environment.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(RecipeError, match=r"environment.json: missing or damaged, .*; repeat --data"):
        train(None, None, tmp_path / "run", resume=True)
    tiny.run(tmp_path / "run", shapes, resume=True)
    assert json.loads(path.read_text())["data"] == str(shapes.absolute())


def test_a_binary_table_is_named(shapes, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=2)
        with pytest.raises(Interrupted):
            tiny.run(tmp_path / "run", shapes)
    (tmp_path / "run" / "train.csv").write_bytes(b"\xff\x00\x81\n")
    with pytest.raises(DataError, match=r"train.csv: expected the CSV table of a run"):
        tiny.run(tmp_path / "run", shapes, resume=True)


@pytest.mark.slow
def test_checkpoints_are_written_only_after_whole_steps(shapes, tmp_path, monkeypatch):
    saved = []
    usual = Loop.save

    def noted(loop):
        saved.append((loop.progress.epoch, loop.progress.batch, loop.progress.step))
        usual(loop)

    monkeypatch.setattr(Loop, "save", noted)
    # 6 batches of 2 an epoch, in steps of 4: the last one of each epoch has only 2.
    tiny.run(tmp_path / "run", shapes, "--schedule.accumulate 4 --data.batch_size 8 --trainer.checkpoint_steps 1")
    assert saved == [(0, 4, 1), (0, 6, 2), (1, 0, 2), (1, 4, 3), (1, 6, 4), (2, 0, 4)]
