"""Co-DINO in the training loop: a run with denoising and auxiliary heads, resumed and evaluated."""

from typing import Any

import pytest

from bucketrank.cli import main
from bucketrank.training.processes import Interrupted
from bucketrank.weights import load_model

from . import tiny
from .test_resume import assert_same_run, ctrl_c

__all__ = ["ctrl_c"]
pytestmark = pytest.mark.slow

SMALL = """
  --init null --detector.levels 4 --detector.queries 20 --detector.encoder_layers 1 --detector.decoder_layers 2
  --detector.feedforward 32 --detector.heads 4 --detector.hidden 32 --detector.proposals 30
  --detector.auxiliary_queries 10 --detector.denoising 12 --data.crop false --trainer.checkpoint_steps 1
"""


def run(folder, data, flags="", **settings):
    return tiny.run(folder, data, f"{SMALL} {flags}", name="co-dino-r50-coco", **settings)


@pytest.mark.usefixtures("ctrl_c")
def test_a_resumed_run_draws_the_same_noise(shapes, tmp_path, monkeypatch):
    run(tmp_path / "whole", shapes)
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=2)
        with pytest.raises(Interrupted):
            run(tmp_path / "run", shapes)
    run(tmp_path / "run", shapes, resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert "denoising_cls" in (tmp_path / "run" / "train.csv").read_text()


@pytest.mark.parametrize("loss", ["focal", "rs", "mal"])
def test_other_losses(loss, shapes, tmp_path, capsys):
    run(tmp_path / "run", shapes, f"--loss {loss} --schedule.max_steps 1")
    weights = str(tmp_path / "run" / "weights.safetensors")
    model: Any = load_model(weights)[0]
    assert (type(model).__name__, model.criterion.settings.name) == ("CoDINO", loss)
    assert main(["eval", weights, str(shapes)]) == 0
    assert "AP" in capsys.readouterr().out
