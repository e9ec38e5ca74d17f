"""The emulated device computes what a GPU computes, and finds what must not happen on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from .device import Device, emulate  # noqa: E402
from .program import KernelError, has_compiler  # noqa: E402

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs g++, which compiles the interpreter of PTX")

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with emulate(80) as emulated:
        yield emulated


@triton.jit
def scale(x, y, size, BLOCK: tl.constexpr):  # noqa: N803 (Triton's constants are capitals)
    """Write twice each number, and the sum of the block to the last entry."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(y + at, (2 * value).to(y.dtype.element_ty), mask=at < size)
    tl.store(y + size + tl.program_id(0), tl.sum(value, 0).to(y.dtype.element_ty))


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_arithmetic_reductions_and_half_precision(dtype: torch.dtype) -> None:
    x = torch.arange(300).sub(150).div(4).to(dtype)
    y = torch.zeros(303, dtype=dtype)
    scale[(3,)](x, y, 300, BLOCK=128, **OPTIONS)
    assert torch.equal(y[:300], 2 * x)
    torch.testing.assert_close(y[300:], torch.stack([part.float().sum() for part in x.split(128)]).to(dtype))


@pytest.mark.usefixtures("device")
def test_an_access_past_the_end_is_an_error() -> None:
    with pytest.raises(KernelError, match=r"write out of bounds in block \d, line \d+ \(test_device.py:\d+"):
        scale[(3,)](torch.ones(300), torch.zeros(300), 300, BLOCK=128, **OPTIONS)


@pytest.mark.usefixtures("device")
def test_an_address_that_is_not_aligned_is_an_error() -> None:
    x, y = torch.ones(301), torch.zeros(303)
    compiled = scale[(3,)](x[:300], y, 300, BLOCK=128, **OPTIONS)  # for aligned pointers, in wide pieces
    if "ld.global.v" not in compiled.asm["ptx"]:
        compiled = scale[(1,)](torch.ones(512), torch.zeros(513), 512, BLOCK=512, **OPTIONS)
    with pytest.raises(KernelError, match="address not aligned to 16 bytes"):
        compiled[(1, 1, 1)](torch.ones(513)[1:], torch.zeros(513), 512, 512)


@triton.jit
def exchange(x, y, WAIT: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Write a block and read it reversed, with or without a barrier between."""
    lanes = tl.arange(0, BLOCK)
    tl.store(x + lanes, lanes)
    if WAIT:
        tl.debug_barrier()
    tl.store(y + lanes, tl.load(x + BLOCK - 1 - lanes))


@pytest.mark.usefixtures("device")
def test_a_missing_barrier_is_a_race() -> None:
    x, y = torch.zeros(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    exchange[(1,)](x, y, WAIT=True, BLOCK=256, **OPTIONS)
    assert y.tolist() == list(reversed(range(256)))
    with pytest.raises(KernelError, match=r"race in global memory: a (write and a read|read and a write)"):
        exchange[(1,)](x, y, WAIT=False, BLOCK=256, **OPTIONS)


@triton.jit
def count(total, last, ATOMIC: tl.constexpr):  # noqa: N803
    """Count the programs, and write which of them came last."""
    if ATOMIC:
        tl.atomic_add(total, 1, sem="relaxed")
    else:
        tl.store(last, tl.program_id(0))


def test_programs_meet_in_atomics_only(device: Device) -> None:
    total, last = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    before = device.atomics["count"]
    count[(50,)](total, last, ATOMIC=True, **OPTIONS)
    assert total.item() == 50
    assert device.atomics["count"] == before + 50
    with pytest.raises(KernelError, match="race in global memory: two writes by block"):
        count[(50,)](total, last, ATOMIC=False, **OPTIONS)


def test_interleavings_differ_and_repeat() -> None:
    order = torch.zeros(20, dtype=torch.int32)
    orders = []
    for seed in (1, 1, 2):
        with emulate(80, seed=seed):
            ticket = torch.zeros(1, dtype=torch.int32)
            take_ticket[(20,)](ticket, order, **OPTIONS)
        orders.append(order.tolist())
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(20))


@triton.jit
def take_ticket(ticket, order):
    """Write the order in which the programs arrive."""
    tl.store(order + tl.program_id(0), tl.atomic_add(ticket, 1, sem="relaxed"))
