"""The cost of a call on a GPU, counted in the interpreter: launches, host waits, bytes moved, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import interpreter_builder

from bucketrank import ap_loss, rank_sort_loss, use_backend
from bucketrank.launches import Launches, count_launches
from bucketrank.losses.triton import rank_with_triton

from ..cases import RANKING, localisation_errors, synthetic
from .harness import NAMES

# Operations for which the host waits until the device is idle, also those that wait only for some inputs.
WAITS = ("nonzero", "_local_scalar_dense", "item", "bincount", "index", "masked_select", "unique", "is_nonzero")
# The limits of launches, forward and backward.
MOST_LAUNCHES = {"ap": 20, "interpolated_ap": 20, "rank_sort": 25, "alrp": 25}


def _count(name: str, logits: Tensor, targets: Tensor, sizes: tuple[int, ...], max_positives: int | None) -> Launches:
    """Return what one call launches, forward and backward."""
    errors = localisation_errors(targets) if name == "alrp" else None
    # The interpreter copies tensors through torch; none of that happens on a device.
    with mock.patch("triton.runtime.interpreter.InterpretedFunction.run"), count_launches() as counted:
        first, second, ranking = rank_with_triton(
            logits, targets, errors, loss=NAMES[name], delta=0.5, sizes=sizes, max_positives=max_positives
        )
        ranking.backward(first, second)
    return counted


@pytest.mark.parametrize("name", RANKING)
@pytest.mark.parametrize("rankings", [1, 4])
@pytest.mark.parametrize("max_positives", [None, 1500])
def test_launches_and_waits(max_positives: int | None, rankings: int, name: str) -> None:
    logits, targets = synthetic(100_000, 1_000)
    sizes = (100_000 // rankings,) * rankings
    counted = _count(name, logits, targets, sizes, max_positives)
    assert counted.launches <= MOST_LAUNCHES[name], vars(counted)
    assert counted.launches + counted.allocations.total() <= MOST_LAUNCHES[name], "allocations included"
    assert counted.kernels.total() >= 10, "the kernels are counted"
    assert counted.waits == (1 if max_positives is None else 0), counted.waiting
    assert sum(counted.operations[wait] for wait in WAITS) == counted.waits, counted.operations
    assert counted.launches == {"ap": 14, "interpolated_ap": 14, "rank_sort": 15, "alrp": 14}[name] + (rankings > 1)


@pytest.mark.parametrize("loss", [ap_loss, rank_sort_loss])
@pytest.mark.parametrize("max_positives", [None, 1500])
def test_the_function_adds_no_wait(max_positives: int | None, loss: Any) -> None:
    logits, targets = synthetic(100_000, 1_000)
    logits.requires_grad_()
    with (
        use_backend("triton"),
        mock.patch("triton.runtime.interpreter.InterpretedFunction.run"),
        count_launches() as counted,
    ):
        terms = loss(logits, targets, max_positives=max_positives)
        (terms if isinstance(terms, Tensor) else terms.ranking + terms.sorting).backward()
    assert counted.waits == (1 if max_positives is None else 0), counted.waiting
    assert counted.launches <= 20, vars(counted)


@contextmanager
def _count_bytes(arrays: dict[str, Tensor]) -> Iterator[Counter[str]]:
    """Count the bytes that kernels load from and store to each of these arrays."""
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store
    moved: Counter[str] = Counter()

    def note(action: str, pointers: Any, mask: Any) -> None:
        addresses = pointers.data[mask.data.astype(bool)]
        for name, array in arrays.items():
            start = array.data_ptr()
            hits = ((addresses >= start) & (addresses < start + array.nbytes)).sum()
            moved[f"{action} {name}"] += int(hits) * array.element_size()

    def count_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        note("load", pointers, mask)
        return load(pointers, mask, *rest)

    def count_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note("store", pointers, mask)
        return store(pointers, value, mask, *rest)

    with (
        mock.patch.object(interpreter_builder, "create_masked_load", count_load),
        mock.patch.object(interpreter_builder, "create_masked_store", count_store),
    ):
        yield moved


def test_bytes_moved() -> None:
    size, positives = 4_000, 40
    logits, targets = synthetic(size, positives)
    logits = torch.where(targets > 0, logits + 100, logits)  # no negative is relevant
    with _count_bytes({"logits": logits, "targets": targets}) as moved:
        first, _, ranking = rank_with_triton(
            logits, targets, None, loss="rs", delta=0.5, sizes=(size,), max_positives=None
        )
    # One pass reads 4 + 4 bytes per logit; the positives are read again: for the keys, and twice to gather them.
    assert moved["load logits"] == 4 * (size + 2 * positives)
    assert moved["load targets"] == 4 * (size + positives)
    gradient = torch.empty_like(logits)
    with (
        mock.patch.object(torch, "empty_like", return_value=gradient),
        _count_bytes({"logits": logits, "targets": targets, "gradient": gradient}) as moved,
    ):
        ranking.backward(torch.ones_like(first), None)
    assert moved["load logits"] == moved["load targets"] == 4 * size
    assert moved["store gradient"] == 4 * (size + positives)


def test_memory() -> None:
    size, positives = 10_000_000, 20_000
    logits, targets = torch.empty(size), torch.zeros(size)
    targets[:positives] = 0.5
    largest: list[int] = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if not func.is_view:
                outputs = result if isinstance(result, (tuple, list)) else [result]
                largest.extend(output.nbytes for output in outputs)
            return result

    with mock.patch("triton.runtime.interpreter.InterpretedFunction.run"), Allocations():
        first, second, ranking = rank_with_triton(
            logits, targets, None, loss="rs", delta=0.5, sizes=(size,), max_positives=None
        )
        ranking.backward(first, second)
    # All that was ever allocated, as if nothing were freed, the mask of the positives and the gradient included.
    assert sum(largest) <= 1.5 * logits.nbytes
