"""Progress, errors and device synchronisation, shared by all measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Receiver of progress, such as :class:`bucketrank.bench.progress_bar.ProgressBar`."""

    def begin(self, text: str, total: float) -> None:
        """Start a stage of ``total`` units."""

    def advance(self, text: str, amount: float) -> None:
        """Add ``amount`` units to the current stage; ``text`` names what runs."""


class MeasurementError(RuntimeError):
    """A contender failed; the message names the contender and the cell."""


def synchronizer(device: str) -> Callable[[], None]:
    """Return a function that waits until ``device`` has finished its work."""
    import torch

    if torch.device(device).type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
