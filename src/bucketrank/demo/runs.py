"""The two demo runs, which differ only in their loss and take turns, and their detections in the same images."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from bucketrank.data import CocoDataset, Split, find_splits, write_shapes
from bucketrank.data.transforms import eval_transform
from bucketrank.drawing import draw
from bucketrank.errors import CannotCalibrateError, DataError
from bucketrank.evaluation import Evaluator
from bucketrank.evaluation.calibration import Calibration, calibrate
from bucketrank.settings import Recipe, from_dict
from bucketrank.training.optimiser import Schedule, build_optimiser, set_rate, sum_terms, train_step
from bucketrank.weights.files import Meta, save_weights
from bucketrank.weights.load import build_detector

Sample = tuple[Tensor, dict[str, Tensor]]  # an image and its target

CALIBRATION_IMAGES = 200  # training images that the scores are calibrated on


@dataclass(frozen=True)
class DemoSettings:
    """Settings that both runs share."""

    steps: int = 500
    seed: int = 0
    steps_per_turn: int = 50  # an evaluation follows each turn
    batch_size: int = 8
    train_images: int = 400
    val_images: int = 60
    image_size: int = 160  # width and height in pixels
    backbone: str = "hgnetv2_b0"
    lr: float = 2e-3

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"--steps: expected at least 1, got {self.steps}")
        if self.seed < 0:
            raise ValueError(f"--seed: expected at least 0, got {self.seed}")


@dataclass(frozen=True)
class DemoLoss:
    """A run's loss: its name in files, its label in tables and figures, and its recipe settings."""

    name: str
    label: str
    settings: dict[str, Any]


# Both use the same box loss, each with its usual weight.
LOSSES = (
    DemoLoss("ranking", "Rank & Sort, exact", {"name": "rs"}),
    DemoLoss("focal", "focal loss", {"name": "focal", "box_loss": "giou", "box_weight": 2.0}),
)


def recipe_for(loss: DemoLoss, settings: DemoSettings) -> Recipe:
    """Build the recipe of a run; the two recipes differ only in the loss."""
    return from_dict(
        {
            "detector": {"name": "retinanet", "channels": 64, "convs": 2, "scales": 2},
            "backbone": {"name": settings.backbone},
            "loss": loss.settings,
            "inputs": {"min_size": settings.image_size, "max_size": settings.image_size},
            "data": {"batch_size": settings.batch_size, "workers": 0},
            "schedule": {
                "optimiser": "adamw",
                "lr": settings.lr,
                "scaling": "none",
                "policy": "one_cycle",
                "clip": 5.0,
                "max_steps": settings.steps,
            },
            "trainer": {"seed": settings.seed},
        },
        source="demo",
    )


@dataclass(frozen=True)
class ShapeData:
    """The images of both runs, in memory."""

    train: list[Sample]
    val: list[Sample]
    val_split: Split
    classes: list[str]
    category_ids: list[int]


