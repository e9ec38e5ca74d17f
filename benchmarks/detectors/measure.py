"""Measure seconds per iteration of each detector with each loss, interleaved, and the loss's fraction of it.

Launches, device syncs and peak memory of a step are counted, too.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.detectors.contenders import (
    EXACT,
    QUADRATIC,
    RCNNS,
    SMALLER,
    TITLES,
    DetectorContender,
    Scene,
    detector_contenders,
    draw_scene,
)
from benchmarks.detectors.results import (
    DetectorBench,
    DetectorBenchSettings,
    DetectorResult,
    Head,
    StepCosts,
    with_ratios,
)
from benchmarks.launches import count_launches
from benchmarks.losses.contenders import SyntheticLogits
from benchmarks.losses.estimate import estimate_step
from benchmarks.session import MIN_ROUNDS, MeasurementError, Progress
from benchmarks.timing import (
    DeviceClock,
    TimedCall,
    current_device,
    device_clock,
    has_allocator_statistics,
    interleave,
    peak_allocated,
    seconds_of,
)
from bucketrank.boxes import paired_iou
from bucketrank.detectors import build
from bucketrank.detectors.assignment import IGNORED
from bucketrank.detectors.criterion import Assigned, Criterion, LossTerms
from bucketrank.detectors.mask_rcnn import MaskRCNN
from bucketrank.provenance import PACKAGES, describe
from bucketrank.settings import detector_spec
from bucketrank.training.optimiser import train_step

# Differences in seconds between two parts of a step below this are noise.
MIN_APART = 0.03
# A learning rate of 0 keeps the arithmetic of training, but the same weights and proposals in every step.
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
        """Copy the weights of ``other`` with the same name and shape; biases keep the initial value for their loss."""
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
            raise MeasurementError(f"detectors: {self.contender}: {error}") from error

    def finite_value(self) -> float:
        """Return the loss of the last step, which must be finite."""
        value = float(self.value)
        if not math.isfinite(value):
            raise MeasurementError(f"detectors: {self.contender}: expected a finite loss, got {value}")
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
        # Describe the machine first, before the benchmark itself puts load on it.
        machine = describe(settings.device, (*PACKAGES, "torchvision", "timm"))
        results: list[DetectorResult] = []
        for number, detector in enumerate(settings.detectors, start=1):
            stage = f"{TITLES[detector]} ({number} of {len(settings.detectors)})"
            results += measure_detector(detector, settings, progress, stage)
            # Free the models of this detector before building the next.
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
    return max(MIN_ROUNDS, settings.rounds // 3)


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
    """Build the contenders and run a first step of each; skip those with too long an estimated step."""
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
    detached: dict[str, Any] = {name: each.detach() for name, each in values.items() if isinstance(each, Tensor)}
    return replace(assigned, **detached)


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
        seconds += estimate_step(method, "rs", data, apart=MIN_APART, clock=clock).seconds
    return seconds


SHARE_RULE = (
    "timed in separate steps, in rounds like the others: the inputs of each criterion are detached from the graph; its"
    " forward pass and the backward pass of its terms run directly after one another and are timed; the gradients then"
    " enter the rest of the backward pass, so the step does the same work in another order. The share is that time"
    " over the time of the same step. Assignment, sampling and encoding of boxes do not count as the loss"
)


def criteria(model: nn.Module) -> Iterator[tuple[str, Criterion]]:
    """Yield the criteria of a detector with the names of their heads."""
    for name, module in model.named_modules():
        if isinstance(module, Criterion):
            yield name.removesuffix("criterion").strip(".") or "head", module


class Meter(Protocol):
    """A measurement of the losses inside a step: a :class:`Stopwatch`, or a counter of launches."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context whose cost is added to the meter."""


class Stopwatch:
    """A meter that adds up the seconds spent in :meth:`running`."""

    def __init__(self, clock: DeviceClock) -> None:
        self.seconds = 0.0
        self._clock = clock

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = self._clock.start()
        yield
        self.seconds += stop()


