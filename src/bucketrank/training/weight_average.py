"""An exponential moving average of the weights, which is evaluated and saved in their place."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from bucketrank.detectors import Detector


class WeightAverage:
    """A detector whose parameters follow those of the trained one, and whose buffers equal its buffers.

    After update t, the average is ``d * average + (1 - d) * weights`` with ``d = min(decay, (1 + t) / (10 + t))``. The
    ramp lets a short run forget its random start.
    """

    def __init__(self, detector: Detector, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.detector = copy.deepcopy(detector).eval()

    @torch.no_grad()
    def update(self, detector: Detector) -> None:
        """Move the average towards the weights of ``detector``."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        get_ema_multi_avg_fn(decay)(list(self.detector.parameters()), list(detector.parameters()), self.updates)
        self.copy_buffers(detector)
        self.updates += 1

    @torch.no_grad()
    def copy_buffers(self, detector: Detector) -> None:
        """Take the buffers of ``detector``, such as the running statistics of batch norms."""
        for own, current in zip(self.detector.buffers(), detector.buffers(), strict=True):
            own.copy_(current)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep."""
        return {"updates": self.updates, "model": self.detector.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.updates = state["updates"]
        self.detector.load_state_dict(state["model"])
