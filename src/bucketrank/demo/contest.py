"""Two trainings that differ in the loss alone, a few steps of each in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bucketrank.data import CocoDataset, DataError, Split, find_splits, write_shapes
from bucketrank.data.transforms import eval_transform
from bucketrank.evaluation import Evaluator
from bucketrank.training.recipe import Recipe, from_dict
from bucketrank.training.schedule import Schedule, build_optimiser, set_rate
from bucketrank.training.weights import Meta, build_detector, save_weights

Item = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Settings:
    """What both trainings share."""

    steps: int = 500
    seed: int = 0
    every: int = 50  # steps between two evaluations
    batch: int = 8
    pictures: int = 400  # to learn from
    new_pictures: int = 60  # to evaluate on
    side: int = 160  # of a picture, in pixels
    backbone: str = "hgnetv2_b0"
    lr: float = 2e-3

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"--steps: expected at least 1, got {self.steps}")
        if self.seed < 0:
            raise ValueError(f"--seed: expected at least 0, got {self.seed}")


@dataclass(frozen=True)
class Loss:
    """How a contender is called, and what its recipe says about the loss."""

    name: str
    label: str
    settings: dict[str, Any]


# The same boxes by the same loss; each classification with its own usual weighting.
LOSSES = (
    Loss("ranking", "Rank & Sort, exact", {"name": "rs"}),
    Loss("focal", "focal loss", {"name": "focal", "box_loss": "giou", "box_weight": 2.0}),
)


def recipe_of(loss: Loss, settings: Settings) -> Recipe:
    """The detector and its training; only the loss differs."""
    return from_dict(
        {
            "detector": {"name": "retinanet", "channels": 64, "convs": 2, "scales": 2},
            "backbone": {"name": settings.backbone},
            "loss": loss.settings,
            "inputs": {"min_size": settings.side, "max_size": settings.side},
            "data": {"batch_size": settings.batch, "workers": 0},
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
class Material:
    """The pictures of both trainings, in memory."""

    train: list[Item]
    val: list[Item]
    split: Split  # of val
    classes: list[str]
    category_ids: list[int]


def prepare(folder: Path, settings: Settings) -> Material:
    """Draw the shapes into ``folder``, or read those that are there from an earlier demo."""
    if not (folder / "val.json").exists():
        write_shapes(folder, train=settings.pictures, val=settings.new_pictures, size=settings.side)
    splits = find_splits(folder)
    if splits.train is None or splits.val is None:
        raise DataError(f"{folder}: expected the pictures of an earlier demo; give a new folder by --out")
    sets = [CocoDataset(split, transform=eval_transform()) for split in (splits.train, splits.val)]
    if [len(each) for each in sets] != [settings.pictures, settings.new_pictures]:
        raise DataError(f"{folder}: expected the pictures of an earlier demo, got others; give a new folder by --out")
    train, val = ([each[index] for index in range(len(each))] for each in sets)
    return Material(train, val, splits.val, sets[1].class_names, sets[1].category_ids)


@dataclass(frozen=True)
class Point:
    """One evaluation."""

    step: int
    seconds: float  # spent on the steps until then
    loss: float  # mean since the last evaluation
    metrics: dict[str, float]  # AP, AP50, AP75


@dataclass
class Contender:
    """One of the two trainings."""

    loss: Loss
    recipe: Recipe
    settings: Settings
    material: Material
    curve: list[Point] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)  # of each step, in seconds
    threshold: float = 0.0

    def __post_init__(self) -> None:
        torch.manual_seed(self.settings.seed)
        self.model = build_detector(self.recipe, num_classes=len(self.material.classes))
        self.schedule = Schedule(
            self.recipe.schedule, batch_size=self.settings.batch, steps_per_epoch=self.settings.steps
        )
        self.optimiser = build_optimiser(self.model, self.recipe.schedule)
        self.batches = batches(self.material.train, self.settings)
        self.document = self.material.split.read()

    def warm_up(self) -> None:
        """Have the loss compile its kernel, if it has one, before any step is timed."""
        images, targets = next(batches(self.material.train, self.settings))
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        terms: dict[str, Tensor] = self.model(images[:1], targets[:1])
        torch.stack(list(terms.values())).sum().backward()
        self.optimiser.zero_grad()
        self.model.load_state_dict(state)

    @property
    def seconds(self) -> float:
        """Of a typical step: the median."""
        return statistics.median(self.durations) if self.durations else 0.0

    def train(self, steps: int, told: Callable[[float], None]) -> None:
        """Some more steps, then an evaluation; ``told`` hears the loss of every step."""
        self.model.train()
        losses = []
        for _ in range(steps):
            began = time.perf_counter()
            images, targets = next(self.batches)
            set_rate(self.optimiser, self.schedule.rate(len(self.durations)))
            terms: dict[str, Tensor] = self.model(images, targets)
            loss = torch.stack(list(terms.values())).sum()
            self.optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.schedule.clip or float("inf"))
            self.optimiser.step()
            losses.append(float(loss.detach()))
            self.durations.append(time.perf_counter() - began)
            told(losses[-1])
        self._evaluate(statistics.mean(losses))

    def _evaluate(self, loss: float) -> None:
        evaluator = Evaluator(self.document)
        for first in range(0, len(self.material.val), self.settings.batch):
            part = self.material.val[first : first + self.settings.batch]
            evaluator.add([int(target["image_id"]) for _, target in part], self.detect([image for image, _ in part]))
        metrics = evaluator.result().metrics
        kept = {name: metrics[name] for name in ("AP", "AP50", "AP75")}
        self.curve.append(Point(len(self.durations), sum(self.durations), loss, kept))
        chosen = evaluator.best_threshold()
        self.threshold = chosen if chosen == chosen else 0.0  # NaN: nothing was found

    @torch.inference_mode()
    def detect(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        """What it finds now."""
        self.model.eval()
        found: list[dict[str, Tensor]] = self.model(images)
        return found

    def save(self, path: Path) -> None:
        """The weights, with classes, threshold and recipe."""
        meta = Meta(
            classes=self.material.classes,
            category_ids=self.material.category_ids,
            threshold=self.threshold,
            recipe=self.recipe.to_dict(),
            metrics={f"boxes/{name}": value for name, value in self.curve[-1].metrics.items()},
            versions={name: version(name) for name in ("bucketrank", "torch", "torchvision", "timm")},
        )
        save_weights(path, self.model, meta)

    def to_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "loss": self.loss.label,
            "seconds_per_step": self.seconds,
            "threshold": self.threshold,
            "curve": [asdict(point) for point in self.curve],
            "recipe": self.recipe.to_dict(),
        }


def batches(items: list[Item], settings: Settings) -> Iterator[tuple[list[Tensor], list[dict[str, Tensor]]]]:
    """Endless batches in an order that follows from the seed, each picture mirrored by chance."""
    generator = torch.Generator().manual_seed(settings.seed)
    order: list[int] = []
    while True:
        while len(order) < settings.batch:
            order += torch.randperm(len(items), generator=generator).tolist()
        chosen, order = order[: settings.batch], order[settings.batch :]
        turned = (torch.rand(settings.batch, 2, generator=generator) < 0.5).tolist()
        pairs = [
            mirrored(*items[index], across=across, down=down)
            for index, (across, down) in zip(chosen, turned, strict=True)
        ]
        yield [image for image, _ in pairs], [target for _, target in pairs]


def mirrored(image: Tensor, target: dict[str, Tensor], *, across: bool, down: bool) -> Item:
    """The picture and its boxes, mirrored left to right, upside down, both or neither.

    >>> _, target = mirrored(torch.zeros(3, 10, 20), {"boxes": torch.tensor([[1.0, 2, 5, 8]])}, across=True, down=False)
    >>> target["boxes"]
    tensor([[15.,  2., 19.,  8.]])
    """
    boxes = target["boxes"]
    height, width = image.shape[-2:]
    if across:
        image, boxes = (
            image.flip(-1),
            torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1),
        )
    if down:
        image, boxes = (
            image.flip(-2),
            torch.stack([boxes[:, 0], height - boxes[:, 3], boxes[:, 2], height - boxes[:, 1]], 1),
        )
    return image, target | {"boxes": boxes}
