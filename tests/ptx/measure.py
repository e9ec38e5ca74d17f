"""Measure what docs/gpu.md states about the Triton kernels without a GPU: ``python -m tests.ptx.measure``.

Prints the time of the host for launches and memory, and the machine instructions per pair in the loops that compare
positives. Needs the disassembler that Triton ships.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import triton

from bucketrank.losses.triton import launch, rank_with_triton, ranking

from ..losses.cases import synthetic
from .device import IdleDevice, emulate

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def microseconds(run: Callable[[], object], repeats: int = 1000) -> float:
    """Return the median time of ``run``."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e6 * median(times)


def host_time(loss: str) -> tuple[float, float]:
    """Return the microseconds of the host for the launches of one call, and for the memory that they share."""
    logits, targets = synthetic(20_000, 200)
    size = logits.numel()

    def train() -> None:
        first, second, ranked = rank_with_triton(
            logits, targets, None, loss=loss, delta=0.5, sizes=(size,), max_positives=None
        )
        ranked.backward(first, second)

    train()
    start_kernel = launch.Launcher.__call__
    spent: list[float] = []

    def timed(*arguments: Any, **constants: Any) -> None:
        start = time.perf_counter()
        start_kernel(*arguments, **constants)
        spent[-1] += time.perf_counter() - start

    with mock.patch.object(launch.Launcher, "__call__", timed):
        for _ in range(1000):
            spent.append(0.0)
            train()
    launches = 1e6 * median(spent)
    plan = ranking.Plan.of(logits, targets, loss=loss, delta=0.5, sizes=(size,), max_positives=None, positives=200)
    memory = plan.layout(size).allocate(logits.device)

    def divide() -> None:
        layout = plan.layout(size)
        torch.empty(sum(layout.bytes), dtype=torch.uint8)
        ranking.Arrays(*layout.divide(memory))

    return launches, microseconds(divide)


def instructions_per_pair(cubin: bytes, pairs: int) -> list[float]:
    """Return the instructions per pair of the inner loops over tiles of ``pairs`` pairs per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in text.split("\n"):
        if label := re.match(r"(\.L\S+):", line):
            labels[label[1]] = len(instructions)
        elif re.search(r"/\*[0-9a-f]{4,}\*/", line):
            instructions.append(line)
    jumps = [(k, re.search(r"BRA.*`\((\.L\S+)\)", line)) for k, line in enumerate(instructions)]
    loops = [(labels[jump[1]], k) for k, jump in jumps if jump and labels[jump[1]] < k]
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    # The loops of searches are shorter.
    return [(b - a + 1) / pairs for a, b in inner if b - a > 40]


def main() -> None:
    """Print all measurements."""
    with emulate(device=IdleDevice(80)):
        for loss in ("ap", "rs"):
            launches, memory = host_time(loss)
            print(f"{loss}: launches {launches:.0f} us, memory {memory:.0f} us")
        logits, targets = synthetic(20_000, 6_000)
        rank_with_triton(logits, targets, None, loss="rs", delta=0.5, sizes=(20_000,), max_positives=None)
        for key, kernel in launch._compiled.items():
            parts: Any = key
            name, constants = parts[0], parts[2]
            if name in ("compare_positives", "demote_positives"):
                rows, columns, _ = constants[-3:]
                found = instructions_per_pair(kernel.asm["cubin"], rows * columns // 128)
                print(f"{name}, {rows} rows: {', '.join(f'{number:.1f}' for number in found)} instructions per pair")


if __name__ == "__main__":
    main()
