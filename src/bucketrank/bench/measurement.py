"""Progress and errors, shared by all measurements."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receiver of progress, such as :class:`bucketrank.bench.progress_bar.ProgressBar`."""

    def begin(self, text: str, total: float) -> None:
        """Start a stage of ``total`` units."""

    def advance(self, text: str, amount: float) -> None:
        """Add ``amount`` units to the current stage; ``text`` names what runs."""


class MeasurementError(RuntimeError):
    """A contender failed; the message names the contender and the cell."""
