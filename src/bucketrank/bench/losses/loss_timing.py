"""The paper's synthetic experiment: every method and backend over sizes and percentages, against score-based losses."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace

import torch

from bucketrank.bench.losses.cell_plan import NAMES, PlannedContender, plan_cell
from bucketrank.bench.losses.large_batch import measure_large_batch
from bucketrank.bench.losses.loss_contenders import DELTAS, count_operations
from bucketrank.bench.losses.loss_results import LossBench, LossBenchSettings, LossResult
from bucketrank.bench.losses.peak_memory import MemoryJob, MemoryMeter
from bucketrank.bench.losses.step_estimate import extrapolate
from bucketrank.bench.losses.synthetic_logits import draw_logits
from bucketrank.bench.measurement import MeasurementError, Progress, synchronizer
from bucketrank.bench.timing import Samples, Spread, interleave, ratio
from bucketrank.provenance.machine import describe

# Seconds to start the process that measures memory; only the progress bar depends on this.
FORK_SECONDS = 0.7


def measure_losses(settings: LossBenchSettings, progress: Progress) -> LossBench:
    """Run the whole benchmark: plan every cell first, so that the time left is known, then measure."""
    # Described first, before the benchmark itself puts load on the machine.
    machine = describe(settings.device)
    cells = [(size, percent) for size in settings.sizes for percent in settings.percent]
    progress.begin("estimating", len(cells) * len(NAMES))
    plans = [plan_cell(size, percent, settings, progress) for size, percent in cells]
    contenders = [contender for planned in plans for contender in planned]
    cost = sum(turn.cost(settings) for contender in contenders for turn in contender.turns())
    progress.begin("measuring", cost + settings.memory * sum(map(_memory_seconds, contenders)))
    results: list[LossResult] = []
    with ExitStack() as stack:
        meter = stack.enter_context(MemoryMeter()) if settings.memory else None
        for planned in plans:
            results += measure_cell(planned, settings, progress, meter)
    large = measure_large_batch(settings, progress) if settings.large else []
    return LossBench(machine, settings, results, large)


def measure_cell(
    planned: list[PlannedContender], settings: LossBenchSettings, progress: Progress, meter: MemoryMeter | None
) -> list[LossResult]:
    """Measure one cell: the time of all contenders, interleaved, then the memory of each."""
    size, percent = planned[0].size, planned[0].percent
    data = draw_logits(size, percent, seed=settings.seed, device=settings.device)
    values: dict[str, float] = {}
    turns = {turn.title: turn for contender in planned for turn in contender.turns()}
    samples = interleave(
        {title: turn.timed_call(data, values, settings) for title, turn in turns.items()},
        rounds=settings.repeats,
        synchronize=synchronizer(settings.device),
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
        )
        if contender.skipped is None:
            extra_bytes = _extra_bytes(contender, settings, progress, meter)
            result = _timed(replace(result, extra_bytes=extra_bytes), contender, samples, values[contender.title])
        elif contender.parts:
            estimates = _estimates(contender, samples, result.flops)
            median = Spread.of(list(estimates.values())).median
            result = replace(result, estimated_samples=estimates, estimated_seconds=median)
        results.append(result)
    return results


def _timed(result: LossResult, contender: PlannedContender, samples: dict[str, Samples], value: float) -> LossResult:
    if not math.isfinite(value):
        raise MeasurementError(f"bench losses: {contender}: expected a finite loss, got {value}")
    own = samples[contender.title]
    to_focal = ratio(own, samples["focal"]) if "focal" in samples else None
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
    contender: PlannedContender, settings: LossBenchSettings, progress: Progress, meter: MemoryMeter | None
) -> int | None:
    if meter is None:
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
            )
        )
    except RuntimeError as error:
        raise MeasurementError(f"bench losses: memory of {contender}: {error}") from error
    progress.advance(f"memory of {contender}", _memory_seconds(contender))
    return extra


def _memory_seconds(contender: PlannedContender) -> float:
    return 0.0 if contender.skipped or contender.seconds is None else contender.seconds + FORK_SECONDS
