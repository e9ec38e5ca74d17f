"""Settings and results of the detector benchmark."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.detectors.contenders import FOCAL, TITLES, USUAL
from benchmarks.session import MIN_ROUNDS, check_device, command_line
from benchmarks.timing import Samples, Spread, ratio
from bucketrank.detectors import BackboneSettings
from bucketrank.provenance import Machine

# The coarsest feature map of a smaller image has a single cell.
MIN_SIDE = 64
# Groups of the group norm in the heads of ATSS and PAA; the channels must be a multiple.
GROUPS = 32


def parse_image_size(text: str) -> tuple[int, int]:
    """Parse height and width in a text like 256x320.

    >>> parse_image_size("800x1333")
    (800, 1333)
    """
    try:
        height, width = (int(part) for part in text.lower().split("x"))
    except ValueError as error:
        raise ValueError(f"--image-size: expected height x width, like 256x320, got {text!r}") from error
    return height, width


@dataclass(frozen=True)
class DetectorBenchSettings:
    """Settings of the benchmark, named like the flags of the command."""

    detectors: tuple[str, ...] = tuple(TITLES)
    backbone: str = "resnet18"
    image_size: tuple[int, int] = (256, 320)
    batch: int = 2
    classes: int = 20
    objects: int = 8
    channels: int = 64
    proposals: int = 1000
    rounds: int = 12
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    max_seconds_per_step: float = 20.0

    def __post_init__(self) -> None:
        check_device(self.device)
        unknown = [name for name in self.detectors if name not in TITLES]
        if not self.detectors or unknown or len(set(self.detectors)) < len(self.detectors):
            got = ",".join(self.detectors)
            raise ValueError(f"--detectors: expected some of {', '.join(TITLES)}, each once, got {got!r}")
        if min(self.image_size) < MIN_SIDE:
            raise ValueError(
                f"--image-size: expected height x width of at least {MIN_SIDE} pixels each, "
                f"got {spell_image_size(self.image_size)}"
            )
        for name in ("batch", "classes", "objects", "proposals"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected at least 1, got {getattr(self, name)}")
        if self.channels < GROUPS or self.channels % GROUPS:
            raise ValueError(f"--channels: expected a multiple of {GROUPS}, got {self.channels}")
        if self.rounds < MIN_ROUNDS:
            raise ValueError(f"--rounds: expected at least {MIN_ROUNDS}, got {self.rounds}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads: expected at least 1, got {self.threads}")
        if not self.max_seconds_per_step > 0:
            raise ValueError(f"--max-seconds-per-step: expected more than 0, got {self.max_seconds_per_step}")
        try:
            BackboneSettings(name=self.backbone).check_name()
        except ValueError as error:
            raise ValueError(f"--backbone: {str(error).removeprefix('backbone.name: ')}") from error

    def command(self) -> str:
        """Return the command that repeats the benchmark.

        >>> DetectorBenchSettings(detectors=("atss", "paa"), image_size=(800, 1333)).command()
        'python -m benchmarks detectors --detectors atss,paa --image-size 800x1333'
        """
        settings, defaults = asdict(self), asdict(DetectorBenchSettings())
        quick = dict(QUICK)
        for values in (settings, defaults, quick):
            # The flag takes one text, not a list of values.
            values["image_size"] = spell_image_size(values["image_size"])
        return command_line("detectors", settings, defaults, quick, {})


# Settings that --quick changes.
QUICK: dict[str, Any] = {
    "image_size": (128, 160),
    "batch": 1,
    "proposals": 600,
    "rounds": 4,
    "max_seconds_per_step": 5.0,
}


def spell_image_size(size: tuple[int, int]) -> str:
    """Format height and width for :func:`parse_image_size`."""
    return f"{size[0]}x{size[1]}"


@dataclass(frozen=True)
class Head:
    """Input sizes of one head's loss: candidates, logits per candidate (``classes``), and positives."""

    name: str
    candidates: int
    classes: int
    positives: int


@dataclass(frozen=True)
class StepCosts:
    """Launches and device syncs of one step and its losses, and its peak memory if known."""

    launches: int
    waits: int
    loss_launches: int
    loss_waits: int
    extra_bytes: int | None = None


@dataclass(frozen=True)
class DetectorResult:
    """The result of one contender on one detector.

    ``skipped`` is the reason why the contender did not run; it then has no ``seconds``. ``samples`` are the seconds of
    a step by round. ``loss_samples`` are the seconds of the loss in separate rounds, whose whole steps took
    ``split_samples``. ``loss_to_focal`` is the ratio to the step with focal loss if the steps differed only in the
    loss. It is less noisy than ``to_focal``, because it leaves out the rest of the steps.
    """

    detector: str
    contender: str
    title: str
    heads: list[Head]
    value: float | None = None
    estimated_seconds: float | None = None
    seconds: Spread | None = None
    to_focal: Spread | None = None
    to_usual: Spread | None = None
    loss_seconds: Spread | None = None
    share: Spread | None = None
    loss_to_focal: Spread | None = None
    skipped: str | None = None
    samples: Samples = field(default_factory=dict)
    loss_samples: Samples = field(default_factory=dict)
    split_samples: Samples = field(default_factory=dict)
    costs: StepCosts | None = None


@dataclass(frozen=True)
class DetectorBench:
    """All results, with the settings and the machine they were measured on."""

    machine: Machine
    settings: DetectorBenchSettings
    results: list[DetectorResult]

    def find(self, detector: str, contender: str) -> DetectorResult:
        """Return the result of a contender, which may have been skipped."""
        return next(r for r in self.results if (r.detector, r.contender) == (detector, contender))


def with_ratios(results: list[DetectorResult]) -> list[DetectorResult]:
    """Return the results of one detector with spreads, and with ratios to its score-based contenders by round."""
    by_name = {result.contender: result for result in results}
    return [_with_ratios(result, by_name) if result.samples else result for result in results]


def _with_ratios(result: DetectorResult, others: dict[str, DetectorResult]) -> DetectorResult:
    focal = others[FOCAL]
    loss_to_focal = [
        1 + (seconds - focal.loss_samples[turn]) / focal.split_samples[turn]
        for turn, seconds in result.loss_samples.items()
    ]
    values = {
        **vars(result),
        "seconds": Spread.of(list(result.samples.values())),
        "to_focal": ratio(result.samples, focal.samples),
        "to_usual": ratio(result.samples, others[USUAL].samples),
        "loss_seconds": Spread.of(list(result.loss_samples.values())),
        "share": ratio(result.loss_samples, result.split_samples),
        "loss_to_focal": Spread.of(loss_to_focal),
    }
    return DetectorResult(**values)
