"""Mutated annotation files against check-data.

Every file must be refused with problems, or be accepted and then read and evaluated without an exception.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bucketrank.data import CocoDataset, check
from bucketrank.data.annotations import Split
from bucketrank.errors import DataError
from bucketrank.evaluation import Evaluator
from tests.data.fuzz import broken_documents, damages, dumped, write_folder
from tests.data.small_folders import sound_document

BATCH = 1000  # files per call of hypothesis, which remembers all examples of a call
SOUND = dumped(sound_document()).encode()

Damages = list[tuple[Callable[[bytes, int], bytes], int]]
mutations: st.SearchStrategy[tuple[bytes, Damages]] = st.tuples(
    broken_documents().map(lambda document: dumped(document).encode()), st.just([])
) | st.tuples(st.just(SOUND), st.lists(damages, min_size=1, max_size=3))


def check_annotations(count: int, first_seed: int) -> Counter[str]:
    """Check ``count`` mutated annotation files; return how many were refused and accepted.

    Each ``BATCH`` of files has a seed of its own, from ``first_seed`` on: a later seed continues an earlier call.
    """
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
            counts = ", ".join(f"{count:,} {name}" for name, count in sorted(results.items()))
            sys.stderr.write(f"seeds {first_seed} to {first_seed + number}: {counts}\n")
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
