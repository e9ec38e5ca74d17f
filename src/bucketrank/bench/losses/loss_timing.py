"""The paper's synthetic experiment: every method and backend over sizes and percentages, against score-based losses."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from bucketrank.bench.device_clock import current_device, device_clock
from bucketrank.bench.losses.cell_plan import PlannedContender, contenders_of, plan_cell
from bucketrank.bench.losses.large_batch import measure_large_batch
from bucketrank.bench.losses.loss_contenders import DELTAS, count_operations
from bucketrank.bench.losses.loss_launches import is_counted, step_launches
from bucketrank.bench.losses.loss_results import LossBench, LossBenchSettings, LossResult
from bucketrank.bench.losses.peak_memory import AllocatorMeter, MemoryJob, MemoryMeter, memory_meter
from bucketrank.bench.losses.step_estimate import extrapolate
from bucketrank.bench.losses.synthetic_logits import draw_logits
from bucketrank.bench.measurement import MeasurementError, Progress
from bucketrank.bench.timing import Samples, Spread, interleave, ratio
from bucketrank.provenance.machine import describe

Meter = MemoryMeter | AllocatorMeter


def measure_losses(settings: LossBenchSettings, progress: Progress) -> LossBench:
    """Run the whole benchmark: plan every cell first, so that the time left is known, then measure."""
    # Described first, before the benchmark itself puts load on the machine.
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
        clock=device_clock(settings.device),
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
            result = _timed(result, contender, samples, float(values[contender.title]))
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
        raise MeasurementError(f"bench losses: memory of {contender}: {error}") from error
    progress.advance(f"memory of {contender}", _memory_seconds(contender, meter))
    return extra


def _cost(contender: PlannedContender, settings: LossBenchSettings, meter: Meter | None) -> float:
    """Return the seconds that all measurements of a contender will take."""
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
