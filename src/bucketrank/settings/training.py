"""Data, schedule and trainer settings: everything in a recipe besides the detector and its loss."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, get_args

from bucketrank.settings.choices import Augmentation, LayoutName, Logger
from bucketrank.settings.fields import Settings

Style = Literal["auto", "coco", "lvis"]
Optimiser = Literal["sgd", "adamw"]
Scaling = Literal["linear", "sqrt", "none"]
Policy = Literal["steps", "one_cycle"]
# Lightning's other half precisions also round the ground-truth boxes, in bfloat16 by several pixels. Detectors and
# their inputs are float32, so there is no 64-true.
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
AUTO_BATCH = -1  # data.batch_size that stands for as many images as fit on the GPU
MAX_REPEAT = 10_000  # an epoch is a list of all its images


@dataclass(frozen=True)
class DataSettings(Settings):
    """Batches and augmentation."""

    group: ClassVar[str] = "data"
    filled_by_run: ClassVar[tuple[str, ...]] = ("batch_size",)

    layout: Annotated[Literal["auto", LayoutName], "layout of the data folder"] = "auto"
    style: Annotated[Style, "evaluation rules; auto takes lvis if the categories have frequencies"] = "auto"
    batch_size: Annotated[int, "images per step, over all devices; -1 for as many as fit on the GPU"] = 16
    workers: Annotated[int, "data-loading workers per device"] = 4
    flip: Annotated[float, "probability of a horizontal flip"] = 0.5
    jitter: Annotated[bool, "jitter colours"] = False
    crop: Annotated[bool, "use DETR's random crops"] = False
    augment: Annotated[
        tuple[Augmentation, ...], f"further augmentations: any of {', '.join(get_args(Augmentation))}"
    ] = ()
    mosaic: Annotated[float, "probability of a mosaic of four images"] = 0.0
    mixup: Annotated[float, "probability of a blend of two images"] = 0.0
    copy_paste: Annotated[float, "probability of pasting objects of another image along their masks"] = 0.0
    close_augmentations: Annotated[int, "final epochs without mosaic, mixup and copy-paste"] = 1
    keep_empty: Annotated[bool, "also train on images without objects"] = False
    repeat: Annotated[int, "number of times an epoch uses each image"] = 1
    repeat_threshold: Annotated[
        float | None, "repeat images of classes that occur in less than this fraction of the images (LVIS)"
    ] = None
    val_batch_size: Annotated[int, "images evaluated at once, per device"] = 1
    holdout: Annotated[
        float | None, "fraction of the training images to hold out for evaluation, instead of the validation images"
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        number = self.batch_size
        self.require("batch_size", f"at least 1, or {AUTO_BATCH}", holds=number >= 1 or number == AUTO_BATCH)
        self.require_min(workers=0, repeat=1, val_batch_size=1, close_augmentations=0)
        self.require("repeat", f"1 to {MAX_REPEAT:,}", holds=self.repeat <= MAX_REPEAT)
        for name in ("flip", "mosaic", "mixup", "copy_paste"):
            self.require(name, "a probability from 0 to 1", holds=0 <= getattr(self, name) <= 1)
        share = self.holdout
        self.require("holdout", "a share above 0 and below 1, or null", holds=share is None or 0 < share < 1)
        if self.repeat_threshold is not None:
            self.require("repeat_threshold", "a share above 0 and up to 1", holds=0 < self.repeat_threshold <= 1)
            expected = "1 with data.repeat_threshold, which sets the repeats per image"
            self.require("repeat", expected, holds=self.repeat == 1)

    @property
    def chosen_layout(self) -> LayoutName | None:
        """The layout of the data folder; None for the one that fits."""
        return None if self.layout == "auto" else self.layout


@dataclass(frozen=True)
class ScheduleSettings(Settings):
    """Optimiser and learning rate.

    ``lr`` is the rate for steps of ``base_batch`` images. With ``linear`` scaling the rate is
    ``lr * data.batch_size / base_batch``, with ``sqrt`` it is ``lr * sqrt(data.batch_size / base_batch)``.
    """

    group: ClassVar[str] = "schedule"

    optimiser: Annotated[Optimiser, "optimiser"] = "sgd"
    lr: Annotated[float, "learning rate for base_batch images per step"] = 0.01
    base_batch: Annotated[int, "images per step for which lr is given"] = 16
    scaling: Annotated[Scaling, "how the learning rate scales with the batch size"] = "linear"
    momentum: Annotated[float, "momentum of sgd"] = 0.9
    weight_decay: Annotated[float, "weight decay of all parameters"] = 1e-4
    backbone_factor: Annotated[float, "learning-rate factor of the backbone"] = 1.0
    factors: Annotated[
        dict[str, float], "learning-rate factors for parameters with the key in their name; the first match wins"
    ] = field(default_factory=dict)
    epochs: Annotated[int, "passes over the training set"] = 12
    max_steps: Annotated[int | None, "stop after this many steps if that comes first"] = None
    warmup_steps: Annotated[int, "warm-up steps, with a rising learning rate"] = 500
    warmup_factor: Annotated[float, "initial learning rate of the warm-up, as a fraction of the learning rate"] = 0.001
    policy: Annotated[Policy, "steps (drop at the milestones) or one_cycle (rise, then a cosine)"] = "steps"
    milestones: Annotated[tuple[int, ...], "epochs after which the rate is multiplied by gamma"] = (8, 11)
    gamma: Annotated[float, "learning-rate factor at a milestone"] = 0.1
    clip: Annotated[float | None, "maximum gradient norm (null: no clipping)"] = None
    ema: Annotated[float | None, "EMA decay; the averaged weights are evaluated and saved (null: no EMA)"] = None
    early_stop: Annotated[int | None, "end after this many evaluations without a higher AP (null: never)"] = None
    accumulate: Annotated[int, "gradient accumulation: micro-batches per step, each ranked separately"] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_min(base_batch=1, epochs=1, accumulate=1, warmup_steps=0, max_steps=1)
        for name in ("lr", "gamma", "warmup_factor"):
            self.require(name, "a number above 0", holds=0 < getattr(self, name) < float("inf"))
        for name in ("momentum", "weight_decay", "backbone_factor"):
            self.require(name, "a number of at least 0", holds=0 <= getattr(self, name) < float("inf"))
        valid = all(0 <= factor < float("inf") for factor in self.factors.values())
        self.require("factors", "numbers of at least 0", holds=valid)
        self.require("clip", "a number above 0, or null for none", holds=self.clip is None or self.clip > 0)
        self.require("ema", "a number above 0 and below 1, or null", holds=self.ema is None or 0 < self.ema < 1)
        patience = self.early_stop
        self.require("early_stop", "at least 1, or null", holds=patience is None or patience >= 1)
        milestones = list(self.milestones)
        rising = milestones == sorted(set(milestones)) and all(epoch >= 1 for epoch in milestones)
        self.require("milestones", "rising epochs from 1", holds=rising)


@dataclass(frozen=True)
class TrainerSettings(Settings):
    """Devices, logging and checkpoints of a run."""

    group: ClassVar[str] = "trainer"

    accelerator: Annotated[str, "auto, cpu, gpu, ... (Lightning's names)"] = "auto"
    devices: Annotated[str, "number of devices, or auto for all"] = "auto"
    nodes: Annotated[int, "number of machines"] = 1
    strategy: Annotated[str, "auto, ddp, ... (Lightning's names)"] = "auto"
    precision: Annotated[Precision, "precision of the layers (Lightning's names)"] = "32-true"
    seed: Annotated[int, "seed of weights, order and augmentation"] = 0
    deterministic: Annotated[bool, "use deterministic operations only"] = False
    log_every: Annotated[int, "steps between two rows of train.csv"] = 50
    max_time: Annotated[
        str | None, "train for this time, like 2h, 90m or 45s, instead of schedule.epochs; the schedule is fitted to it"
    ] = None
    checkpoint_minutes: Annotated[float, "minutes between two checkpoints within an epoch"] = 10.0
    checkpoint_steps: Annotated[int | None, "steps between two checkpoints within an epoch, instead of minutes"] = None
    validate_every: Annotated[int, "epochs between two evaluations"] = 1
    calibrate: Annotated[bool, "calibrate the scores of the final weights on training images"] = True
    calibration_images: Annotated[int, "maximum number of training images for the calibration"] = 500
    pictures: Annotated[int, "validation images to draw at the end"] = 8
    keep_detections: Annotated[bool, "write the detections of each evaluation to detections/STEP.json"] = False
    loggers: Annotated[tuple[Logger, ...], f"additional loggers: any of {', '.join(get_args(Logger))}"] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_min(nodes=1, log_every=1, validate_every=1, calibration_images=1, pictures=0, seed=0)
        self.require_min(checkpoint_steps=1, checkpoint_minutes=0)
        limit = self.max_seconds
        self.require("max_time", "a time above 0 such as 2h, 90m or 45s", holds=limit is None or 0 < limit < math.inf)
        numbered = self.devices == "auto" or (self.devices.isdecimal() and int(self.devices) >= 1)
        self.require("devices", "a number of at least 1, or auto", holds=numbered)

    @property
    def max_seconds(self) -> float | None:
        """``max_time`` in seconds: None without a limit, 0 if it is not a time.

        >>> TrainerSettings(max_time="1.5h").max_seconds
        5400.0
        """
        if self.max_time is None:
            return None
        parts = re.fullmatch(r"(\d+(?:\.\d+)?)([hms])", self.max_time)
        return 0.0 if parts is None else float(parts[1]) * {"h": 3600, "m": 60, "s": 1}[parts[2]]
