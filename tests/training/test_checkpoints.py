"""Checkpoints and weights: whole or refused, and never unpickled."""

import errno
import io
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bucketrank.cli import main
from bucketrank.errors import CheckpointError, DiskFullError, WeightsError
from bucketrank.training.checkpoints import Checkpoints, read_state, write_state
from bucketrank.weights.files import Meta, read_weights, save_weights
from bucketrank.weights.load import build_detector, load_model

from . import tiny


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


STATE = {
    "step": 3,
    "best": float("-inf"),
    "metrics": {"AP": float("nan"), "AP50": 0.25},
    "none": None,
    "optimiser": {
        "state": {0: {"momentum": torch.arange(4.0)}, 1: {"momentum": None}},
        "groups": [{"betas": (0.9, 0.99)}],
    },
    "scalar": torch.tensor(2, dtype=torch.int64),
    "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
    "shared": [STATE_TENSOR := torch.ones(2, 3), STATE_TENSOR],
}


def test_a_state_comes_back_as_it_was(tmp_path):
    write_state(tmp_path / "state.safetensors", STATE)
    restored = read_state(tmp_path / "state.safetensors")
    assert list(restored) == list(STATE)
    assert restored["optimiser"]["groups"] == STATE["optimiser"]["groups"]  # type: ignore[index]
    assert list(restored["optimiser"]["state"]) == [0, 1]
    assert restored["best"] == float("-inf")
    assert restored["metrics"]["AP"] != restored["metrics"]["AP"]
    torch.testing.assert_close(restored["optimiser"]["state"][0]["momentum"], torch.arange(4.0))
    torch.testing.assert_close(restored["shared"], STATE["shared"])
    assert (restored["scalar"].shape, restored["empty"].dtype) == (torch.Size([]), torch.bfloat16)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_what_is_neither_number_nor_tensor_is_not_saved(tmp_path):
    with pytest.raises(TypeError, match="got Hostile"):
        write_state(tmp_path / "state.safetensors", {"x": Hostile(tmp_path)})


@pytest.mark.parametrize("write", [pickle.dump, lambda value, file: torch.save(value, file)], ids=["pickle", "torch"])
@pytest.mark.parametrize("name", ["last.safetensors", "last.ckpt"])
def test_a_hostile_pickle_is_refused_and_not_executed(write, name, tmp_path, capsys):
    path, mark = tmp_path / name, tmp_path / "executed"
    with path.open("wb") as file:
        write(Hostile(mark), file)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        read_state(path)
    with pytest.raises(WeightsError, match="not a safetensors file"):
        load_model(path)
    (tmp_path / "data").mkdir()
    assert main(["eval", str(path), str(tmp_path / "data")]) == 1
    assert "pickles are never loaded" in capsys.readouterr().err
    assert not mark.exists()
    content = path.read_bytes()
    pickle.loads(content) if write is pickle.dump else torch.load(io.BytesIO(content), weights_only=False)
    assert mark.exists(), "the pickle must bite"


@pytest.mark.slow
def test_a_run_with_hostile_checkpoints_is_not_resumed(shapes, tmp_path):
    folder, mark = tmp_path / "run", tmp_path / "executed"
    tiny.run(folder, shapes, "--schedule.epochs 1")
    for name in ("last", "previous"):
        (folder / "checkpoints" / f"{name}.safetensors").write_bytes(pickle.dumps(Hostile(mark)))
    with pytest.raises(CheckpointError, match="pickles are never loaded"):
        tiny.run(folder, shapes, "--schedule.epochs 1", resume=True)
    assert not mark.exists()


