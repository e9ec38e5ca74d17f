"""The exact losses on a large batch: 20 million logits, one GPU's share, with 20,000 or 100,000 positives.

Each is timed against a twentieth of the logits, and against focal loss on the same logits, because logits that no
longer fit the caches slow every loss.
"""

from __future__ import annotations

import torch

from bucketrank.bench.device_clock import device_clock
from bucketrank.bench.losses.loss_contenders import LOSSES, METHODS, loss_step, why_unavailable
from bucketrank.bench.losses.loss_results import PART, LargeResult, LossBenchSettings
from bucketrank.bench.losses.peak_memory import AllocatorMeter, MemoryJob, MemoryMeter, memory_meter
from bucketrank.bench.losses.synthetic_logits import draw_logits
from bucketrank.bench.measurement import MeasurementError, Progress
from bucketrank.bench.timing import Spread, TimedCall, interleave, ratio

SIZE = 20_000_000
PERCENT = (0.1, 0.5)
ROUNDS = 15  # the calls on the small part take milliseconds and are noisy
CALLS = 5  # that take turns in a cell


def measure_large_batch(settings: LossBenchSettings, progress: Progress, *, size: int = SIZE) -> list[LargeResult]:
    """Measure both losses with both backends of ``exact``; memory is always measured."""
    names = [name for name in METHODS if METHODS[name] == "exact" and not why_unavailable(name, settings.device)]
    cells = [(name, loss, percent) for percent in PERCENT for loss in LOSSES for name in names]
    progress.begin(f"L = {size}", len(cells) * (CALLS * (ROUNDS + 1) + 1))
    with memory_meter(settings.device) as meter:
        return [_measure(*cell, size, settings, progress, meter) for cell in cells]


def _measure(
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
            rounds=ROUNDS,
            clock=device_clock(settings.device),
            advance=lambda _, calls: progress.advance(text, calls),
        )
        extra = meter.measure(job)
    except Exception as error:
        raise MeasurementError(f"bench losses: {text}: {error}") from error
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
