"""The comparison of fine-tuning runs, with the smallest possible settings."""

import re

import pytest
import torch

from bucketrank.integrations.torchvision import use_ranking_loss
from examples import fine_tuning_comparison as example

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_both_losses_start_from_the_same_weights_with_new_classes(shapes, monkeypatch, capsys):
    started = []
    usual = example.train

    def recorded(model, folder, steps, lr, seed):
        started.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        usual(model, folder, steps, lr, seed, batch=2)

    ranked = []
    monkeypatch.setattr(example, "train", recorded)
    monkeypatch.setattr(example, "use_ranking_loss", lambda model: ranked.append(use_ranking_loss(model)))
    example.main(str(shapes), str(shapes), steps=1, size=64, name="test_efficientnet", seeds=1)
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r"\W", line)[0] for line in lines] == ["pretrained", "own", "own", "rs", "rs"]
    assert len(ranked) == 2
    key = "head.classification_head.cls_logits.weight"
    assert len(started) == 5
    for state in started[2:]:
        assert all(torch.equal(tensor, started[1][name]) for name, tensor in state.items())
    assert not torch.equal(started[0][key], started[1][key])
