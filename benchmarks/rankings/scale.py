"""Time and memory of many rankings: AP loss over queries, batches of lists, and a detector's images.

    python -m benchmarks.rankings.scale --batches 96 192 384 --alone 8192

Alternatives are timed interleaved on one thread. The tables have median CPU times, which other processes disturb less.
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
from torch import Tensor

from benchmarks.rankings.contenders import smooth_ap, sup_con
from bucketrank import ap_loss, use_backend
from bucketrank.detectors.assignment import NEGATIVE
from bucketrank.detectors.criterion import Assigned, HeadRecipe, build_criterion
from bucketrank.retrieval import retrieval_ap_loss
from bucketrank.settings import loss_settings
from bucketrank.settings.choices import Backend

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


LOSSES = {"SmoothAP": _train(smooth_ap), "SupCon": _train(sup_con), "ours": _train(retrieval_ap_loss)}


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


def _batched(rankings: int, size: int, backend: Backend = "auto") -> Callable[[], None]:
    torch.manual_seed(0)
    logits = torch.randn(rankings * size, requires_grad=True)
    targets = (torch.rand(rankings * size) < 0.1).float()

    def step() -> None:
        with use_backend(backend):
            ap_loss(logits, targets, sizes=[size] * rankings).backward()
        logits.grad = None

    return step


def _in_scope(
    loss: str, scope: str, *, images: int = 8, anchors: int = 20_000, classes: int = 10
) -> Callable[[], None]:
    """Rank the anchors of a dense head: 60 positives per image."""
    torch.manual_seed(0)
    rows, positives = images * anchors, 60 * images
    labels = torch.full((rows,), NEGATIVE)
    chosen = torch.randperm(rows)[:positives].sort().values
    labels[chosen] = torch.randint(classes, (positives,))
    logits = torch.randn(rows, classes, requires_grad=True)
    corners = torch.rand(positives, 2)
    boxes = torch.cat([corners, corners + 1], 1).requires_grad_()
    objects = torch.tensor([[0.0, 0.0, 1.5, 1.5]]).repeat(positives, 1)
    image_index = torch.arange(images).repeat_interleave(anchors)
    criterion = build_criterion(loss_settings(loss, ranking_scope=scope), HeadRecipe())

    def step() -> None:
        terms = criterion(Assigned(logits, labels, image_index, boxes, objects, boxes, objects))
        torch.stack(list(terms.values())).sum().backward()
        logits.grad = boxes.grad = None

    return step


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Print three tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[96, 192, 384], help="batch sizes for all losses")
    parser.add_argument("--alone", type=int, nargs="*", default=[], help="batch sizes without SmoothAP")
    parser.add_argument("--rounds", type=int, default=5)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    _write(f"torch {torch.__version__}, one thread, CPU time, median of {settings.rounds} rounds\n")
    _write(f"| B | {' | '.join(LOSSES)} | {' | '.join(f'{name} memory' for name in LOSSES)} |")
    _write(f"|---{'|---' * 2 * len(LOSSES)}|")
    for size in settings.batches:
        _write_row(size, list(LOSSES), settings.rounds)
    for size in settings.alone:
        _write_row(size, [name for name in LOSSES if name != "SmoothAP"], 1)
    _write("\n| rankings | entries each | time | one ranking of all entries | ratio | without numba |")
    _write("|---|---|---|---|---|---|")
    for rankings, size in ((1024, 16), (4096, 100), (22, 24_000)):
        calls = [_batched(rankings, size), _batched(1, rankings * size), _batched(rankings, size, "torch")]
        many, one, plain = _interleaved(calls, settings.rounds)
        times = f"{many * 1e3:.2f} ms | {one * 1e3:.2f} ms | {many / one:.1f} | {plain * 1e3:.0f} ms"
        _write(f"| {rankings} | {size} | {times} |")
    _write("\n| loss | image scope | batch scope | ratio |\n|---|---|---|---|")
    for loss in ("ap", "rs"):
        image, batch = _interleaved([_in_scope(loss, "image"), _in_scope(loss, "batch")], settings.rounds)
        _write(f"| {loss} | {image * 1e3:.1f} ms | {batch * 1e3:.1f} ms | {image / batch:.2f} |")


def _write_row(size: int, names: Sequence[str], rounds: int) -> None:
    batch = make_batch(size)
    times = dict(zip(names, _interleaved([partial(LOSSES[name], *batch) for name in names], rounds), strict=True))
    cells = [f"{times[name] * 1e3:.1f} ms" if name in times else "" for name in LOSSES]
    cells += [f"{_peak_memory(name, size):.0f} MB" if name in times else "" for name in LOSSES]
    _write(f"| {size} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
