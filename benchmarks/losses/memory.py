"""Peak extra memory of one step: from torch's allocator on a GPU, otherwise measured in a separate process.

In a separate process all allocations count: torch, numpy and numba. A server process imports everything and computes
nothing; each measurement is a fork of it. The fork makes the data, runs the step once on fewer logits (which
loads libraries and starts threads), returns free memory to the system, resets the kernel's record of the largest
resident size, runs the step, and reads the record. The gradient counts, the logits and the targets do not.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from benchmarks.losses.contenders import Mode

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


class MemoryJob(TypedDict):
    """The step to measure: a contender on drawn logits, with a number of CPU threads."""

    name: str
    loss: str | None
    size: int
    percent: float
    seed: int
    device: str
    threads: int
    mode: Mode


def memory_meter(device: str) -> MemoryMeter | AllocatorMeter:
    """Build the meter for a device; both are context managers that measure one job after another."""
    from benchmarks.timing import has_allocator_statistics

    return AllocatorMeter() if has_allocator_statistics(device) else MemoryMeter()


class AllocatorMeter:
    """Measures in this process, by the statistics of torch's allocator."""

    # A captured step owns its memory from the capture on; a replay allocates nothing.
    modes: tuple[Mode, ...] = ("eager", "compiled")
    start_seconds = 0.0

    def __enter__(self) -> AllocatorMeter:
        return self

    def __exit__(self, *_: object) -> None: ...

    def measure(self, job: MemoryJob) -> int:
        """Return the peak extra memory of the job in bytes."""
        from benchmarks.losses.contenders import draw_logits, loss_step
        from benchmarks.timing import peak_allocated

        data = draw_logits(job["size"], job["percent"], seed=job["seed"], device=job["device"])
        # The first call may compile something. A second step has no gradient yet, which counts.
        first, second = (loss_step(job["name"], job["loss"], data, mode=job["mode"]) for _ in range(2))
        first()
        return peak_allocated(second, job["device"])


class MemoryMeter:
    """Context manager that owns the server process and measures one job after another."""

    # The compiler would need memory, too.
    modes: tuple[Mode, ...] = ("eager",)
    # Seconds to start a process; only the progress bar depends on this.
    start_seconds = 0.7

    def __enter__(self) -> MemoryMeter:
        if not hasattr(os, "fork"):
            raise RuntimeError("bench: measuring memory needs a system with fork; use --no-memory")
        self._server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.losses.memory"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()  # closing its input ends the server

    def measure(self, job: MemoryJob) -> int:
        """Return the peak extra memory of the job in bytes."""
        jobs, replies = self._server.stdin, self._server.stdout
        if jobs is None or replies is None:
            raise RuntimeError("bench: expected a MemoryMeter to be used in a with statement")
        jobs.write(json.dumps(job) + "\n")
        jobs.flush()
        line = replies.readline()
        if not line:
            raise RuntimeError(f"bench: the process that measures memory ended with status {self._server.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return int(reply["bytes"])


def peak_bytes(job: MemoryJob) -> int:
    """Return the peak extra memory of the job in bytes; called in the fork."""
    import torch

    from benchmarks.losses.contenders import draw_logits, loss_step

    torch.set_num_threads(job["threads"])
    data = draw_logits(job["size"], job["percent"], seed=job["seed"], device=job["device"])
    fewer = max(min(job["size"] // 2, 50_000), 2)
    loss_step(job["name"], job["loss"], draw_logits(fewer, job["percent"], seed=0, device=job["device"]))()
    torch.ones(1 << 20, device=job["device"]).sigmoid_()  # large enough to start torch's threads
    call = loss_step(job["name"], job["loss"], data)
    before = _reset_peak()
    call()
    return max(_peak() - before, 0)


def _reset_peak() -> int:
    """Return free memory to the system, reset the record of the peak where possible, and return the record."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR_REFS.write_text("5", encoding="ascii")
    except (AttributeError, OSError):
        # The record then includes earlier peaks, so the difference is a lower bound.
        pass
    return _peak()


def _peak() -> int:
    if STATUS.exists():
        lines = dict(line.split(":", 1) for line in STATUS.read_text(encoding="ascii").splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def serve() -> None:
    """Read one job per line from standard input and write one reply per line to standard output."""
    import benchmarks.losses.contenders  # noqa: F401  (once, before the forks)

    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                reply: dict[str, object] = {"bytes": peak_bytes(json.loads(line))}
            except Exception:  # noqa: BLE001  (sent to the parent process, which raises it)
                reply = {"error": traceback.format_exc()}
            os.write(writer, json.dumps(reply).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        if not answer:
            answer = json.dumps({"error": f"the process ended with status {status}, possibly for lack of memory"})
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
