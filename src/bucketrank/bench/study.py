"""What a study of the losses is asked and what it says: settings, results, and the errors between."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from bucketrank.bench.contenders import METHODS, QUADRATIC
from bucketrank.bench.flags import FEWEST_ROUNDS, check_device, command_line
from bucketrank.bench.machine import Machine
from bucketrank.bench.numbers import size_in_words
from bucketrank.bench.timing import Samples, Spread

# A median so many times what the step took alone is not noise.
DISTURBED = 3.0


@dataclass(frozen=True)
class Settings:
    """What to measure; the names are those of the command's flags."""

    sizes: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    percent: tuple[float, ...] = (0.1, 1.0, 2.0, 5.0)
    repeats: int = 40
    seed: int = 0
    device: str = "cpu"
    max_seconds_per_cell: float = 30.0
    memory: bool = True
    large: bool = False

    def __post_init__(self) -> None:
        check_device(self.device)
        if not self.sizes or min(self.sizes) < 2:
            raise ValueError(f"--sizes: expected numbers of logits, at least 2, got {self.sizes}")
        if not self.percent or not all(0 < percent < 100 for percent in self.percent):
            raise ValueError(f"--percent: expected percentages between 0 and 100, got {self.percent}")
        if self.repeats < FEWEST_ROUNDS:
            raise ValueError(f"--repeats: expected at least {FEWEST_ROUNDS}, got {self.repeats}")
        if not self.max_seconds_per_cell > 0:
            raise ValueError(f"--max-seconds-per-cell: expected more than 0, got {self.max_seconds_per_cell}")

    def command(self) -> str:
        """The command that repeats this.

        >>> Settings(sizes=(10_000,), memory=False).command()
        'bucketrank bench losses --sizes 10K --no-memory'
        """
        spell = {"sizes": size_in_words, "percent": "{:g}".format}
        return command_line("bench losses", asdict(self), asdict(Settings()), QUICK, spell)


# What --quick changes.
QUICK: dict[str, Any] = {"percent": (0.1, 1.0, 5.0), "repeats": 20, "max_seconds_per_cell": 1.0, "memory": False}


@dataclass(frozen=True)
class Result:
    """One contender in one cell of the study. Without ``seconds`` it was ``skipped``, for the reason given there.

    ``samples`` are the seconds by round, ``estimated_samples`` what they would have been, from parts that ran in them.
    """

    contender: str
    loss: str | None
    size: int
    percent: float
    positives: int
    flops: int
    estimated_seconds: float | None = None
    seconds: Spread | None = None
    to_focal: Spread | None = None
    extra_bytes: int | None = None
    value: float | None = None
    skipped: str | None = None
    samples: Samples = field(default_factory=dict)
    estimated_samples: Samples = field(default_factory=dict)


PART = 20  # the large size is so many times the one it is compared with


@dataclass(frozen=True)
class LargeResult:
    """``exact`` at the large size: its time and memory, and how often that of a twentieth of the logits its time is.

    ``growth`` is against as large a share of positives, ``growth_in_logits`` against as many of them.
    """

    contender: str
    loss: str
    size: int
    positives: int
    seconds: Spread
    growth: Spread
    growth_in_logits: Spread
    focal_growth: Spread
    to_focal: Spread
    extra_bytes: int
    logit_bytes: int


@dataclass(frozen=True)
class Study:
    """All results, and what they were measured on."""

    machine: Machine
    settings: Settings
    results: list[Result]
    large: list[LargeResult] = field(default_factory=list)

    def find(self, contender: str, loss: str | None, size: int, percent: float) -> Result | None:
        """The result of a cell, if it is in the study."""
        wanted = (contender, loss if contender in METHODS else None, size, percent)
        return next((r for r in self.results if (r.contender, r.loss, r.size, r.percent) == wanted), None)

    def disturbed(self, size: int, percent: float) -> bool:
        """Whether a step took much longer in this cell than it had alone: something else was running."""
        return any(
            r.seconds.median > DISTURBED * r.estimated_seconds
            for r in self.results
            # The estimates of the others are extrapolated.
            if (r.size, r.percent) == (size, percent) and r.contender not in QUADRATIC
            if r.seconds is not None and r.estimated_seconds is not None
        )


class Progress(Protocol):
    """Told what is going on."""

    def begin(self, text: str, total: float) -> None: ...

    def advance(self, text: str, amount: float) -> None: ...


class CellError(RuntimeError):
    """A contender failed; the message says which, and where."""
