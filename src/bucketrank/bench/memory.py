"""Peak extra memory of one step, in a process of its own, so that every allocation counts: torch's, numpy's, numba's.

A server process imports everything and computes nothing; each measurement is a fork of it. The fork makes the data,
runs the step once on fewer logits (so that libraries and threads are loaded), gives free memory back to the system,
resets the kernel's record of the largest resident size, runs the step, and reads the record. The gradient counts, the
logits and the targets do not. On CUDA it is what torch's allocator says.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TypedDict

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


class Job(TypedDict):
    """One measurement."""

    name: str
    loss: str | None
    size: int
    percent: float
    seed: int
    device: str
    threads: int


class MemoryMeter:
    """Measures jobs, one after the other; a context manager that owns the server process."""

    def __enter__(self) -> MemoryMeter:
        if not hasattr(os, "fork"):
            raise RuntimeError("bench: measuring memory needs a system with fork; use --no-memory")
        self._server = subprocess.Popen(
            [sys.executable, "-m", "bucketrank.bench.memory"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()  # closes its input, which ends it

    def measure(self, job: Job) -> int:
        """Bytes."""
        question, answers = self._server.stdin, self._server.stdout
        if question is None or answers is None:
            raise RuntimeError("bench: expected a MemoryMeter to be used in a with statement")
        question.write(json.dumps(job) + "\n")
        question.flush()
        answer = answers.readline()
        if not answer:
            raise RuntimeError(f"bench: the process that measures memory ended with status {self._server.wait()}")
        reply = json.loads(answer)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return int(reply["bytes"])


def peak_bytes(job: Job) -> int:
    """Runs in the fork."""
    import torch

    from bucketrank.bench.contenders import step
    from bucketrank.bench.synthetic import draw

    torch.set_num_threads(job["threads"])
    data = draw(job["size"], job["percent"], seed=job["seed"], device=job["device"])
    fewer = max(min(job["size"] // 2, 50_000), 2)
    step(job["name"], job["loss"], draw(fewer, job["percent"], seed=0, device=job["device"]))()
    torch.ones(1 << 20, device=job["device"]).sigmoid_()  # large enough to start torch's threads
    call = step(job["name"], job["loss"], data)
    if torch.device(job["device"]).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    before = _reset_peak()
    call()
    return max(_peak() - before, 0)


def _reset_peak() -> int:
    """Gives free memory back, forgets the peak where the system can, and returns the record as it is now."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR_REFS.write_text("5", encoding="ascii")
    except (AttributeError, OSError):
        # Elsewhere the record goes back to the start of the process: the difference is then a lower bound.
        pass
    return _peak()


def _peak() -> int:
    if STATUS.exists():
        lines = dict(line.split(":", 1) for line in STATUS.read_text(encoding="ascii").splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def serve() -> None:
    """Answers each line on standard input, a job, by a line on standard output."""
    import bucketrank.bench.contenders  # noqa: F401  (imported once here, not in every fork)

    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                reply: dict[str, object] = {"bytes": peak_bytes(json.loads(line))}
            except Exception:  # noqa: BLE001  (told to the caller, which raises it)
                reply = {"error": traceback.format_exc()}
            os.write(writer, json.dumps(reply).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        if not answer:
            answer = json.dumps({"error": f"the process ended with status {status}; killed for want of memory?"})
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
