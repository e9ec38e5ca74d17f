"""A receiver of progress that records what a benchmark announces and does."""

from __future__ import annotations


class ProgressRecorder:
    """Stages with their announced totals, the amounts done in each, and the texts."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float]] = []
        self.done: list[float] = []
        self.texts: list[str] = []

    def begin(self, text: str, total: float) -> None:
        self.stages.append((text, total))
        self.done.append(0.0)

    def advance(self, text: str, amount: float) -> None:
        self.done[-1] += amount
        self.texts.append(text)
