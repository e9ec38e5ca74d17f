"""One GPU's share of a real batch: 20 million logits, 20,000 or 100,000 positives, against a twentieth of them.

And against focal loss on the same logits: what no longer fits the caches slows everyone.
"""

from __future__ import annotations

import torch

from bucketrank.bench.contenders import LOSSES, METHODS, step, synchronizer, unavailable
from bucketrank.bench.memory import Job, MemoryMeter
from bucketrank.bench.study import PART, CellError, LargeResult, Progress, Settings
from bucketrank.bench.synthetic import draw
from bucketrank.bench.timing import Contender, Spread, interleave, ratio

SIZE = 20_000_000
PERCENT = (0.1, 0.5)
ROUNDS = 15  # a call of some milliseconds is a noisy unit
CONTENDERS = 5  # that take turns in a cell


def run_large(settings: Settings, progress: Progress, *, size: int = SIZE) -> list[LargeResult]:
    """Both backends of ``exact``, both losses; memory is always measured."""
    names = [name for name in METHODS if METHODS[name] == "exact" and not unavailable(name, settings.device)]
    cells = [(name, loss, percent) for percent in PERCENT for loss in LOSSES for name in names]
    progress.begin(f"L = {size}", len(cells) * (CONTENDERS * (ROUNDS + 1) + 1))
    with MemoryMeter() as meter:
        return [_measure(*cell, size, settings, progress, meter) for cell in cells]


def _measure(
    name: str, loss: str, percent: float, size: int, settings: Settings, progress: Progress, meter: MemoryMeter
) -> LargeResult:
    text = f"{LOSSES[loss]} {name} at L = {size}, {percent:g} % positives"
    data, sparse, dense = (
        draw(n, share, seed=settings.seed, device=settings.device)
        for n, share in ((size, percent), (size // PART, percent), (size // PART, percent * PART))
    )
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
            {
                "as sparse": Contender(step(name, loss, sparse)),
                "as many": Contender(step(name, loss, dense)),
                "all": Contender(step(name, loss, data)),
                "focal part": Contender(step("focal", None, sparse)),
                "focal": Contender(step("focal", None, data)),
            },
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
        growth=ratio(samples["all"], samples["as sparse"]),
        growth_in_logits=ratio(samples["all"], samples["as many"]),
        focal_growth=ratio(samples["focal"], samples["focal part"]),
        to_focal=ratio(samples["all"], samples["focal"]),
        extra_bytes=extra,
        logit_bytes=data.logits.nbytes,
    )
