"""Every family of torchvision and transformers overfits four images, behind our interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bucketrank.detectors import build

from ..detectors.test_overfit import ap50
from .tiny_models import TINY_TORCHVISION, squares, transformers_folder, use_tiny_torchvision

# Steps and learning rate. RT-DETRv2 and the two-stage Deformable DETR are left out: their relatives train alike.
SCHEDULES = {
    "deformable_detr": (80, 3e-3),
    "conditional_detr": (400, 3e-3),
    "dab_detr": (200, 3e-3),
    "rt_detr": (100, 6e-3),
    "d_fine": (110, 6e-3),
    "deimv2": (110, 6e-3),
    "lw_detr": (60, 4e-3),
    "rf_detr": (60, 4e-3),
}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def overfit(model: Any, *, steps: int, rate: float, side: int) -> float:
    images, targets = squares(side=side)
    optimiser = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    model.train()
    for _ in range(steps):
        optimiser.zero_grad()
        sum(model(images, targets).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5)
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        return float(ap50(model.eval()(images), targets))


@pytest.mark.parametrize("name", TINY_TORCHVISION)
def test_torchvision(name, monkeypatch):
    use_tiny_torchvision(monkeypatch)
    torch.manual_seed(0)
    model = build(f"torchvision/{name}", num_classes=2, loss="rs")
    assert overfit(model, steps=80, rate=3e-3, side=96) >= 0.9


@pytest.mark.parametrize("name", SCHEDULES)
def test_transformers(name, tmp_path):
    folder = transformers_folder(name, tmp_path)
    torch.manual_seed(0)
    model = build(f"transformers/{folder}", num_classes=2, loss="rs", min_size=64)
    steps, rate = SCHEDULES[name]
    assert overfit(model, steps=steps, rate=rate, side=64) >= 0.9
