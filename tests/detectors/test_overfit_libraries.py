"""Every family of torchvision, and every loss of transformers, overfits four images, behind our interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bucketrank.detectors import build

from ..detectors.test_overfit import ap50
from .tiny_models import TINY_TORCHVISION, squares, transformers_folder, use_tiny_torchvision

# Steps per cycle and learning rate of one model for each of the adapter's losses; the other families share them.
SCHEDULES = {
    "deformable_detr": (60, 4e-3),
    "rt_detr": (80, 1e-2),
    "d_fine": (80, 2e-2),
    "deimv2": (80, 2e-2),
    "lw_detr": (50, 5e-3),
}
# One cycle is enough on most CPUs. Their rounding acts like a seed, and an unlucky one needs another cycle.
MAX_CYCLES = 4
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def overfit(model: Any, *, steps: int, rate: float, side: int) -> float:
    """Train until the AP50 on the training images is 0.9, for at most MAX_CYCLES learning-rate cycles; return it."""
    images, targets = squares(side=side)
    for _ in range(MAX_CYCLES):
        train_cycle(model, images, targets, steps=steps, rate=rate)
        with torch.no_grad():
            reached = float(ap50(model.eval()(images), targets))
        if reached >= 0.9:
            break
    return reached


def train_cycle(model: Any, images: Any, targets: Any, *, steps: int, rate: float) -> None:
    optimiser = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    model.train()
    for _ in range(steps):
        optimiser.zero_grad()
        sum(model(images, targets).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5)
        optimiser.step()
        schedule.step()


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
    images, targets = squares(side=64)
    with torch.no_grad():
        assert float(ap50(model.eval()(images), targets)) < 0.05
    steps, rate = SCHEDULES[name]
    assert overfit(model, steps=steps, rate=rate, side=64) >= 0.9
