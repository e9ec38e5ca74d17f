"""One GPU's share of a real batch: 20 million logits, 20,000 or 100,000 positives, against a twentieth of them."""

from __future__ import annotations

import torch

from bucketrank.bench.contenders import LOSSES, METHODS, step, synchronizer, unavailable
from bucketrank.bench.memory import Job, MemoryMeter
from bucketrank.bench.study import CellError, LargeResult, Progress, Settings
from bucketrank.bench.synthetic import draw
from bucketrank.bench.timing import Contender, Spread, interleave, ratio

SIZE = 20_000_000
PERCENT = (0.1, 0.5)
ROUNDS = 5


def run_large(settings: Settings, progress: Progress, *, size: int = SIZE) -> list[LargeResult]:
    """Both backends of ``exact``, both losses; memory is always measured."""
    names = [name for name in METHODS if METHODS[name] == "exact" and not unavailable(name, settings.device)]
    cells = [(name, loss, percent) for percent in PERCENT for loss in LOSSES for name in names]
    progress.begin(f"L = {size}", len(cells) * (2 * ROUNDS + 3))
    with MemoryMeter() as meter:
        return [_measure(*cell, size, settings, progress, meter) for cell in cells]


def _measure(
    name: str, loss: str, percent: float, size: int, settings: Settings, progress: Progress, meter: MemoryMeter
) -> LargeResult:
    text = f"{LOSSES[loss]} {name} at L = {size}, {percent:g} % positives"
    data, part = (draw(n, percent, seed=settings.seed, device=settings.device) for n in (size, max(size // 20, 2)))
    job = Job(
        name=name,
        loss=loss,
        size=size,
        percent=percent,
        seed=settings.seed,
        device=settings.device,
        threads=torch.get_num_threads(),
    )
    try:
        samples = interleave(
            {"part": Contender(step(name, loss, part)), "all": Contender(step(name, loss, data))},
            rounds=ROUNDS,
            synchronize=synchronizer(settings.device),
            advance=lambda _, calls: progress.advance(text, calls),
        )
        extra = meter.measure(job)
    except Exception as error:
        raise CellError(f"bench losses: {text}: {error}") from error
    progress.advance(text, 1)
    return LargeResult(
        contender=name,
        loss=loss,
        size=size,
        positives=int((data.targets > 0).sum()),
        seconds=Spread.of(list(samples["all"].values())),
        growth=ratio(samples["all"], samples["part"]),
        extra_bytes=extra,
        logit_bytes=data.logits.nbytes,
    )
