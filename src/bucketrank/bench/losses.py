"""The paper's synthetic study: every method and backend over sizes and percentages, against score-based losses."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace

import torch

from bucketrank.bench.contenders import DELTAS, operations, synchronizer
from bucketrank.bench.estimate import extrapolate
from bucketrank.bench.large import run_large
from bucketrank.bench.machine import describe
from bucketrank.bench.memory import Job, MemoryMeter
from bucketrank.bench.plan import NAMES, Planned, plan
from bucketrank.bench.study import CellError, Progress, Result, Settings, Study
from bucketrank.bench.synthetic import draw
from bucketrank.bench.timing import Samples, Spread, interleave, ratio

# Starting the process that measures memory, in seconds; only the progress bar depends on it.
FORK = 0.7


def measure(planned: list[Planned], settings: Settings, progress: Progress, meter: MemoryMeter | None) -> list[Result]:
    """One cell: all contenders interleaved, then the memory of each."""
    size, percent = planned[0].size, planned[0].percent
    data = draw(size, percent, seed=settings.seed, device=settings.device)
    values: dict[str, float] = {}
    turns = {turn.title: turn for entry in planned for turn in entry.turns()}
    samples = interleave(
        {title: turn.contender(data, values, settings) for title, turn in turns.items()},
        rounds=settings.repeats,
        synchronize=synchronizer(settings.device),
        advance=lambda title, calls: progress.advance(str(turns[title].planned), calls * turns[title].seconds),
    )
    counts = {loss: data.counts(delta) for loss, delta in DELTAS.items()}
    results = []
    for entry in planned:
        counted = counts[entry.loss or "ap"]
        result = Result(
            contender=entry.name,
            loss=entry.loss,
            size=size,
            percent=percent,
            positives=counted.positives,
            flops=operations(entry.name, entry.loss, counted),
            estimated_seconds=entry.seconds,
            skipped=entry.skipped,
        )
        if entry.skipped is None:
            extra_bytes = _extra_bytes(entry, settings, progress, meter)
            result = _timed(replace(result, extra_bytes=extra_bytes), entry, samples, values[entry.title])
        elif entry.parts:
            estimates = _estimates(entry, samples, result.flops)
            middle = Spread.of(list(estimates.values())).median
            result = replace(result, estimated_samples=estimates, estimated_seconds=middle)
        results.append(result)
    return results


def _timed(result: Result, entry: Planned, samples: dict[str, Samples], value: float) -> Result:
    if not math.isfinite(value):
        raise CellError(f"bench losses: {entry}: expected a finite loss, got {value}")
    taken = samples[entry.title]
    to_focal = ratio(taken, samples["focal"]) if "focal" in samples else None
    return replace(result, value=value, samples=taken, seconds=Spread.of(list(taken.values())), to_focal=to_focal)


def _estimates(entry: Planned, samples: dict[str, Samples], cost: int) -> Samples:
    """What the whole step would have taken in each round in which both of its parts ran."""
    small, large = entry.parts
    few, many = (samples[turn.title] for turn in entry.turns())
    return {
        turn: extrapolate(small._replace(seconds=few[turn]), large._replace(seconds=many[turn]), cost)
        for turn in sorted(few.keys() & many.keys())
    }


def _extra_bytes(entry: Planned, settings: Settings, progress: Progress, meter: MemoryMeter | None) -> int | None:
    if meter is None:
        return None
    try:
        extra = meter.measure(
            Job(
                name=entry.name,
                loss=entry.loss,
                size=entry.size,
                percent=entry.percent,
                seed=settings.seed,
                device=settings.device,
                threads=torch.get_num_threads(),
            )
        )
    except RuntimeError as error:
        raise CellError(f"bench losses: memory of {entry}: {error}") from error
    progress.advance(f"memory of {entry}", _memory_cost(entry))
    return extra


def _memory_cost(entry: Planned) -> float:
    return 0.0 if entry.skipped or entry.seconds is None else entry.seconds + FORK


def run(settings: Settings, progress: Progress) -> Study:
    """The whole study: plans every cell first, so that the time left is known, then measures."""
    # Before there is load of our own making.
    machine = describe(settings.device)
    cells = [(size, percent) for size in settings.sizes for percent in settings.percent]
    progress.begin("estimating", len(cells) * len(NAMES))
    plans = [plan(size, percent, settings, progress) for size, percent in cells]
    entries = [entry for planned in plans for entry in planned]
    cost = sum(turn.cost(settings) for entry in entries for turn in entry.turns())
    progress.begin("measuring", cost + settings.memory * sum(_memory_cost(entry) for entry in entries))
    results: list[Result] = []
    with ExitStack() as stack:
        meter = stack.enter_context(MemoryMeter()) if settings.memory else None
        for planned in plans:
            results += measure(planned, settings, progress, meter)
    large = run_large(settings, progress) if settings.large else []
    return Study(machine, settings, results, large)
