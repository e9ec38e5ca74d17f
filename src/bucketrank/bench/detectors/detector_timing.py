"""Seconds per iteration of each detector with each loss, measured in turn, and the share of the loss in them."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from bucketrank.bench.detectors.detector_contenders import (
    EXACT,
    QUADRATIC,
    RCNNS,
    SMALLER,
    TITLES,
    DetectorContender,
    detector_contenders,
)
from bucketrank.bench.detectors.detector_results import (
    DetectorBench,
    DetectorBenchSettings,
    DetectorResult,
    with_ratios,
)
from bucketrank.bench.detectors.loss_share import Stopwatch, head_of, record_inputs, split_losses
from bucketrank.bench.detectors.scene import Scene, draw_scene
from bucketrank.bench.detectors.step_costs import cost_steps, step_costs
from bucketrank.bench.device_clock import DeviceClock, current_device, device_clock, seconds_of
from bucketrank.bench.flags import FEWEST_ROUNDS
from bucketrank.bench.losses.step_estimate import estimate_step
from bucketrank.bench.losses.synthetic_logits import SyntheticLogits
from bucketrank.bench.measurement import MeasurementError, Progress
from bucketrank.bench.timing import TimedCall, interleave
from bucketrank.boxes import paired_iou
from bucketrank.detectors import build
from bucketrank.detectors.criterion import Assigned
from bucketrank.provenance.machine import PACKAGES, describe
from bucketrank.settings import detector_spec
from bucketrank.training.train_step import train_step

# Smaller differences, in seconds, between the times of two parts of a step are noise.
LEAST_APART = 0.03
# With a learning rate of 0 every step has the arithmetic of training, the same weights, and hence the same proposals.
SGD: dict[str, Any] = {"lr": 0.0, "momentum": 0.9, "weight_decay": 1e-4}


class BenchDetector:
    """A detector with an optimiser and one batch, on which every step trains it."""

    def __init__(self, contender: DetectorContender, scene: Scene, settings: DetectorBenchSettings) -> None:
        height, width = settings.image_size
        own_settings = dict(SMALLER.get(contender.detector, {}))
        if contender.detector in (*RCNNS, "co_detr"):
            own_settings["proposals"] = settings.proposals
        torch.manual_seed(settings.seed)
        self.contender, self.scene = contender, scene
        self.model = build(
            contender.detector,
            num_classes=settings.classes,
            backbone=settings.backbone,
            channels=settings.channels,
            min_size=min(height, width),
            max_size=max(height, width),
            **own_settings,
            **contender.build,
        ).to(settings.device)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, **SGD)
        self.value = torch.tensor(math.nan)

    def copy_weights(self, other: BenchDetector) -> None:
        """Copy the weights of ``other`` that have the same name and shape; biases keep the start for their own loss."""
        others, own = other.model.state_dict(), self.model.state_dict()
        same = {
            name: value
            for name, value in others.items()
            if name.endswith("weight") and name in own and own[name].shape == value.shape
        }
        self.model.load_state_dict(same, strict=False)

    def step(self) -> None:
        """Run one iteration: forward, backward, optimiser."""
        try:
            summed = train_step(self.model, (self.scene.images, self.scene.targets), self.optimizer)
            self.value = summed.total.detach()
        except Exception as error:
            raise MeasurementError(f"bench detectors: {self.contender}: {error}") from error

    def finite_value(self) -> float:
        """Return the loss of the last step, which must be finite."""
        value = float(self.value)
        if not math.isfinite(value):
            raise MeasurementError(f"bench detectors: {self.contender}: expected a finite loss, got {value}")
        return value


@dataclass(frozen=True)
class PlannedDetector:
    """A contender before it is measured; without a ``detector`` it is skipped."""

    result: DetectorResult
    seconds: float
    detector: BenchDetector | None = None


def measure_detectors(settings: DetectorBenchSettings, progress: Progress) -> DetectorBench:
    """Run the whole benchmark, one detector after another."""
    with _threads(settings.threads), current_device(settings.device):
        # Described first, before the benchmark itself puts load on the machine.
        machine = describe(settings.device, (*PACKAGES, "torchvision", "timm"))
        results: list[DetectorResult] = []
        for number, detector in enumerate(settings.detectors, start=1):
            stage = f"{TITLES[detector]} ({number} of {len(settings.detectors)})"
            results += measure_detector(detector, settings, progress, stage)
            # Frees the models of this detector before those of the next are built.
            gc.collect()
    return DetectorBench(machine, settings, results)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def loss_rounds(settings: DetectorBenchSettings) -> int:
    """Return the number of rounds in which the loss is timed inside the steps."""
    return max(FEWEST_ROUNDS, settings.rounds // 3)


def measure_detector(
    detector: str, settings: DetectorBenchSettings, progress: Progress, stage: str
) -> list[DetectorResult]:
    """Measure all contenders of one detector."""
    clock = device_clock(settings.device)
    planned = plan_detector(detector, settings, progress, stage)
    seconds = {each.result.contender: each.seconds for each in planned if each.detector is not None}
    detectors = {each.result.contender: each.detector for each in planned if each.detector is not None}
    calls_of_each = settings.rounds + loss_rounds(settings) + cost_steps(settings.device)
    progress.begin(f"{stage}: measuring", calls_of_each * sum(seconds.values()))

    def advance(name: str, calls: int) -> None:
        progress.advance(str(detectors[name].contender), calls * seconds[name])

    steps = {name: TimedCall(each.step, warmup=0) for name, each in detectors.items()}
    samples = interleave(steps, rounds=settings.rounds, rotate=True, clock=clock, advance=advance)
    losses: dict[str, list[float]] = {name: [] for name in detectors}
    split_steps = {
        name: TimedCall(_split_step(each, losses[name], clock), warmup=0) for name, each in detectors.items()
    }
    split_samples = interleave(split_steps, rounds=loss_rounds(settings), rotate=True, clock=clock, advance=advance)
    results = []
    for each in planned:
        name = each.result.contender
        if each.detector is None:
            results.append(each.result)
            continue
        result = replace(each.result, value=each.detector.finite_value(), samples=samples[name])
        costs = step_costs(each.detector.model, each.detector.step, each.detector.optimizer.zero_grad, settings.device)
        advance(name, cost_steps(settings.device))
        loss_samples = dict(enumerate(losses[name]))
        results.append(replace(result, loss_samples=loss_samples, split_samples=split_samples[name], costs=costs))
    return with_ratios(results)


def _split_step(detector: BenchDetector, loss_seconds: list[float], clock: DeviceClock) -> Callable[[], None]:
    def step() -> None:
        watch = Stopwatch(clock)
        with split_losses(detector.model, watch):
            detector.step()
        loss_seconds.append(watch.seconds)

    return step


def plan_detector(name: str, settings: DetectorBenchSettings, progress: Progress, stage: str) -> list[PlannedDetector]:
    """Build the contenders and run a first step of each; skip those whose step would take too long by estimate."""
    contenders = detector_contenders(name)
    progress.begin(f"{stage}: building", len(contenders))
    scene = draw_scene(
        settings.image_size,
        batch=settings.batch,
        objects=settings.objects,
        classes=settings.classes,
        masks=detector_spec(name).load().masks,
        seed=settings.seed,
        device=settings.device,
    )
    clock = device_clock(settings.device)
    planned: list[PlannedDetector] = []
    # The first contender, its plan, and the inputs of its criteria; the others are compared with it.
    first: tuple[BenchDetector, PlannedDetector, list[tuple[str, Assigned]]] | None = None
    for contender in contenders:
        progress.advance(str(contender), 1)
        expected = None
        if first is not None and contender.name in QUADRATIC:
            # The rest of the step takes as long as with the exact method.
            expected = first[1].seconds + quadratic_loss_seconds(contender, first[2], clock)
            if expected > settings.max_seconds_per_step:
                result = DetectorResult(
                    name,
                    contender.name,
                    contender.title,
                    first[1].result.heads,
                    estimated_seconds=expected,
                    skipped=f"by estimate a step takes more than {settings.max_seconds_per_step:g} s",
                )
                planned.append(PlannedDetector(result, expected))
                continue
        detector = BenchDetector(contender, scene, settings)
        if first is not None:
            detector.copy_weights(first[0])
        if contender.name == EXACT:
            # The first step may compile or load something.
            detector.step()
        with record_inputs(detector.model) as inputs:
            seconds = seconds_of(detector.step, clock)
        heads = [head_of(head, assigned) for head, assigned in inputs]
        result = DetectorResult(name, contender.name, contender.title, heads, estimated_seconds=expected)
        planned.append(PlannedDetector(result, seconds, detector))
        if first is None:
            first = detector, planned[0], [(head, _detached(assigned)) for head, assigned in inputs]
    return planned


def _detached(assigned: Assigned) -> Assigned:
    values = {field.name: getattr(assigned, field.name) for field in fields(assigned)}
    return replace(assigned, **{name: each.detach() for name, each in values.items() if isinstance(each, Tensor)})


def quadratic_loss_seconds(
    contender: DetectorContender, inputs: list[tuple[str, Assigned]], clock: DeviceClock
) -> float:
    """Estimate the seconds of the loss by a quadratic method, on the inputs of the exact method's criteria."""
    seconds = 0.0
    for _, assigned in inputs:
        if not bool(assigned.positives.any()):
            continue
        labels = paired_iou(assigned.boxes, assigned.objects).clamp(min=1e-6)
        data = SyntheticLogits(assigned.logits.flatten(), assigned.targets(labels).flatten())
        method = contender.build["method"]
        seconds += estimate_step(method, "rs", data, apart=LEAST_APART, clock=clock).seconds
    return seconds
