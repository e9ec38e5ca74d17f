"""Retrieval quality on Omniglot: mAP@R of a small CNN on alphabets that training has not seen.

    python -m benchmarks.rankings.omniglot FOLDER

``FOLDER`` has ``images_background_small1.zip`` and ``images_background_small2.zip`` of the Omniglot repository. The
network trains on the first file and is tested on the alphabets that only the second has. Each loss chooses its learning
rate and its width (delta or temperature) on every fourth character of the training file; it then trains on all of them,
once per seed. All losses see the same batches and initial weights.
"""

from __future__ import annotations

import argparse
import io
import itertools
import statistics
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.rankings.contenders import smooth_ap, sup_con
from bucketrank.retrieval import retrieval_ap_loss

SIDE = 20
CLASSES, PER_CLASS = 32, 4  # of a batch
RATES = (3e-3, 1e-2)
Loss = Callable[[Tensor, Tensor], Tensor]
# Per loss, the function and its widths to choose from.
LOSSES: dict[str, tuple[str, Callable[..., Tensor], tuple[float, ...]]] = {
    "exact AP (ours)": ("delta", retrieval_ap_loss, (0.1, 0.2, 0.4)),
    "SmoothAP": ("tau", smooth_ap, (0.01, 0.03, 0.1)),
    "SupCon": ("tau", sup_con, (0.05, 0.1, 0.2)),
}


def read_characters(file: Path) -> dict[str, Tensor]:
    """Read the drawings of each ``alphabet/character`` as (20, 1, SIDE, SIDE), with ink 1 on paper 0."""
    drawings: dict[str, list[Tensor]] = {}
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".png") and not name.startswith("__"):
                with Image.open(io.BytesIO(archive.read(name))) as image:
                    small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
                pixels = torch.from_numpy(1 - np.asarray(small, np.float32) / 255)
                drawings.setdefault("/".join(name.split("/")[1:3]), []).append(pixels[None])
    return {name: torch.stack(images) for name, images in drawings.items()}


def build_network(dimensions: int = 64) -> nn.Sequential:
    """Build three convolutions and a projection."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((1, 16, 32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (SIDE // 8) ** 2, dimensions))


def train(characters: list[Tensor], loss: Loss, *, rate: float, steps: int, seed: int) -> nn.Module:
    """Train a network on batches of CLASSES characters with PER_CLASS drawings each."""
    torch.manual_seed(seed)
    network = build_network()
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(network.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    labels = torch.arange(CLASSES).repeat_interleave(PER_CLASS)
    for _ in range(steps):
        chosen = torch.randperm(len(characters), generator=generator)[:CLASSES].tolist()
        images = torch.cat(
            [characters[k][torch.randperm(len(characters[k]), generator=generator)[:PER_CLASS]] for k in chosen]
        )
        optimiser.zero_grad()
        loss(network(images), labels).backward()
        optimiser.step()
        schedule.step()
    return network.eval()


@torch.no_grad()
def map_at_r(network: nn.Module, characters: list[Tensor]) -> float:
    """Compute mAP@R (Musgrave et al., 2020): per query, the precision at each match among the first R, divided by R.

    R is the number of matches of the query. Every drawing is a query.
    """
    labels = torch.arange(len(characters)).repeat_interleave(torch.tensor([len(images) for images in characters]))
    unit = nn.functional.normalize(torch.cat([network(images) for images in characters]), dim=1)
    scores = (unit @ unit.T).fill_diagonal_(-torch.inf)
    values = []
    for row, label in zip(scores, labels, strict=True):
        relevant = int((labels == label).sum()) - 1
        hits = (labels[row.topk(relevant).indices] == label).float()
        precision = hits.cumsum(0) / torch.arange(1, relevant + 1)
        values.append((precision * hits).sum().item() / relevant)
    return statistics.fmean(values)


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Print the chosen settings and a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=5)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    first, second = (read_characters(settings.folder / f"images_background_small{k}.zip") for k in (1, 2))
    seen = {name.split("/")[0] for name in first}
    test = [images for name, images in second.items() if name.split("/")[0] not in seen]
    training = list(first.values())
    held_out, fitted = training[::4], [images for k, images in enumerate(training) if k % 4]
    _write(f"torch {torch.__version__}; {len(training)} characters to train, {len(test)} to test\n")
    rows = []
    for name, (width_name, function, widths) in LOSSES.items():
        results = {}
        start = time.process_time()
        for rate, width in itertools.product(RATES, widths):
            loss = partial(function, **{width_name: width})
            # This seed is not one of the test's.
            network = train(fitted, loss, rate=rate, steps=settings.steps, seed=1000)
            results[rate, width] = map_at_r(network, held_out)
            _write(f"{name}, rate {rate:g}, {width_name} {width:g}: {results[rate, width]:.4f} on held-out characters")
        rate, width = max(results, key=results.__getitem__)
        loss = partial(function, **{width_name: width})
        values = [
            map_at_r(train(training, loss, rate=rate, steps=settings.steps, seed=seed), test)
            for seed in range(settings.seeds)
        ]
        _write(f"{name}: {[round(value, 4) for value in values]}, {time.process_time() - start:.0f} CPU seconds")
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        mean = 100 * statistics.fmean(values)
        rows.append(f"| {name} | {rate:g} | {width_name} {width:g} | {mean:.1f} ± {100 * deviation:.1f} |")
    _write("\n| loss | rate | width | mAP@R |\n|---|---|---|---|\n" + "\n".join(rows))


if __name__ == "__main__":
    main()
