"""Settings and results of the benchmark of the losses."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from bucketrank.bench.flags import FEWEST_ROUNDS, check_device, command_line
from bucketrank.bench.losses.loss_contenders import METHODS, QUADRATIC
from bucketrank.bench.losses.loss_modes import Mode
from bucketrank.bench.timing import Samples, Spread
from bucketrank.bench.units import size_in_words
from bucketrank.provenance.machine import Machine

# A median above this multiple of the time that the step took alone is more than noise.
DISTURBED = 3.0


@dataclass(frozen=True)
class LossBenchSettings:
    """Settings of the benchmark, named like the flags of the command."""

    sizes: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    percent: tuple[float, ...] = (0.1, 1.0, 2.0, 5.0)
    repeats: int = 40
    seed: int = 0
    device: str = "cpu"
    max_seconds_per_cell: float = 30.0
    memory: bool = True
    compiled: bool = False
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
        """Return the command that repeats the benchmark.

        >>> LossBenchSettings(sizes=(10_000,), memory=False).command()
        'bucketrank bench losses --sizes 10K --no-memory'
        """
        spell = {"sizes": size_in_words, "percent": "{:g}".format}
        return command_line("bench losses", asdict(self), asdict(LossBenchSettings()), QUICK, spell)


# Settings that --quick changes.
QUICK: dict[str, Any] = {"percent": (0.1, 1.0, 5.0), "repeats": 20, "max_seconds_per_cell": 1.0, "memory": False}


@dataclass(frozen=True)
class LossResult:
    """The result of one contender in one mode and cell, which is a number of logits with a percentage of positives.

    ``skipped`` is the reason why the contender did not run; it then has no ``seconds``. ``samples`` are the seconds by
    round. ``estimated_samples`` are the seconds that a skipped step would have taken, from its parts in those rounds.
    ``launches`` and ``waits`` of one step are None where they cannot be counted, see :mod:`.loss_launches`.
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
    mode: Mode = "eager"
    launches: int | None = None
    waits: int | None = None


PART = 20  # a large batch is compared with 1 / PART of its logits


@dataclass(frozen=True)
class LargeResult:
    """Time and memory of ``exact`` on a large batch, and the growth of its time from a twentieth of the logits.

    ``growth`` compares with a part that has the same share of positives, ``growth_in_logits`` with one that has the
    same number of positives.
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
class LossBench:
    """All results, with the settings and the machine they were measured on."""

    machine: Machine
    settings: LossBenchSettings
    results: list[LossResult]
    large: list[LargeResult] = field(default_factory=list)

    def find(
        self, contender: str, loss: str | None, size: int, percent: float, mode: Mode = "eager"
    ) -> LossResult | None:
        """Return the result of a contender in a cell, or None; score-based contenders are shared by the losses."""
        key = (contender, loss if contender in METHODS else None, size, percent, mode)
        return next((r for r in self.results if (r.contender, r.loss, r.size, r.percent, r.mode) == key), None)

    def disturbed(self, size: int, percent: float) -> bool:
        """Return whether a step took much longer in this cell than alone, so that another program must have run."""
        return any(
            r.seconds.median > DISTURBED * r.estimated_seconds
            for r in self.results
            # The estimates of the quadratic contenders are extrapolated.
            if (r.size, r.percent) == (size, percent) and r.contender not in QUADRATIC
            if r.seconds is not None and r.estimated_seconds is not None
        )
