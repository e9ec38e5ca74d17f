"""Long random tests, outside the test suite.

    python -m tests.soak annotations --count 100000 --seed 1
    python -m tests.soak losses --seconds 3600 --threads 8 --seed 1

``annotations`` mutates annotation files and checks each. Every file must be refused with problems, or be accepted and
then read and evaluated without an exception. ``losses`` compares the losses with their definitions in several threads
at once. Both print their counts and end with an exception at the first failure.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from bucketrank.data import CocoDataset, DataError, check
from bucketrank.data.annotations import Split
from bucketrank.evaluation import Evaluator
from tests.data.fuzz import broken_documents, damages, dumped, write_folder
from tests.data.small_folders import sound_document
from tests.losses.cases import DELTAS, LOSSES, answer, assert_same, pairs

BATCH = 1000  # files per call of hypothesis, which remembers all examples of a call
SOUND = dumped(sound_document()).encode()
LARGEST = 400  # logits of a random input; the definition compares all pairs

Damages = list[tuple[Callable[[bytes, int], bytes], int]]
mutations: st.SearchStrategy[tuple[bytes, Damages]] = st.tuples(
    broken_documents().map(lambda document: dumped(document).encode()), st.just([])
) | st.tuples(st.just(SOUND), st.lists(damages, min_size=1, max_size=3))


def check_annotations(count: int, first_seed: int) -> Counter[str]:
    """Check ``count`` mutated annotation files; return how many were refused and accepted."""
    results: Counter[str] = Counter()
    with TemporaryDirectory() as name:
        folder = write_folder(Path(name), sound_document())
        split = Split(folder / "train.json", folder / "images")
        for number in range(-(-count // BATCH)):
            examples = min(BATCH, count - number * BATCH)

            @seed(first_seed + number)
            @settings(
                max_examples=examples,
                database=None,
                deadline=None,
                derandomize=False,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            @given(mutations, st.booleans())
            def one_batch(mutation: tuple[bytes, Damages], masks: bool) -> None:
                data, broken = mutation
                for damage, at in broken:
                    data = damage(data, at) or b" "
                split.annotations.write_bytes(data)
                results[judge(split, masks=masks)] += 1

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns about odd files
                one_batch()
    return results


def judge(split: Split, *, masks: bool) -> str:
    """Return whether check-data accepts a split; raise if it accepts one that cannot be read and evaluated."""
    problems = check(split, masks=masks, depth="headers", workers=1)
    if any(problem.severity == "error" for problem in problems):
        if not all(str(problem) for problem in problems):
            raise AssertionError("a problem without a message")
        return "refused"
    try:
        images = CocoDataset(split, masks=masks)
    except DataError as error:
        raise AssertionError("accepted by check, refused by CocoDataset") from error
    for index in range(len(images)):
        _, target = images[index]
        if not torch.isfinite(target["boxes"]).all() or len(target["boxes"]) != len(target["labels"]):
            raise AssertionError(f"wrong target {target}")
    Evaluator(split, masks=masks).result("masks" if masks else "boxes")
    return "accepted"


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


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    annotations = commands.add_parser("annotations", help="mutated annotation files against check-data")
    annotations.add_argument("--count", type=int, default=100_000, help="files to check (100000)")
    losses = commands.add_parser("losses", help="losses in several threads against their definitions")
    losses.add_argument("--seconds", type=float, default=3600, help="duration (3600)")
    losses.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="Python threads (one per core)")
    for command in (annotations, losses):
        command.add_argument("--seed", type=int, default=0, help="of the random numbers (0)")
    chosen = parser.parse_args(words)
    start = time.monotonic()
    if chosen.command == "annotations":
        results = check_annotations(chosen.count, chosen.seed)
    else:
        results = compare_losses(chosen.seconds, chosen.threads, chosen.seed)
    lines = [f"{count:>10,} {name}" for name, count in sorted(results.items())]
    total = f"{sum(results.values()):,} in {time.monotonic() - start:.0f} s, seed {chosen.seed}"
    sys.stdout.write("\n".join([*lines, total, ""]))


if __name__ == "__main__":
    main()
