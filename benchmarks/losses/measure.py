"""Measure every loss, method and backend over sizes and percentages of positives, against score-based losses.

Each cell is planned first, so that the time left is known. Contenders that take too long are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.losses.contenders import (
    BASELINES,
    DELTAS,
    LOSSES,
    METHODS,
    QUADRATIC,
    Mode,
    SyntheticLogits,
    contender_names,
    count_operations,
    draw_logits,
    is_counted,
    loss_step,
    modes_of,
    step_launches,
    why_unavailable,
)
from benchmarks.losses.estimate import StepPart, estimate_step, extrapolate
from benchmarks.losses.memory import AllocatorMeter, MemoryJob, MemoryMeter, memory_meter
from benchmarks.losses.results import PART, LargeResult, LossBench, LossBenchSettings, LossResult
from benchmarks.session import MIN_ROUNDS, MeasurementError, Progress, device_type
from benchmarks.timing import Samples, Spread, TimedCall, current_device, device_clock, interleave, ratio
from bucketrank.provenance import describe

Meter = MemoryMeter | AllocatorMeter


def measure_losses(settings: LossBenchSettings, progress: Progress) -> LossBench:
    """Run the whole benchmark: plan every cell first, so that the time left is known, then measure."""
    # Describe the machine first, before the benchmark itself puts load on it.
    machine = describe(settings.device)
    with current_device(settings.device), ExitStack() as stack:
        cells = [(size, percent) for size in settings.sizes for percent in settings.percent]
        progress.begin("estimating", len(cells) * len(contenders_of(settings)))
        plans = [plan_cell(size, percent, settings, progress) for size, percent in cells]
        meter: Meter | None = None
        if settings.memory:
            meter = memory_meter(settings.device)
            stack.enter_context(meter)
        costs = [_cost(contender, settings, meter) for planned in plans for contender in planned]
        progress.begin("measuring", sum(costs))
        results: list[LossResult] = []
        for planned in plans:
            results += measure_cell(planned, settings, progress, meter)
        large = measure_large_batch(settings, progress) if settings.large else []
    return LossBench(machine, settings, results, large)


def measure_cell(
    planned: list[PlannedContender], settings: LossBenchSettings, progress: Progress, meter: Meter | None
) -> list[LossResult]:
    """Measure one cell: the time of all contenders, interleaved, then the launches and the memory of each."""
    size, percent = planned[0].size, planned[0].percent
    data = draw_logits(size, percent, seed=settings.seed, device=settings.device)
    values: dict[str, Tensor | float] = {}
    turns = {turn.title: turn for contender in planned for turn in contender.turns()}
    samples = interleave(
        {title: turn.timed_call(data, values, settings) for title, turn in turns.items()},
        rounds=settings.repeats,
        clock=device_clock(settings.device, clear_cache=True),
        advance=lambda title, calls: progress.advance(str(turns[title].planned), calls * turns[title].seconds),
    )
    counts_by_loss = {loss: data.counts(delta) for loss, delta in DELTAS.items()}
    results = []
    for contender in planned:
        counts = counts_by_loss[contender.loss or "ap"]
        result = LossResult(
            contender=contender.name,
            loss=contender.loss,
            size=size,
            percent=percent,
            positives=counts.positives,
            flops=count_operations(contender.name, contender.loss, counts),
            estimated_seconds=contender.seconds,
            skipped=contender.skipped,
            mode=contender.mode,
        )
        if contender.skipped is None:
            focal = samples.get(focal_title(settings.device, samples))
            result = _timed(result, contender, samples[contender.title], focal, float(values[contender.title]))
            launches, waits = step_launches(contender.name, contender.loss, data, contender.mode)
            progress.advance(f"launches of {contender}", _counting_seconds(contender))
            extra_bytes = _extra_bytes(contender, settings, progress, meter)
            result = replace(result, launches=launches, waits=waits, extra_bytes=extra_bytes)
        elif contender.parts:
            estimates = _estimates(contender, samples, result.flops)
            median = Spread.of(list(estimates.values())).median
            result = replace(result, estimated_samples=estimates, estimated_seconds=median)
        results.append(result)
    return results


def focal_title(device: str, titles: Collection[str]) -> str:
    """Return which of the contenders ``titles`` the ratios refer to: compiled focal loss on a GPU, otherwise eager."""
    compiled = "focal, compiled"
    return compiled if device_type(device) != "cpu" and compiled in titles else "focal"


def _timed(
    result: LossResult, contender: PlannedContender, own: Samples, focal: Samples | None, value: float
) -> LossResult:
    if not math.isfinite(value):
        raise MeasurementError(f"losses: {contender}: expected a finite loss, got {value}")
    to_focal = None if focal is None else ratio(own, focal)
    return replace(result, value=value, samples=own, seconds=Spread.of(list(own.values())), to_focal=to_focal)


def _estimates(contender: PlannedContender, samples: dict[str, Samples], cost: int) -> Samples:
    """Return the estimated seconds of the whole step, for each round in which both of its parts ran."""
    small, large = contender.parts
    small_seconds, large_seconds = (samples[turn.title] for turn in contender.turns())
    return {
        turn: extrapolate(
            small._replace(seconds=small_seconds[turn]), large._replace(seconds=large_seconds[turn]), cost
        )
        for turn in sorted(small_seconds.keys() & large_seconds.keys())
    }


def _extra_bytes(
    contender: PlannedContender, settings: LossBenchSettings, progress: Progress, meter: Meter | None
) -> int | None:
    if meter is None or contender.mode not in meter.modes:
        return None
    try:
        extra = meter.measure(
            MemoryJob(
                name=contender.name,
                loss=contender.loss,
                size=contender.size,
                percent=contender.percent,
                seed=settings.seed,
                device=settings.device,
                threads=torch.get_num_threads(),
                mode=contender.mode,
            )
        )
    except RuntimeError as error:
        raise MeasurementError(f"losses: memory of {contender}: {error}") from error
    progress.advance(f"memory of {contender}", _memory_seconds(contender, meter))
    return extra


def _cost(contender: PlannedContender, settings: LossBenchSettings, meter: Meter | None) -> float:
    """Estimate the seconds for all measurements of a contender."""
    turns = sum(turn.cost(settings) for turn in contender.turns())
    return turns + _counting_seconds(contender) + _memory_seconds(contender, meter)


def _memory_seconds(contender: PlannedContender, meter: Meter | None) -> float:
    if meter is None or contender.mode not in meter.modes or contender.skipped or contender.seconds is None:
        return 0.0
    return contender.seconds + meter.start_seconds


def _counting_seconds(contender: PlannedContender) -> float:
    if not is_counted(contender.name, contender.mode) or contender.skipped or contender.seconds is None:
        return 0.0
    return contender.seconds


# Differences in seconds between two parts of a step below this are noise.
MIN_APART = 0.03
# Steps shorter than this, in seconds, get an untimed call before each timed one.
SHORT = 0.01


@dataclass(frozen=True)
class PlannedContender:
    """A contender in a cell before it runs; if it is ``skipped`` because it is too slow, its ``parts`` run instead."""

    name: str
    loss: str | None
    size: int
    percent: float
    seconds: float | None = None
    skipped: str | None = None
    parts: tuple[StepPart, ...] = ()
    mode: Mode = "eager"

    @property
    def title(self) -> str:
        title = f"{LOSSES[self.loss]} {self.name}" if self.loss else self.name
        return title if self.mode == "eager" else f"{title}, {self.mode}"

    def __str__(self) -> str:
        return f"{self.title} at L = {self.size}, {self.percent:g} % positives"

    def turns(self) -> list[Turn]:
        """Return the timed calls of this contender: the whole step, its parts, or nothing."""
        if self.skipped is None and self.seconds is not None:
            return [Turn(self, self.seconds)]
        return [Turn(self, part.seconds, part.positives) for part in self.parts]


@dataclass(frozen=True)
class Turn:
    """A step that takes turns with others; with ``positives``, the part of the step that keeps this many positives."""

    planned: PlannedContender
    seconds: float
    positives: int | None = None

    @property
    def title(self) -> str:
        return self.planned.title + (f", {self.positives} positives" if self.positives else "")

    def timed_call(
        self, data: SyntheticLogits, values: dict[str, Tensor | float], settings: LossBenchSettings
    ) -> TimedCall:
        """Return the call to time; it stores its loss in ``values``, and its errors name the contender."""
        part = data.thinned(self.positives) if self.positives else data
        step = loss_step(self.planned.name, self.planned.loss, part, mode=self.planned.mode)

        def call() -> None:
            try:
                values[self.title] = step()
            except Exception as error:
                raise MeasurementError(f"losses: {self.planned}: {error}") from error

        return TimedCall(call, every_nth(self.seconds, settings), self._warmup, self._untimed)

    def cost(self, settings: LossBenchSettings) -> float:
        """Estimate the seconds for all calls."""
        rounds = math.ceil(settings.repeats / every_nth(self.seconds, settings))
        return (rounds * (1 + self._untimed) + self._warmup) * self.seconds

    @property
    def _warmup(self) -> int:
        return 1 if self.seconds < 0.5 else 0

    @property
    def _untimed(self) -> int:
        return 1 if self.seconds < SHORT else 0


def every_nth(seconds: float, settings: LossBenchSettings) -> int:
    """Return n such that a step of ``seconds`` runs in every n-th round, a power of two.

    A step takes at most a sixth of the time limit of its cell, but runs in at least three rounds.
    """
    every = 1
    while math.ceil(settings.repeats / every) * seconds > settings.max_seconds_per_cell / 6:
        if math.ceil(settings.repeats / (2 * every)) < MIN_ROUNDS:
            break
        every *= 2
    return every


def contenders_of(settings: LossBenchSettings) -> list[tuple[str, str | None, Mode]]:
    """Return the name, the loss and the mode of every contender in a cell."""
    names = contender_names(settings.device)
    pairs: list[tuple[str, str | None]] = [(name, None) for name in names if name in BASELINES]
    pairs += [(name, loss) for loss in LOSSES for name in names if name not in BASELINES]
    return [
        (name, loss, mode)
        for name, loss in pairs
        for mode in modes_of(name, settings.device, compiled=settings.compiled)
    ]


def plan_cell(size: int, percent: float, settings: LossBenchSettings, progress: Progress) -> list[PlannedContender]:
    """Estimate the time of each contender in a cell, and mark those that take too long as skipped."""
    data = draw_logits(size, percent, seed=settings.seed, device=settings.device)
    planned: list[PlannedContender] = []
    for name, loss, mode in contenders_of(settings):
        skipped = why_unavailable(name, settings.device)
        contender = PlannedContender(name, loss, size, percent, skipped=skipped, mode=mode)
        progress.advance(str(contender), 1)
        if mode != "eager" and name in QUADRATIC and planned[-1].skipped:
            contender = replace(contender, skipped="the eager step is skipped, too")
        planned.append(_estimated(contender, data, settings) if contender.skipped is None else contender)
    return planned


def _estimated(contender: PlannedContender, data: SyntheticLogits, settings: LossBenchSettings) -> PlannedContender:
    limit = settings.max_seconds_per_cell
    apart, clock = max(limit / 100, MIN_APART), device_clock(settings.device, clear_cache=True)
    try:
        seconds, parts = estimate_step(
            contender.name, contender.loss, data, apart=apart, clock=clock, mode=contender.mode
        )
    except torch.OutOfMemoryError:
        return replace(contender, skipped="the device has too little memory")
    except Exception as error:
        # torch.compile and captures depend on compilers and drivers; the other contenders do not need them.
        if contender.mode != "eager":
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return replace(contender, skipped=f"it failed: {reason}")
        raise MeasurementError(f"losses: {contender}: {error}") from error
    calls = math.ceil(settings.repeats / every_nth(seconds, settings))
    if calls * seconds <= limit:
        return replace(contender, seconds=seconds)
    skipped = f"by estimate {calls} calls would exceed {limit:g} s"
    return replace(contender, seconds=seconds, parts=parts, skipped=skipped)


LARGE_SIZE = 20_000_000  # one GPU's share of a large batch
LARGE_PERCENT = (0.1, 0.5)
LARGE_ROUNDS = 15  # the calls on the small part take milliseconds and are noisy
LARGE_CALLS = 5  # interleaved calls in a cell


def measure_large_batch(
    settings: LossBenchSettings, progress: Progress, *, size: int = LARGE_SIZE
) -> list[LargeResult]:
    """Measure both losses with both backends of ``exact`` on 20 million logits, always with memory.

    Each is timed against a twentieth of the logits, and against focal loss on the same logits, because logits that no
    longer fit the caches slow every loss.
    """
    names = [name for name in METHODS if METHODS[name] == "exact" and not why_unavailable(name, settings.device)]
    cells = [(name, loss, percent) for percent in LARGE_PERCENT for loss in LOSSES for name in names]
    progress.begin(f"L = {size}", len(cells) * (LARGE_CALLS * (LARGE_ROUNDS + 1) + 1))
    with memory_meter(settings.device) as meter:
        return [_measure_large(*cell, size, settings, progress, meter) for cell in cells]


def _measure_large(
    name: str,
    loss: str,
    percent: float,
    size: int,
    settings: LossBenchSettings,
    progress: Progress,
    meter: MemoryMeter | AllocatorMeter,
) -> LargeResult:
    text = f"{LOSSES[loss]} {name} at L = {size}, {percent:g} % positives"
    data, sparse, dense = (
        draw_logits(n, share, seed=settings.seed, device=settings.device)
        for n, share in ((size, percent), (size // PART, percent), (size // PART, percent * PART))
    )
    job = MemoryJob(
        name=name,
        loss=loss,
        size=size,
        percent=percent,
        seed=settings.seed,
        device=settings.device,
        threads=torch.get_num_threads(),
        mode="eager",
    )
    try:
        samples = interleave(
            {
                "as sparse": TimedCall(loss_step(name, loss, sparse)),
                "as many": TimedCall(loss_step(name, loss, dense)),
                "all": TimedCall(loss_step(name, loss, data)),
                "focal part": TimedCall(loss_step("focal", None, sparse)),
                "focal": TimedCall(loss_step("focal", None, data)),
            },
            rounds=LARGE_ROUNDS,
            clock=device_clock(settings.device, clear_cache=True),
            advance=lambda _, calls: progress.advance(text, calls),
        )
        extra = meter.measure(job)
    except Exception as error:
        raise MeasurementError(f"losses: {text}: {error}") from error
    progress.advance(text, 1)
    return LargeResult(
        contender=name,
        loss=loss,
        size=size,
        positives=int((data.targets > 0).sum()),
        seconds=Spread.of(list(samples["all"].values())),
        growth=ratio(samples["all"], samples["as sparse"]),
        growth_in_logits=ratio(samples["all"], samples["as many"]),
        focal_growth=ratio(samples["focal"], samples["focal part"]),
        to_focal=ratio(samples["all"], samples["focal"]),
        extra_bytes=extra,
        logit_bytes=data.logits.nbytes,
    )
