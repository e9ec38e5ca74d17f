"""The settings of training, apart from those of the detector. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

OPTIMISERS = ("sgd", "adamw")
POLICIES = ("steps", "one_cycle")
SCALINGS = ("linear", "sqrt", "none")
STYLES = ("auto", "coco", "lvis")
LAYOUTS = ("auto", "own", "coco", "lvis", "roboflow")


@dataclass(frozen=True)
class DataSettings:
    """Which images make up a batch, and what happens to them."""

    layout: Annotated[str, "of the folder: auto, own, coco, lvis or roboflow"] = "auto"
    style: Annotated[str, "of the evaluation: coco, lvis, or auto (by the classes' frequencies)"] = "auto"
    batch_size: Annotated[int, "images of one step, over all devices"] = 16
    workers: Annotated[int, "processes that read images, for each device"] = 4
    flip: Annotated[float, "probability of mirroring an image"] = 0.5
    jitter: Annotated[bool, "change the colours"] = False
    crop: Annotated[bool, "DETR's random crops"] = False
    keep_empty: Annotated[bool, "also train on images without objects"] = False
    repeat: Annotated[int, "how often every image comes in an epoch"] = 1
    repeat_threshold: Annotated[float | None, "see images of classes rarer than this share more often (LVIS)"] = None
    val_batch_size: Annotated[int, "images evaluated together, on each device"] = 1

    def __post_init__(self) -> None:
        choose("data.layout", self.layout, LAYOUTS)
        choose("data.style", self.style, STYLES)
        at_least("data.batch_size", self.batch_size, 1)
        at_least("data.workers", self.workers, 0)
        at_least("data.repeat", self.repeat, 1)
        at_least("data.val_batch_size", self.val_batch_size, 1)
        if not 0 <= self.flip <= 1:
            raise ValueError(f"data.flip: expected a probability from 0 to 1, got {self.flip}")
        if self.repeat_threshold is not None:
            if not 0 < self.repeat_threshold <= 1:
                raise ValueError(f"data.repeat_threshold: expected a share up to 1, got {self.repeat_threshold}")
            if self.repeat != 1:
                raise ValueError("data.repeat: expected 1 with data.repeat_threshold, which decides for each image")


@dataclass(frozen=True)
class ScheduleSettings:
    """Optimiser and learning rate.

    ``lr`` is meant for steps of ``base_batch`` images; with ``linear`` scaling the rate is
    ``lr * data.batch_size / base_batch``, with ``sqrt`` its root's part, with ``none`` just ``lr``.
    """

    optimiser: Annotated[str, "sgd or adamw"] = "sgd"
    lr: Annotated[float, "learning rate for base_batch images"] = 0.01
    base_batch: Annotated[int, "images of a step that lr is meant for"] = 16
    scaling: Annotated[str, "of lr with the batch: linear, sqrt or none"] = "linear"
    momentum: Annotated[float, "of sgd"] = 0.9
    weight_decay: Annotated[float, "of all parameters"] = 1e-4
    backbone_factor: Annotated[float, "of the learning rate of the backbone"] = 1.0
    factors: Annotated[dict[str, float], "of the rate of parameters whose name contains a key; the first that fits"] = (
        field(default_factory=dict)
    )
    epochs: Annotated[int, "passes over the data"] = 12
    max_steps: Annotated[int | None, "end after so many steps, if that is earlier"] = None
    warmup_steps: Annotated[int, "steps with a rising rate"] = 500
    warmup_factor: Annotated[float, "of the rate that they begin with"] = 0.001
    policy: Annotated[str, "steps (at the milestones) or one_cycle (up, then down along a cosine)"] = "steps"
    milestones: Annotated[tuple[int, ...], "epochs after which the rate is multiplied by gamma"] = (8, 11)
    gamma: Annotated[float, "factor at a milestone"] = 0.1
    clip: Annotated[float | None, "largest norm of the gradient"] = None
    accumulate: Annotated[int, "parts into which a device's share of a batch is cut; each is ranked by itself"] = 1

    def __post_init__(self) -> None:
        choose("schedule.optimiser", self.optimiser, OPTIMISERS)
        choose("schedule.scaling", self.scaling, SCALINGS)
        choose("schedule.policy", self.policy, POLICIES)
        for name in ("base_batch", "epochs", "accumulate"):
            at_least(f"schedule.{name}", getattr(self, name), 1)
        at_least("schedule.warmup_steps", self.warmup_steps, 0)
        if self.max_steps is not None:
            at_least("schedule.max_steps", self.max_steps, 1)
        for name in ("lr", "gamma", "warmup_factor"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"schedule.{name}: expected a number above 0, got {getattr(self, name)}")
        for name in ("momentum", "weight_decay", "backbone_factor"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"schedule.{name}: expected a number of at least 0, got {getattr(self, name)}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"schedule.clip: expected a number above 0, or null for none, got {self.clip}")
        if list(self.milestones) != sorted(set(self.milestones)) or (self.milestones and self.milestones[0] < 1):
            raise ValueError(f"schedule.milestones: expected rising epochs from 1, got {self.milestones}")


@dataclass(frozen=True)
class TrainerSettings:
    """Where and how the steps are computed, and what is written."""

    accelerator: Annotated[str, "auto, cpu, gpu, ... (Lightning's names)"] = "auto"
    devices: Annotated[str, "how many, or auto for all"] = "auto"
    nodes: Annotated[int, "machines"] = 1
    strategy: Annotated[str, "auto, ddp, ... (Lightning's names)"] = "auto"
    precision: Annotated[str, "32-true, bf16-mixed, 16-mixed (Lightning's names)"] = "32-true"
    seed: Annotated[int, "of weights, order and augmentation"] = 0
    deterministic: Annotated[bool, "only operations that give the same bits every time"] = False
    log_every: Annotated[int, "steps between two lines of train.csv"] = 50
    checkpoint_minutes: Annotated[float, "between two checkpoints within an epoch"] = 10.0
    checkpoint_steps: Annotated[int | None, "steps between two checkpoints within an epoch, instead of minutes"] = None
    validate_every: Annotated[int, "epochs between two evaluations"] = 1
    pictures: Annotated[int, "validation images drawn at the end"] = 8
    tensorboard: Annotated[bool, "write for TensorBoard, too"] = False

    def __post_init__(self) -> None:
        for name in ("nodes", "log_every", "validate_every"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        at_least("trainer.pictures", self.pictures, 0)
        at_least("trainer.seed", self.seed, 0)
        if self.checkpoint_steps is not None:
            at_least("trainer.checkpoint_steps", self.checkpoint_steps, 1)
        if not self.checkpoint_minutes >= 0:
            raise ValueError(f"trainer.checkpoint_minutes: expected at least 0, got {self.checkpoint_minutes}")
        if self.devices != "auto" and not self.devices.isdecimal():
            raise ValueError(f"trainer.devices: expected a number, or auto, got {self.devices!r}")


def choose(name: str, value: str, known: tuple[str, ...] | list[str]) -> None:
    """Raise unless ``value`` is known, naming the nearest that is."""
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}; {nearest(value, list(known))}")


def nearest(word: str, known: list[str]) -> str:
    """The known word most like ``word``, in a sentence."""
    import difflib

    best = max(known, key=lambda each: difflib.SequenceMatcher(None, word, each).ratio())
    return f'the nearest is "{best}"'


def at_least(name: str, value: float, least: int) -> None:
    """Raise unless ``value`` is that large."""
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