@contextmanager
def split_losses(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Make each loss of ``model`` run its backward pass right after its forward pass, and measure both passes."""
    changed = [module for _, module in criteria(model)]
    mask_losses = {module: module.mask_loss for module in model.modules() if isinstance(module, MaskRCNN)}
    for criterion in changed:
        criterion.forward = _split_forward(criterion.forward, meter)  # type: ignore[assignment, method-assign]
    for detector, mask_loss in mask_losses.items():
        detector.mask_loss = _split_masks(mask_loss, meter)
    try:
        yield
    finally:
        for criterion in changed:
            del criterion.forward  # the instance attribute that hides the class's method
        for detector, mask_loss in mask_losses.items():
            detector.mask_loss = mask_loss


def _split_forward(forward: Callable[[Any], Any], meter: Meter) -> Callable[[Any], Any]:
    def measured(assigned: Assigned | list[Assigned]) -> LossTerms | list[LossTerms]:
        batch = [assigned] if isinstance(assigned, Assigned) else assigned
        names = [(i, field.name) for i, each in enumerate(batch) for field in fields(each)]
        names = [(i, name) for i, name in names if _has_gradient(getattr(batch[i], name))]

        def terms_of(leaves: Sequence[Tensor]) -> LossTerms:
            changes: list[dict[str, Any]] = [{} for _ in batch]
            for (i, name), leaf in zip(names, leaves, strict=True):
                changes[i][name] = leaf
            terms = forward([replace(each, **change) for each, change in zip(batch, changes, strict=True)])
            return {f"{i} {name}": term for i, each in enumerate(terms) for name, term in each.items()}

        flat = _forward_backward(terms_of, [getattr(batch[i], name) for i, name in names], meter)
        split: list[LossTerms] = [{} for _ in batch]
        for key, term in flat.items():
            i, _, name = key.partition(" ")
            split[int(i)][name] = term
        return split[0] if isinstance(assigned, Assigned) else split

    return measured


def _split_masks(masks: Callable[..., Tensor], meter: Meter) -> Callable[..., Tensor]:
    def measured(logits: Tensor, targets: Tensor, **others: Any) -> Tensor:
        return _forward_backward(lambda leaves: {"mask": masks(leaves[0], targets, **others)}, [logits], meter)["mask"]

    return measured


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _forward_backward(
    terms_of: Callable[[Sequence[Tensor]], LossTerms], inputs: list[Tensor], meter: Meter
) -> LossTerms:
    """Return the terms with their gradients already computed; the step's own backward pass only passes these on."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    with meter.running():
        terms = terms_of(leaves)
        total = torch.stack(list(terms.values())).sum()
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if total.requires_grad:
            gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    linear = total.new_zeros(())
    for value, gradient in zip(inputs, gradients, strict=True):
        if gradient is not None:
            linear = linear + (value * gradient).sum()
    first, *_ = terms
    values = {name: term.detach() for name, term in terms.items()}
    # The first term keeps its value and gets the gradient of all terms.
    return {**values, first: values[first] + (linear - linear.detach())}


@contextmanager
def record_inputs(model: nn.Module) -> Iterator[list[tuple[str, Assigned]]]:
    """Record the inputs of the criteria inside the context, with the names of their heads."""
    inputs: list[tuple[str, Assigned]] = []

    def record(name: str, assigned: Assigned | list[Assigned]) -> None:
        inputs.extend((name, each) for each in ([assigned] if isinstance(assigned, Assigned) else assigned))

    hooks = [
        module.register_forward_pre_hook(lambda _, arguments, name=name: record(name, arguments[0]))
        for name, module in criteria(model)
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def head_of(name: str, assigned: Assigned) -> Head:
    """Return the sizes of a criterion's input."""
    return Head(
        name=name,
        candidates=int((assigned.labels != IGNORED).sum()),
        classes=assigned.logits.shape[1],
        positives=int(assigned.positives.sum()),
    )


COST_RULES = {
    "launches": "torch operations other than views and allocations, and Triton kernels, in one step, and in the forward"
    " and backward pass of its criteria; host waits are operations whose result the host has to read. Fused CPU"
    " kernels are not counted",
    "memory": "growth of the memory in torch's allocator during one step, on CUDA, ROCm and XPU; includes the"
    " gradients, not the weights and the state of the optimiser",
}


class LaunchMeter:
    """A meter that adds up the launches and device syncs inside :meth:`running`."""

    def __init__(self) -> None:
        self.launches = 0
        self.waits = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        with count_launches() as counted:
            yield
        self.launches += counted.launches
        self.waits += counted.waits


def cost_steps(device: str) -> int:
    """Return the number of steps that :func:`step_costs` runs on the device."""
    return 3 if has_allocator_statistics(device) else 2


def step_costs(model: nn.Module, step: Callable[[], object], zero_grad: Callable[[], object], device: str) -> StepCosts:
    """Run a few steps of ``model`` and count; ``zero_grad`` frees its gradients."""
    whole, losses = LaunchMeter(), LaunchMeter()
    with whole.running():
        step()
    # Count separately from the whole step, because a split step has some additional operations.
    with split_losses(model, losses):
        step()
    extra_bytes = None
    if has_allocator_statistics(device):
        zero_grad()
        extra_bytes = peak_allocated(step, device)
    return StepCosts(whole.launches, whole.waits, losses.launches, losses.waits, extra_bytes)
