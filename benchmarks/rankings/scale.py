"""Time and memory of many rankings: AP loss over queries against SmoothAP, and batches against one ranking.

    python -m benchmarks.rankings.scale --batches 96 192 384 --alone 8192

Alternatives are timed interleaved on one thread. The tables have median CPU times, which other processes disturb less.
``smooth_ap`` follows the definition of Brown et al. (2020): a sigmoid of temperature ``tau`` compares every pair of
similarities of a query, in a B x B x B tensor.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from bucketrank import ap_loss
from bucketrank.retrieval import retrieval_ap_loss

DIMENSIONS = 128
PER_CLASS = 4
# Prints the peak extra memory of one call in MB, measured in a separate process. Linux only.
MEMORY_CODE = """
import pathlib, re
from benchmarks.rankings.scale import LOSSES, make_batch
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024
batch = make_batch({size})
LOSSES["{name}"](*make_batch(32))
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = peak()
LOSSES["{name}"](*batch)
print(peak() - before)
"""


def smooth_ap(embeddings: Tensor, labels: Tensor, *, tau: float = 0.01) -> Tensor:
    """SmoothAP, ``1 - 1/B sum_q 1/|P_q| sum_i R_P(i) / R(i)``, for classes of any size.

    ``R(i) = 1 + sum_j sigmoid((s_j - s_i) / tau)`` over the other embeddings j, and ``R_P`` over the matches.
    """
    unit = nn.functional.normalize(embeddings, dim=1)
    scores = unit @ unit.T
    other = ~torch.eye(len(labels), dtype=torch.bool)
    match = (labels[:, None] == labels) & other
    # (query, i, j): how far j ranks above i
    above = ((scores[:, None, :] - scores[:, :, None]) / tau).sigmoid() * (other[:, None, :] & other)
    ranks = 1 + above.sum(2)
    match_ranks = 1 + (above * match[:, None, :]).sum(2)
    precision = (match_ranks / ranks * match).sum(1) / match.sum(1).clamp(min=1)
    return 1 - precision[match.any(1)].mean()


def make_batch(size: int) -> tuple[Tensor, Tensor]:
    """Draw embeddings in classes of four, as in metric learning."""
    torch.manual_seed(0)
    labels = torch.arange(size) // PER_CLASS
    return torch.randn(size, DIMENSIONS) + torch.randn(size // PER_CLASS + 1, DIMENSIONS)[labels], labels


def _train(loss: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], None]:
    def step(embeddings: Tensor, labels: Tensor) -> None:
        leaf = embeddings.clone().requires_grad_()
        loss(leaf, labels).backward()

    return step


LOSSES = {"smooth_ap": _train(smooth_ap), "ours": _train(retrieval_ap_loss)}


def _interleaved(calls: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Time the calls interleaved; return the median CPU seconds of each."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, own in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            own.append(time.process_time() - start)
    return [statistics.median(own) for own in times]


def _peak_memory(name: str, size: int) -> float:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_CODE.format(name=name, size=size)], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def _batched(rankings: int, size: int) -> Callable[[], None]:
    torch.manual_seed(0)
    logits = torch.randn(rankings * size, requires_grad=True)
    targets = (torch.rand(rankings * size) < 0.1).float()

    def step() -> None:
        ap_loss(logits, targets, sizes=[size] * rankings).backward()
        logits.grad = None

    return step


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Print both tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[96, 192, 384], help="batch sizes for both losses")
    parser.add_argument("--alone", type=int, nargs="*", default=[], help="batch sizes for our loss only")
    parser.add_argument("--rounds", type=int, default=5)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    _write(f"torch {torch.__version__}, one thread, CPU time, median of {settings.rounds} rounds\n")
    _write("| B | SmoothAP | ours | time ratio | SmoothAP memory | our memory |\n|---|---|---|---|---|---|")
    for size in settings.batches:
        batch = make_batch(size)
        theirs, ours = _interleaved([partial(loss, *batch) for loss in LOSSES.values()], settings.rounds)
        memory = [_peak_memory(name, size) for name in LOSSES]
        times = f"{theirs * 1e3:.1f} ms | {ours * 1e3:.1f} ms | {ours / theirs:.4f}"
        _write(f"| {size} | {times} | {memory[0]:.0f} MB | {memory[1]:.0f} MB |")
    for size in settings.alone:
        (ours,) = _interleaved([partial(LOSSES["ours"], *make_batch(size))], 1)
        _write(f"| {size} | | {ours * 1e3:.0f} ms | | | {_peak_memory('ours', size):.0f} MB |")
    _write("\n| rankings | entries each | time | one ranking of all entries | ratio |\n|---|---|---|---|---|")
    for rankings, size in ((1024, 16), (4096, 100), (22, 24_000)):
        many, one = _interleaved([_batched(rankings, size), _batched(1, rankings * size)], 4 * settings.rounds)
        _write(f"| {rankings} | {size} | {many * 1e3:.2f} ms | {one * 1e3:.2f} ms | {many / one:.1f} |")


if __name__ == "__main__":
    main()
