"""Large rankings, whose positives are compared in a tree: the limit is lowered, so that small inputs reach it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.launches import count_launches
from bucketrank.losses.triton import rank_with_triton, ranking, tree

from ...ptx.device import Device, IdleDevice, emulate
from ..cases import LOSSES, RANKING, answer, assert_same, hard_inputs, localisation_errors, synthetic
from .harness import NAMES, compute

HARD = hard_inputs()

pytestmark = pytest.mark.usefixtures("device")

every_loss = pytest.mark.parametrize("name", RANKING)
# RS is the only loss that descends the tree.
mostly_slow = pytest.mark.parametrize("name", ["rank_sort", pytest.param("alrp", marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def _small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "MAX_IN_TILES", 1)


def _hard_in_one(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """All hard inputs as the rankings of one call, with empty rankings between them."""
    logits, targets = (torch.cat(parts).to(dtype) for parts in zip(*HARD.values(), strict=True))
    return logits, targets, tuple(size for logits, _ in HARD.values() for size in (len(logits), 0))


@pytest.mark.parametrize(
    ("name", "delta", "dtype"),
    [
        ("rank_sort", 0.0, torch.float32),
        ("rank_sort", 0.5, torch.float32),
        pytest.param("rank_sort", 0.1, torch.float64, marks=pytest.mark.slow),
        pytest.param("alrp", 0.5, torch.float64, marks=pytest.mark.slow),
        *(pytest.param(name, 0.1, torch.float32, marks=pytest.mark.slow) for name in ("ap", "interpolated_ap", "alrp")),
    ],
)
def test_equals_the_definition(name: str, delta: float, dtype: torch.dtype) -> None:
    logits, targets, sizes = _hard_in_one(dtype)
    got = compute(name, logits, targets, delta, sizes=sizes)
    for case, (case_logits, case_targets) in enumerate(HARD.values()):
        expected = LOSSES[name].oracle(case_logits, case_targets, delta)
        assert_same(got.answer(2 * case, sizes), expected, relative=1e-6 if dtype is torch.float32 else 1e-9)


@mostly_slow
def test_many_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums pass from tile to tile, also where there are more tiles than positives in a tile."""
    monkeypatch.setattr(tree, "SCAN", 16)
    logits, targets = synthetic(1_500, 700)
    targets[targets > 0.7] = 0.8  # equal labels
    expected = answer(LOSSES[name].compute, logits.double(), targets.double(), delta=0.5, way=("pairwise", "torch"))
    assert_same(compute(name, logits, targets, 0.5).answer(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_three_thousand_positives(delta: float) -> None:
    logits, targets = synthetic(6_000, 3_000)
    way = "pairwise", "torch"
    expected = answer(LOSSES["rank_sort"].compute, logits.double(), targets.double(), delta=delta, way=way)
    assert_same(compute("rank_sort", logits, targets, delta).answer(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("delta", [1e-12, 1e-300, 1e35])
def test_a_delta_beyond_the_digits_of_the_logits(delta: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([1e6, 1e6, 1e6 + 1, 1e6 - 1, 0.0, -0.0], dtype=dtype)
    targets = torch.tensor([0.5, 0.4, 0.0, 0.9, 0.3, 0.3], dtype=dtype)
    for name in ("rank_sort", "alrp"):
        assert_same(compute(name, logits, targets, delta).answer(), LOSSES[name].oracle(logits, targets, delta))


@every_loss
def test_a_broken_ranking_leaves_the_others_alone(name: str) -> None:
    logits, targets = synthetic(600, 60)
    logits[:200][targets[:200] > 0] = torch.nan
    targets[250] = torch.inf
    got = compute(name, logits, targets, 0.5, sizes=(200, 200, 200))
    alone = compute(name, logits[400:], targets[400:], 0.5)
    for values, expected in zip(got.values, alone.values, strict=True):
        assert values.isnan().tolist() == [True, True, False]
        torch.testing.assert_close(values[2:], expected)
    for gradient, expected in zip(got.gradients, alone.gradients, strict=True):
        torch.testing.assert_close(gradient[400:], expected)


def test_a_localisation_error_that_is_not_finite_stays_in_its_ranking() -> None:
    logits, targets = synthetic(400, 40)
    errors = localisation_errors(targets).float()
    errors[0] = torch.inf
    got = compute("alrp", logits, targets, 0.5, sizes=(200, 200), localisation=errors)
    assert got.values[1].isfinite().tolist() == [False, True]


@mostly_slow
def test_the_same_bits_with_a_capacity_and_in_any_interleaving(device: Device, name: str) -> None:
    logits, targets = synthetic(3_000, 300)
    sizes, positives, delta = (1_700, 1_300), 300, 0.5
    expected = compute(name, logits, targets, delta, sizes=sizes)
    for seed, capacity in ((2, positives), (3, positives), (4, None)):
        device.seed = seed
        got = compute(name, logits, targets, delta, sizes=sizes, max_positives=capacity)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_padding_changes_nothing() -> None:
    logits, targets = synthetic(1_000, 90)
    expected = compute("rank_sort", logits, targets, 0.5, sizes=(600, 400))
    got = compute("rank_sort", logits, targets, 0.5, sizes=(600, 400), max_positives=150)
    # Places on the score axis have fewer digits where there may be more positives.
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-12)


@every_loss
def test_launches_without_a_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "MAX_IN_TILES", 1 << 15)
    logits, targets = synthetic(100_000, 40_000)
    launches = {}
    for capacity in (1 << 15, 50_000):
        errors = torch.rand(capacity) if name == "alrp" else None
        with emulate(device=IdleDevice(80)), count_launches() as counted:
            settings = {"loss": NAMES[name], "delta": 0.5, "sizes": (100_000,), "max_positives": capacity}
            rank_with_triton(logits, targets, errors, **settings)  # type: ignore[arg-type]
        assert counted.waits == 0, counted.waiting
        launches[capacity] = counted.launches
    assert launches[1 << 15] <= 10, "tiles"
    # Three kernels for each of 16 levels and two directions, and the torch operations that prepare them.
    assert launches[50_000] <= (180 if name == "rank_sort" else 60), vars(counted)


CODE = """
from unittest import mock
import torch
from triton.runtime import driver
from bucketrank.losses.triton import rank_with_triton, ranking, tree
from tests.losses.cases import LOSSES, synthetic
from tests.ptx.device import Device, _Driver

ranking.MAX_IN_TILES, ranking.COPIES, ranking.TILE, tree.SCAN = 1, 3, 16, 16
logits, targets = synthetic(40, 12)
logits, targets = (logits * 4).round() / 4, (targets * 8).round() / 8
index = (targets > 0).nonzero().view(-1)
with mock.patch.object(driver, "_active" if hasattr(driver, "_active") else "active", _Driver(Device(80))):
    settings = {"loss": "rs", "delta": 0.5, "sizes": (40,), "max_positives": None}
    first, second, ranked = rank_with_triton(logits, targets, None, **settings)
expected = LOSSES["rank_sort"].oracle(logits, targets, 0.5)
torch.testing.assert_close([first[0].double(), second[0].double()], expected.values, rtol=1e-6, atol=0)
demotion = ranked.arrays.second_own[ranked.arrays.rows[: len(index)]] / len(index)
torch.testing.assert_close(demotion, expected.gradients[1][index], rtol=0, atol=1e-12)
"""


@pytest.mark.slow
def test_in_tritons_interpreter(device: Device) -> None:
    if device.capability != 80:
        pytest.skip("the interpreter knows no capabilities")
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", CODE], check=True, env=environment, cwd=root)
