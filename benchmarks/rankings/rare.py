"""Rare positives: AP of a small network that finds contour pixels of nuclei, at 10 %, 1 % and 0.1 % positives.

    python -m benchmarks.rankings.rare FOLDER

``FOLDER`` is a COCO data set with RLE masks: ``images/``, ``train_rle.json`` and ``val_rle.json``. A sample is
a square of pixels, positive if its centre lies on the contour of an object. Positives are drawn so that they have the
given share. Every loss chooses its learning rate and its setting on every fifth training image. It then trains on the
other images, once per seed with new samples, and is tested on the validation images. With a sampler, one tenth of each
batch is positive.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.rankings.contenders import MovingAverageAP
from bucketrank.classification import MultilabelAPLoss
from bucketrank.data.coco import decode_masks

RADIUS = 5
BATCH = 256
SAMPLED_SHARE = 0.1
MEMORY = 4096
TEST_SAMPLES = 50_000
RATES = (1e-3, 3e-3)
# Called with logits, targets and the positions of the samples in the training set.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Pixels(NamedTuple):
    """The images of a split as one flat list of pixels."""

    images: list[Tensor]  # each (height + 2 RADIUS, width + 2 RADIUS), standardised
    places: Tensor  # (n, 3): image, row, column
    contour: Tensor  # (n,) whether the pixel lies on a contour


class Samples(NamedTuple):
    """Squares of pixels with their targets."""

    squares: Tensor  # (n, (2 RADIUS + 1)^2)
    targets: Tensor  # (n,)


def read_pixels(folder: Path, split: str, *, keep: Callable[[int], bool] = lambda _: True) -> Pixels:
    """Read the images of a split, number k only if ``keep(k)``."""
    content = json.loads((folder / f"{split}_rle.json").read_text())
    images, places, contours = [], [], []
    for record in (record for k, record in enumerate(content["images"]) if keep(k)):
        with Image.open(folder / "images" / record["file_name"]) as image:
            pixels = torch.from_numpy(np.asarray(image.convert("L"), np.float32))
        contour = torch.zeros(pixels.shape, dtype=torch.bool)
        for annotation in content["annotations"]:
            if annotation["image_id"] == record["id"]:
                (inside,) = decode_masks([annotation["segmentation"]], (len(pixels), len(pixels[0]))).float()
                # A pixel whose 3 x 3 neighbourhood lies inside is not on the contour.
                core = -nn.functional.max_pool2d(-inside[None], 3, stride=1, padding=1)[0]
                contour |= (inside > 0) & (core == 0)
        standard = (pixels - pixels.mean()) / pixels.std().clamp(min=1)
        images.append(nn.functional.pad(standard[None], [RADIUS] * 4, mode="reflect")[0])
        grid = torch.cartesian_prod(torch.arange(pixels.shape[0]), torch.arange(pixels.shape[1]))
        places.append(torch.cat([torch.full((len(grid), 1), len(images) - 1), grid], 1))
        contours.append(contour.flatten())
    return Pixels(images, torch.cat(places), torch.cat(contours))


def draw(pixels: Pixels, count: int, share: float, *, seed: int) -> Samples:
    """Draw ``count`` samples, of which ``share`` are positive."""
    generator = torch.Generator().manual_seed(seed)
    positives = round(count * share)
    chosen = []
    for pool, number in ((pixels.contour, positives), (~pixels.contour, count - positives)):
        index = pool.nonzero()[:, 0]
        chosen.append(index[torch.randperm(len(index), generator=generator)[:number]])
    side = 2 * RADIUS + 1
    squares = [
        pixels.images[image][row : row + side, column : column + side].flatten()
        for image, row, column in pixels.places[torch.cat(chosen)].tolist()
    ]
    return Samples(torch.stack(squares), torch.cat([torch.ones(positives), torch.zeros(count - positives)]))


def batches(targets: Tensor, *, sampler: bool, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the positions of random samples without end."""
    pools = (targets > 0).nonzero()[:, 0], (targets == 0).nonzero()[:, 0]
    positives = round(SAMPLED_SHARE * BATCH)
    while True:
        if sampler:
            counts = zip(pools, (positives, BATCH - positives), strict=True)
            yield torch.cat([pool[torch.randint(len(pool), (n,), generator=generator)] for pool, n in counts])
        else:
            yield torch.randint(len(targets), (BATCH,), generator=generator)