@pytest.mark.parametrize("where", [8, 200, -1], ids=["header", "middle", "end"])
def test_damage_is_noticed_and_the_previous_one_used(where, tmp_path):
    kept = Checkpoints(tmp_path)
    assert kept.load() is None
    kept.save({"step": 1, "weights": torch.ones(100)})
    kept.save({"step": 2, "weights": torch.ones(100)})
    state, path = kept.load() or ({}, None)
    assert (state["step"], path) == (2, kept.last)
    content = bytearray(kept.last.read_bytes())
    content[where] ^= 4
    kept.last.write_bytes(content)
    state, path = kept.load() or ({}, None)
    assert (state["step"], path) == (1, kept.previous)
    kept.last.write_bytes(bytes(content[: len(content) // 2]))
    assert (kept.load() or ({}, None))[1] == kept.previous
    kept.last.unlink()  # killed between the two renames
    assert (kept.load() or ({}, None))[1] == kept.previous
    kept.previous.write_bytes(b"")
    with pytest.raises(CheckpointError, match="previous"):
        kept.load()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("again", [False, True], ids=["same process", "resumed"])
def test_a_damaged_last_never_replaces_the_good_previous(again, tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path)
    for step in (1, 2):
        kept.save({"step": step, "weights": torch.ones(100)})
    flip_a_bit(kept.last)
    kept = Checkpoints(tmp_path) if again else kept
    usual = Path.replace
    renamed = []

    def watched(path: Path, target: Path) -> Path:
        result = usual(path, target)
        renamed.append(Path(target).name)
        assert (Checkpoints(tmp_path).load() or ({}, None))[0]["step"] in (1, 3)  # a kill here leaves a good one
        return result

    monkeypatch.setattr(Path, "replace", watched)
    kept.save({"step": 3, "weights": torch.ones(100)})
    assert renamed == ["last.safetensors"]
    assert [read_state(path)["step"] for path in (kept.last, kept.previous)] == [3, 1]


def test_a_checkpoint_that_cannot_be_written_costs_none_of_the_others(tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path)
    for step in (1, 2):
        kept.save({"step": step})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match=r"last\.safetensors: cannot be written"):
        kept.save({"step": 3})
    assert [read_state(path)["step"] for path in (kept.last, kept.previous)] == [2, 1]


def test_weights_know_what_they_are(tmp_path):
    recipe = tiny.recipe()
    model = build_detector(recipe, num_classes=2)
    meta = Meta(
        ["cat", "dog"], [3, 9], 0.0123, recipe.to_dict(), {"boxes/AP": 0.5, "boxes/APl": float("nan")}, {"torch": "2"}
    )
    save_weights(tmp_path / "weights.safetensors", model, meta)
    loaded, stored = load_model(tmp_path / "weights.safetensors")
    assert (stored.classes, stored.category_ids, stored.threshold) == (["cat", "dog"], [3, 9], 0.0123)
    assert stored.recipe == json.loads(json.dumps(recipe.to_dict()))
    assert stored.metrics["boxes/APl"] != stored.metrics["boxes/APl"]
    assert not loaded.training
    image = [torch.rand(3, 64, 64)]
    with torch.no_grad():
        for key, value in model.eval()(image)[0].items():
            torch.testing.assert_close(loaded(image)[0][key], value, rtol=0, atol=0)


def test_a_hostile_description_reads_no_other_file(tmp_path):
    recipe = tiny.recipe().to_dict()
    recipe["backbone"]["weights"] = "/etc/passwd"
    model = build_detector(tiny.recipe(), num_classes=1)
    save_weights(tmp_path / "weights.safetensors", model, Meta(["cat"], [1], 0.0, recipe))
    load_model(tmp_path / "weights.safetensors")  # its own tensors are all that is read
    recipe["detector"]["nmss"] = 1
    save_weights(tmp_path / "weights.safetensors", model, Meta(["cat"], [1], 0.0, recipe))
    with pytest.raises(ValueError, match=r'no setting "detector.nmss"; the nearest is "detector.nms"'):
        load_model(tmp_path / "weights.safetensors")


def test_other_files_are_refused_with_a_reason(tmp_path):
    with pytest.raises(WeightsError, match="the file does not exist"):
        read_weights(tmp_path / "nothing.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(WeightsError, match=r"not bucketrank weights.*--backbone.weights"):
        read_weights(tmp_path / "other.safetensors")
    model = build_detector(tiny.recipe(), num_classes=1)
    save_weights(tmp_path / "w.safetensors", model, Meta(["cat", "dog"], [1, 2], 0.0, tiny.recipe().to_dict()))
    with pytest.raises(WeightsError, match="the tensors do not fit the recipe inside"):
        load_model(tmp_path / "w.safetensors")
