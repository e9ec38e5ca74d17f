"""Two processes by gloo, as a user starts them: in every step one of them sees no object."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bucketrank.data import write_shapes

from . import tiny

# Each process writes down the weights with which it ends.
PROGRAM = """
import os, sys
import torch
torch.set_num_threads(1)
from safetensors.torch import save_file
from bucketrank.training.loop import Loop
from bucketrank.cli import main
folder = os.environ["TEST_FOLDER"]
usual = Loop.close_epoch
def noted(loop, *, evaluated):
    usual(loop, evaluated=evaluated)
    state = {name: value.detach().contiguous() for name, value in loop.detector.named_parameters()}
    save_file(state, f"{folder}/rank{loop.fabric.global_rank}-epoch{loop.progress.epoch}.safetensors")
Loop.close_epoch = noted
sys.exit(main())
"""


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images for training, one of them without objects: of two processes, one has nothing to learn."""
    folder = write_shapes(tmp_path_factory.mktemp("data") / "lonely", train=2, val=3, size=64, seed=0)
    document = json.loads((folder / "train.json").read_text())
    empty = document["images"][1]["id"]
    document["annotations"] = [each for each in document["annotations"] if each["image_id"] != empty]
    (folder / "train.json").write_text(json.dumps(document))
    return folder


def train(folder: Path, data: Path, *, devices: int, flags: str = "") -> None:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    words = ["train", "atss-laptop", "--data", str(data), "--out", str(folder / "run"), *tiny.USUAL.split()]
    more = f"--trainer.devices {devices} --trainer.strategy ddp --data.batch_size 2 --data.keep_empty true {flags}"
    command = [sys.executable, str(program), *words, *more.split()]
    environment = {**os.environ, "TEST_FOLDER": str(folder)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_two_processes_of_which_one_sees_no_object_end_with_equal_weights(lonely, tmp_path):
    # Batch norms that learn see other images in each process: frozen, the weights are all there is.
    train(tmp_path, lonely, devices=2, flags="--backbone.batch_norm frozen --schedule.warmup_steps 0")
    for epoch in (1, 2):
        mine, other = (load_file(tmp_path / f"rank{rank}-epoch{epoch}.safetensors") for rank in (0, 1))
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, other[name], rtol=0, atol=0)
    first = load_file(tmp_path / "rank0-epoch1.safetensors")
    last = load_file(tmp_path / "rank0-epoch2.safetensors")
    assert any(not torch.equal(first[name], last[name]) for name in first), "something was learnt"
    rows = (tmp_path / "run" / "validation.csv").read_text().splitlines()
    assert len(rows) == 3, "one file, written by the first process"
    assert (tmp_path / "run" / "weights.safetensors").is_file()