def draw_or_read_shapes(folder: Path, settings: DemoSettings) -> ShapeData:
    """Draw the shapes into ``folder``, or read those of an earlier demo."""
    if not (folder / "val.json").exists():
        write_shapes(folder, train=settings.train_images, val=settings.val_images, size=settings.image_size)
    datasets = [CocoDataset(split, transform=eval_transform()) for split in find_splits(folder) if split is not None]
    expected, actual = [settings.train_images, settings.val_images], [len(dataset) for dataset in datasets]
    if actual != expected:
        raise DataError(
            f"{folder}: expected {expected[0]} training and {expected[1]} validation images of an earlier demo, got "
            f"{' and '.join(map(str, actual))}; choose a new folder with --out"
        )
    train, val = ([dataset[index] for index in range(len(dataset))] for dataset in datasets)
    return ShapeData(train, val, datasets[1].split, datasets[1].class_names, datasets[1].category_ids)


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation during a run."""

    step: int
    seconds: float  # training time so far, without evaluations
    loss: float  # mean since the last evaluation
    metrics: dict[str, float]  # AP, AP50, AP75


@dataclass
class DemoRun:
    """One of the two runs: a detector in training, its evaluations and step durations."""

    loss: DemoLoss
    recipe: Recipe
    settings: DemoSettings
    data: ShapeData
    curve: list[CurvePoint] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)  # seconds per step
    threshold: float = 0.0  # best-F1 score in the last evaluation
    calibration: Calibration | None = None  # set after the last step

    def __post_init__(self) -> None:
        torch.manual_seed(self.settings.seed)
        self.model = build_detector(self.recipe, num_classes=len(self.data.classes))
        self.schedule = Schedule(
            self.recipe.schedule, batch_size=self.settings.batch_size, steps_per_epoch=self.settings.steps
        )
        self.optimiser = build_optimiser(self.model, self.recipe.schedule)
        self.batches = shuffled_batches(self.data.train, self.settings)
        self.annotations = self.data.val_split.read()

    def warm_up(self) -> None:
        """Compute one loss and its gradient before any step is timed, so that the loss kernel is compiled."""
        images, targets = next(shuffled_batches(self.data.train, self.settings))
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        sum_terms(self.model, (images[:1], targets[:1])).total.backward()
        self.optimiser.zero_grad()
        self.model.load_state_dict(state)

    @property
    def seconds_per_step(self) -> float:
        """The median step duration so far; 0 before the first step."""
        return statistics.median(self.durations) if self.durations else 0.0

    def train(self, steps: int, on_step: Callable[[], None]) -> None:
        """Train for ``steps`` more steps, then evaluate; ``on_step`` is called after each step."""
        self.model.train()
        losses = []
        for _ in range(steps):
            start = time.perf_counter()
            set_rate(self.optimiser, self.schedule.rate(len(self.durations)))
            summed = train_step(self.model, next(self.batches), self.optimiser, clip=self.recipe.schedule.clip)
            losses.append(float(summed.total.detach()))
            self.durations.append(time.perf_counter() - start)
            on_step()
        self._evaluate(statistics.mean(losses))

    def _evaluate(self, loss: float) -> None:
        evaluator = Evaluator(self.annotations)
        for first in range(0, len(self.data.val), self.settings.batch_size):
            batch = self.data.val[first : first + self.settings.batch_size]
            evaluator.add([int(target["image_id"]) for _, target in batch], self.detect([image for image, _ in batch]))
        metrics = evaluator.result().metrics
        kept = {name: metrics[name] for name in ("AP", "AP50", "AP75")}
        self.curve.append(CurvePoint(len(self.durations), sum(self.durations), loss, kept))
        threshold = evaluator.best_threshold()
        self.threshold = 0.0 if math.isnan(threshold) else threshold  # NaN means that no detection is correct

    def calibrate(self) -> None:
        """Calibrate the scores on training images, if possible."""
        try:
            self.calibration = calibrate(self.model, self.data.train, max_images=CALIBRATION_IMAGES)
        except CannotCalibrateError:  # after a few steps, hardly any detection is right
            return
        self.threshold = self.calibration.threshold(self.threshold)

    @torch.inference_mode()
    def detect(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        """Detect with the current weights; detections of every score are returned."""
        self.model.eval()
        detections: list[dict[str, Tensor]] = self.model(images)
        return detections

    def save(self, path: Path) -> None:
        """Write the weights with classes, threshold and recipe."""
        meta = Meta(
            classes=self.data.classes,
            category_ids=self.data.category_ids,
            threshold=self.threshold,
            recipe=self.recipe.to_dict(),
            metrics={f"boxes/{name}": value for name, value in self.curve[-1].metrics.items()},
            versions={name: version(name) for name in ("bucketrank", "torch", "torchvision", "timm")},
            calibration=self.calibration,
        )
        save_weights(path, self.model, meta)

    def to_dict(self) -> dict[str, Any]:
        """Collect the numbers of the run for ``demo.json``."""
        return {
            "loss": self.loss.label,
            "seconds_per_step": self.seconds_per_step,
            "threshold": self.threshold,
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "curve": [asdict(point) for point in self.curve],
            "recipe": self.recipe.to_dict(),
        }


def shuffled_batches(
    samples: list[Sample], settings: DemoSettings
) -> Iterator[tuple[list[Tensor], list[dict[str, Tensor]]]]:
    """Yield endless batches, shuffled and randomly mirrored; both depend only on the seed."""
    generator = torch.Generator().manual_seed(settings.seed)
    order: list[int] = []
    while True:
        while len(order) < settings.batch_size:
            order += torch.randperm(len(samples), generator=generator).tolist()
        indices, order = order[: settings.batch_size], order[settings.batch_size :]
        flips = (torch.rand(settings.batch_size, 2, generator=generator) < 0.5).tolist()
        batch = [
            mirrored(*samples[index], horizontal=horizontal, vertical=vertical)
            for index, (horizontal, vertical) in zip(indices, flips, strict=True)
        ]
        yield [image for image, _ in batch], [target for _, target in batch]


def mirrored(image: Tensor, target: dict[str, Tensor], *, horizontal: bool, vertical: bool) -> Sample:
    """Mirror an image and its boxes horizontally, vertically, both or neither.

    >>> target = {"boxes": torch.tensor([[1.0, 2, 5, 8]])}
    >>> _, target = mirrored(torch.zeros(3, 10, 20), target, horizontal=True, vertical=False)
    >>> target["boxes"]
    tensor([[15.,  2., 19.,  8.]])
    """
    boxes = target["boxes"].clone()
    for axis, flip in enumerate((horizontal, vertical)):
        if flip:
            image = image.flip(-1 - axis)
            boxes[:, [axis, axis + 2]] = image.shape[-1 - axis] - boxes[:, [axis + 2, axis]]
    return image, target | {"boxes": boxes}


@dataclass(frozen=True)
class ComparedImage:
    """One image, drawn with its ground truth and with the detections of each run."""

    image_id: int
    objects: int  # number of ground-truth objects
    drawn: list[Image.Image]  # ground truth, then each run
    counts: list[tuple[int, int]]  # correct and wrong detections of each run


def compare_images(runs: Sequence[DemoRun], data: ShapeData, count: int) -> list[ComparedImage]:
    """Compare the runs on ``count`` evenly spread validation images."""
    last = len(data.val) - 1
    indices = sorted({round(number * last / max(count - 1, 1)) for number in range(count)})
    compared = []
    for index in indices:
        image, target = data.val[index]
        objects = {"boxes": target["boxes"], "labels": target["labels"]}
        drawn = [draw(image, objects, classes=data.classes)]
        counts = []
        for run in runs:
            (detections,) = run.detect([image])
            kept = detections["scores"] >= run.threshold
            detections = {name: values[kept] for name, values in detections.items()}
            drawn.append(draw(image, detections, classes=data.classes, ground_truth=target))
            evaluator = Evaluator(run.annotations)
            evaluator.add([int(target["image_id"])], [detections])
            correct = int(evaluator.matched(seen_only=True).right.sum())
            counts.append((correct, int(kept.sum()) - correct))
        compared.append(ComparedImage(int(target["image_id"]), len(target["labels"]), drawn, counts))
    return compared