def _bce(_samples: int, _setting: float) -> Loss:
    bce = nn.BCEWithLogitsLoss()
    return lambda logits, targets, _index: bce(logits, targets)


def _exact(_samples: int, delta: float, *, memory: int = 0) -> Loss:
    loss = MultilabelAPLoss(delta=delta, memory_size=memory)
    return lambda logits, targets, _index: loss(logits, targets)


# Called with the number of training samples and one setting.
Build = Callable[[int, float], Loss]
# Per loss, its builder, and the name and values of the setting to choose.
LOSSES: dict[str, tuple[Build, str, tuple[float, ...]]] = {
    "BCE": (_bce, "", (0.0,)),
    "APLoss (SOAP)": (lambda samples, gamma: MovingAverageAP(samples, gamma=gamma), "gamma", (0.1, 0.9)),
    "exact AP (ours)": (_exact, "delta", (0.25, 1.0)),
    "ours with memory": (lambda samples, delta: _exact(samples, delta, memory=MEMORY), "delta", (0.25, 1.0)),
}


class Options(NamedTuple):
    """How a network is trained."""

    rate: float
    steps: int
    sampler: bool


def measure(samples: Samples, test: Samples, loss: Loss, options: Options, *, seed: int) -> float:
    """Train a network with two hidden layers; return its AP on ``test`` in percent."""
    torch.manual_seed(seed)
    width = samples.squares.shape[1]
    network = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    optimiser = torch.optim.Adam(network.parameters(), options.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, options.steps)
    drawn = batches(samples.targets, sampler=options.sampler, generator=torch.Generator().manual_seed(seed))
    for index in itertools.islice(drawn, options.steps):
        optimiser.zero_grad()
        loss(network(samples.squares[index])[:, 0], samples.targets[index], index).backward()
        optimiser.step()
        schedule.step()
    return 100 * average_precision(network, test)


@torch.no_grad()
def average_precision(network: nn.Module, samples: Samples) -> float:
    """Compute the mean precision at the positives."""
    hits = samples.targets[network(samples.squares)[:, 0].argsort(descending=True)]
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    return (precision * hits).sum().item() / hits.sum().item()


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Print every result and a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.1, 0.01, 0.001])
    parser.add_argument("--samples", type=int, default=30_000, help="training samples")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    pools = [
        read_pixels(settings.folder, "train", keep=lambda k: k % 5 != 0),
        read_pixels(settings.folder, "train", keep=lambda k: k % 5 == 0),
        read_pixels(settings.folder, "val"),
    ]
    cells = [(share, False) for share in settings.shares]
    cells += [(share, True) for share in settings.shares if share < SAMPLED_SHARE]
    table = {name: f"| {name} |" for name in LOSSES}
    for share, sampler in cells:
        # Seed -1 chooses the settings.
        training = {seed: draw(pools[0], settings.samples, share, seed=seed) for seed in range(-1, settings.seeds)}
        choice, test = (draw(pool, TEST_SAMPLES, share, seed=0) for pool in pools[1:])
        for name, (build, setting_name, values) in LOSSES.items():
            start = time.process_time()
            tried = {}
            for rate, value in itertools.product(RATES, values):
                options = Options(rate, settings.steps, sampler)
                tried[rate, value] = measure(training[-1], choice, build(settings.samples, value), options, seed=-1)
            chosen = max(tried, key=tried.__getitem__)
            options = Options(chosen[0], settings.steps, sampler)
            results = [
                measure(training[seed], test, build(settings.samples, chosen[1]), options, seed=seed)
                for seed in range(settings.seeds)
            ]
            deviation = statistics.stdev(results) if len(results) > 1 else 0.0
            table[name] += f" {statistics.fmean(results):.1f} ± {deviation:.1f} |"
            own = f", {setting_name} {chosen[1]:g}" if setting_name else ""
            kind = "sampler" if sampler else "random batches"
            _write(
                f"{share:g}, {kind}, {name}: rate {chosen[0]:g}{own}: {[round(value, 1) for value in results]}, "
                f"{time.process_time() - start:.0f} CPU seconds"
            )
    heads = [f"{100 * share:g} %{', sampler' if sampler else ''}" for share, sampler in cells]
    _write(f"\n| loss | {' | '.join(heads)} |\n|---{'|---' * len(cells)}|\n" + "\n".join(table.values()))


if __name__ == "__main__":
    main()
