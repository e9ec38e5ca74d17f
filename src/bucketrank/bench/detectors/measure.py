"""Seconds per iteration of each detector with each loss, the contenders in turn, and what of it is the loss's."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bucketrank.bench.contenders import synchronizer
from bucketrank.bench.detectors.contenders import EXACT, QUADRATIC, RCNNS, SMALLER, TITLES, Entry, entries
from bucketrank.bench.detectors.scene import Scene, draw_scene
from bucketrank.bench.detectors.split import Stopwatch, head_of, listening, split
from bucketrank.bench.detectors.study import Result, Settings, Study, with_ratios
from bucketrank.bench.estimate import estimate
from bucketrank.bench.flags import FEWEST_ROUNDS
from bucketrank.bench.machine import PACKAGES, describe
from bucketrank.bench.study import CellError, Progress
from bucketrank.bench.synthetic import Synthetic
from bucketrank.bench.timing import Contender, interleave, seconds_of
from bucketrank.detectors import build
from bucketrank.detectors.criterion import Assigned
from bucketrank.ops.boxes import paired_iou

# Parts of a step that differ by fewer seconds differ by noise.
APART = 0.03
# The arithmetic of training; at a rate of 0 every step of every round has the same weights, hence the same proposals.
SGD: dict[str, Any] = {"lr": 0.0, "momentum": 0.9, "weight_decay": 1e-4}


class Trainee:
    """A detector with an optimiser, and a batch to train it on again and again."""

    def __init__(self, entry: Entry, scene: Scene, settings: Settings) -> None:
        height, width = settings.image_size
        own = dict(SMALLER.get(entry.detector, {}))
        if entry.detector in (*RCNNS, "co_detr"):
            own["proposals"] = settings.proposals
        torch.manual_seed(settings.seed)
        self.entry, self.scene = entry, scene
        self.model = build(
            entry.detector,
            num_classes=settings.classes,
            backbone=settings.backbone,
            channels=settings.channels,
            min_size=min(height, width),
            max_size=max(height, width),
            **own,
            **entry.build,
        ).to(settings.device)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, **SGD)
        self.value = torch.tensor(math.nan)

    def begin_as(self, other: Trainee) -> None:
        """Take the weights of ``other`` that have the same name and shape; biases stay as the loss wants them."""
        given, own = other.model.state_dict(), self.model.state_dict()
        same = {
            name: value
            for name, value in given.items()
            if name.endswith("weight") and name in own and own[name].shape == value.shape
        }
        self.model.load_state_dict(same, strict=False)

    def step(self) -> None:
        """One iteration: forward, backward, optimiser."""
        try:
            self.optimizer.zero_grad()
            terms: dict[str, Tensor] = self.model(self.scene.images, self.scene.targets)
            total = torch.stack(list(terms.values())).sum()
            total.backward()
            self.optimizer.step()
            self.value = total.detach()
        except Exception as error:
            raise CellError(f"bench detectors: {self.entry}: {error}") from error

    def checked(self) -> float:
        """The loss of the last step."""
        value = float(self.value)
        if not math.isfinite(value):
            raise CellError(f"bench detectors: {self.entry}: expected a finite loss, got {value}")
        return value


@dataclass(frozen=True)
class Planned:
    """A contender before it is measured; without a trainee it is skipped."""

    result: Result
    seconds: float
    trainee: Trainee | None = None


def run(settings: Settings, progress: Progress) -> Study:
    """The whole study, detector by detector."""
    with _threads(settings.threads):
        # Before there is load of our own making.
        machine = describe(settings.device, (*PACKAGES, "torchvision", "timm"))
        results: list[Result] = []
        for number, detector in enumerate(settings.detectors, start=1):
            stage = f"{TITLES[detector]} ({number} of {len(settings.detectors)})"
            results += measure(detector, settings, progress, stage)
            # At most the models of one detector at a time.
            gc.collect()
    return Study(machine, settings, results)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def split_rounds(settings: Settings) -> int:
    """Rounds of steps in which the loss is timed by itself."""
    return max(FEWEST_ROUNDS, settings.rounds // 3)


def measure(detector: str, settings: Settings, progress: Progress, stage: str) -> list[Result]:
    """All contenders on one detector."""
    synchronize = synchronizer(settings.device)
    planned = plan(detector, settings, progress, stage)
    ready = {entry.result.contender: entry for entry in planned if entry.trainee is not None}
    trainees = {name: entry.trainee for name, entry in ready.items() if entry.trainee is not None}
    again = settings.rounds + split_rounds(settings)
    progress.begin(f"{stage}: measuring", sum(again * entry.seconds for entry in ready.values()))

    def advance(name: str, calls: int) -> None:
        progress.advance(str(trainees[name].entry), calls * ready[name].seconds)

    steps = {name: Contender(trainee.step, warmup=0) for name, trainee in trainees.items()}
    samples = interleave(steps, rounds=settings.rounds, rotate=True, synchronize=synchronize, advance=advance)
    losses: dict[str, list[float]] = {name: [] for name in trainees}
    cut = {
        name: Contender(_split_step(trainee, losses[name], synchronize), warmup=0) for name, trainee in trainees.items()
    }
    wholes = interleave(cut, rounds=split_rounds(settings), rotate=True, synchronize=synchronize, advance=advance)
    measured = []
    for entry in planned:
        name = entry.result.contender
        if entry.trainee is None:
            measured.append(entry.result)
            continue
        parts = dict(enumerate(losses[name]))
        value = entry.trainee.checked()
        result = replace(entry.result, value=value, samples=samples[name])
        measured.append(replace(result, loss_samples=parts, split_samples=wholes[name]))
    return with_ratios(measured)


def _split_step(trainee: Trainee, seconds: list[float], synchronize: Callable[[], None]) -> Callable[[], None]:
    def step() -> None:
        watch = Stopwatch(synchronize)
        with split(trainee.model, watch):
            trainee.step()
        seconds.append(watch.seconds)

    return step


def plan(detector: str, settings: Settings, progress: Progress, stage: str) -> list[Planned]:
    """Builds the contenders and warms them up; what would take too long by estimate is left out."""
    listed = entries(detector)
    progress.begin(f"{stage}: building", len(listed))
    scene = draw_scene(
        settings.image_size,
        batch=settings.batch,
        objects=settings.objects,
        classes=settings.classes,
        masks=detector == "mask_rcnn",
        seed=settings.seed,
        device=settings.device,
    )
    synchronize = synchronizer(settings.device)
    planned: list[Planned] = []
    first: tuple[Trainee, Planned, list[tuple[str, Assigned]]] | None = None
    for entry in listed:
        progress.advance(str(entry), 1)
        expected = None
        if first is not None and entry.name in QUADRATIC:
            # The rest of the step is as long as with the exact method.
            expected = first[1].seconds + loss_seconds(entry, first[2], synchronize)
            if expected > settings.max_seconds_per_step:
                told = f"by estimate a step takes more than {settings.max_seconds_per_step:g} s"
                heads = first[1].result.heads
                skipped = Result(detector, entry.name, entry.title, heads, estimated_seconds=expected, skipped=told)
                planned.append(Planned(skipped, expected))
                continue
        trainee = Trainee(entry, scene, settings)
        if first is not None:
            trainee.begin_as(first[0])
        if entry.name == EXACT:
            # The first step of all may have something to compile or to load.
            trainee.step()
        with listening(trainee.model) as heard:
            seconds = seconds_of(trainee.step, synchronize)
        heads = [head_of(name, found) for name, found in heard]
        result = Result(detector, entry.name, entry.title, heads, estimated_seconds=expected)
        planned.append(Planned(result, seconds, trainee))
        if first is None:
            first = trainee, planned[0], [(name, _detached(found)) for name, found in heard]
    return planned


def _detached(found: Assigned) -> Assigned:
    return replace(found, **{name: value.detach() for name, value in vars(found).items() if isinstance(value, Tensor)})


def loss_seconds(entry: Entry, given: list[tuple[str, Assigned]], synchronize: Callable[[], None]) -> float:
    """What the loss would take by a method that is quadratic, on what the heads gave the exact one."""
    seconds = 0.0
    for _, found in given:
        if not bool(found.positives.any()):
            continue
        labels = paired_iou(found.boxes, found.objects).clamp(min=1e-6)
        data = Synthetic(found.logits.flatten(), found.targets(labels).flatten())
        seconds += estimate(entry.build["method"], "rs", data, apart=APART, synchronize=synchronize).seconds
    return seconds
