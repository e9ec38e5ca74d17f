"""Settings, results and performance targets of the loss benchmark. Missed targets are published, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.documents import PerformanceTarget, format_size, performance_target
from benchmarks.losses.contenders import EXACT, LOSSES, METHODS, QUADRATIC, Mode
from benchmarks.session import MIN_ROUNDS, check_device, command_line, device_type
from benchmarks.timing import Samples, Spread, ratio
from bucketrank.provenance import Machine

# A median above this multiple of the isolated step time is more than noise.
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
        if self.repeats < MIN_ROUNDS:
            raise ValueError(f"--repeats: expected at least {MIN_ROUNDS}, got {self.repeats}")
        if not self.max_seconds_per_cell > 0:
            raise ValueError(f"--max-seconds-per-cell: expected more than 0, got {self.max_seconds_per_cell}")

    def command(self) -> str:
        """Return the command that repeats the benchmark.

        >>> LossBenchSettings(sizes=(10_000,), memory=False).command()
        'python -m benchmarks losses --sizes 10K --no-memory'
        """
        spell = {"sizes": format_size, "percent": "{:g}".format}
        return command_line("losses", asdict(self), asdict(LossBenchSettings()), QUICK, spell)


# Settings that --quick changes.
QUICK: dict[str, Any] = {"percent": (0.1, 1.0, 5.0), "repeats": 20, "max_seconds_per_cell": 1.0, "memory": False}


@dataclass(frozen=True)
class LossResult:
    """The result of one contender in one mode and cell, which is a number of logits with a percentage of positives.

    ``skipped`` is the reason why the contender did not run; it then has no ``seconds``. ``samples`` are the seconds by
    round. ``estimated_samples`` are the seconds that a skipped step would have taken, from its parts in those rounds.
    ``launches`` and ``waits`` (device syncs) of one step are None where they cannot be counted.
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
        """Return whether a step took much longer in this cell than in isolation, so another program must have run."""
        return any(
            r.seconds.median > DISTURBED * r.estimated_seconds
            for r in self.results
            # The estimates of the quadratic contenders are extrapolated.
            if (r.size, r.percent) == (size, percent) and r.contender not in QUADRATIC
            if r.seconds is not None and r.estimated_seconds is not None
        )


# Maximum ratio exact / focal by loss and number of logits, then by percentage of positives; None for all others.
TO_FOCAL: dict[tuple[str, int], dict[float | None, float]] = {
    ("ap", 10_000): {None: 1.0},
    ("ap", 100_000): {None: 1.5, 5.0: 2.0},
    ("ap", 1_000_000): {0.1: 1.0, 1.0: 1.3, 5.0: 2.0},
    ("rs", 10_000): {None: 2.0},
    ("rs", 100_000): {None: 2.0, 5.0: 4.0},
    ("rs", 1_000_000): {0.1: 1.3, 1.0: 2.0, 5.0: 5.0},
}
# Minimum ratio pairwise / exact at one million logits, by percentage of positives.
TO_PAIRWISE = {0.1: 50.0, 1.0: 300.0, 5.0: 1000.0}
# Maximum peak extra memory of a large batch, as a multiple of the logits' own memory.
MEMORY = 6.0
# Maximum growth of the time from 1 / PART of a large batch to the whole.
GROWTH = 24.0


def loss_targets(bench: LossBench) -> list[PerformanceTarget]:
    """Return every target for which ``bench`` has numbers; the limits are set for the CPU, so none for other devices.

    ``exact`` is the backend that a user gets by default: the fused kernel if it ran, otherwise torch operations.
    """
    if device_type(bench.settings.device) != "cpu":
        return []
    return [*_to_focal(bench), *_to_pairwise(bench), *_large(bench.large)]


def _exact(bench: LossBench, loss: str, size: int, percent: float) -> LossResult | None:
    for name in EXACT:
        result = bench.find(name, loss, size, percent)
        if result is not None and result.samples:
            return result
    return None


def _cells(bench: LossBench) -> Iterator[tuple[str, int, float, str]]:
    for loss in LOSSES:
        for size in bench.settings.sizes:
            for percent in bench.settings.percent:
                yield loss, size, percent, f"L = {format_size(size)}, {percent:g} %"


def _to_focal(bench: LossBench) -> Iterator[PerformanceTarget]:
    for loss, size, percent, where in _cells(bench):
        limits = TO_FOCAL.get((loss, size), {})
        limit = limits.get(percent, limits.get(None))
        exact = _exact(bench, loss, size, percent)
        if limit is not None and exact is not None and exact.to_focal is not None:
            what, disturbed = f"{LOSSES[loss]} {exact.contender} / focal", bench.disturbed(size, percent)
            yield performance_target(what, where, exact.to_focal, limit, at_most=True, disturbed=disturbed)


def speedup(bench: LossBench, loss: str, size: int, percent: float) -> tuple[Spread, bool] | None:
    """Return the ratio pairwise / exact, and whether the time of pairwise is an estimate.

    The estimate extrapolates parts of the pairwise step that were timed in the same rounds.
    """
    exact = _exact(bench, loss, size, percent)
    pairwise = bench.find("pairwise", loss, size, percent)
    if exact is None or pairwise is None:
        return None
    samples = pairwise.samples or pairwise.estimated_samples
    return (ratio(samples, exact.samples), not pairwise.samples) if samples else None


def _to_pairwise(bench: LossBench) -> Iterator[PerformanceTarget]:
    for loss, size, percent, where in _cells(bench):
        faster = speedup(bench, loss, size, percent)
        exact = _exact(bench, loss, size, percent)
        if size == 1_000_000 and percent in TO_PAIRWISE and faster and exact:
            what = f"{LOSSES[loss]} pairwise / {exact.contender}"
            flags = {"at_most": False, "estimated": faster[1], "disturbed": bench.disturbed(size, percent)}
            yield performance_target(what, where, faster[0], TO_PAIRWISE[percent], **flags)


def _large(results: list[LargeResult]) -> Iterator[PerformanceTarget]:
    for result in results:
        title = f"{LOSSES[result.loss]} {result.contender}"
        where = f"L = {format_size(result.size)}, {result.positives:,} positives"
        ratio_of_memory = result.extra_bytes / result.logit_bytes
        memory = Spread(ratio_of_memory, ratio_of_memory, ratio_of_memory)
        yield performance_target(f"{title}: peak extra memory / logits", where, memory, MEMORY, at_most=True)
        part = f"{title}: time / time at L = {format_size(result.size // PART)}"
        share = f"{100 * result.positives / result.size:g} %"
        yield performance_target(
            f"{part}, same share of positives ({share})", where, result.growth, GROWTH, at_most=True
        )
        yield performance_target(
            f"{part}, same number of positives", where, result.growth_in_logits, GROWTH, at_most=True
        )
