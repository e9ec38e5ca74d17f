"""The losses with random inputs against their definitions, in several threads at once."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from tests.losses.cases import DELTAS, LOSSES, answer, assert_same, pairs

LARGEST = 400  # logits of a random input; the definition compares all pairs


def compare_losses(seconds: float, threads: int, first_seed: int) -> Counter[str]:
    """Compare losses of random inputs with the definition in several threads; return the number of comparisons."""
    end = time.monotonic() + seconds

    def work(thread: int) -> Counter[str]:
        rng = np.random.default_rng([first_seed, thread])
        done: Counter[str] = Counter()
        choices = pairs(skip=["bucketed"])  # the bucketed method approximates the definition
        while time.monotonic() < end:
            name, way = choices[rng.integers(len(choices))]
            loss = LOSSES[name]
            delta = float(rng.choice(loss.deltas if name == "dr" else [*DELTAS, rng.uniform(0, 3)]))
            logits, targets = random_input(rng)
            assert_same(
                answer(loss.compute, logits, targets, delta=delta, way=way), loss.oracle(logits, targets, delta)
            )
            done[f"{name} {'/'.join(way)}"] += 1
        return done

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)), Counter())


def random_input(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return float64 logits and targets, some with many equal logits, few or no positives, or ignored entries."""
    size = int(LARGEST ** rng.random())  # most are small, because the definition is slow
    logits = rng.normal(size=size) * rng.choice([0.1, 1, 5])
    if rng.random() < 0.3:
        logits = np.round(logits * 4) / 4
    targets = np.where(rng.random(size) < rng.choice([0, 0.02, 0.2, 1]), rng.uniform(0.01, 1, size), 0)
    if rng.random() < 0.3:
        targets = np.where((rng.random(size) < 0.1) & (targets == 0), -1, targets)
    return torch.from_numpy(logits), torch.from_numpy(targets)
