"""``bucketrank bench detectors``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from bucketrank.cli.arguments import require
from bucketrank.errors import UsageError


def bench_detectors(
    *,
    quick: Annotated[bool, "use smaller images and fewer rounds: less than two minutes on two cores"] = False,
    out: Annotated[Path, "folder for the JSON, the Markdown and the figure"] = Path("runs/bench-detectors"),
    detectors: Annotated[str | None, "names separated by commas (default: all)"] = None,
    backbone: Annotated[str, "a timm model, swin_tiny or swin_large"] = "resnet18",
    image_size: Annotated[str | None, "HEIGHTxWIDTH in pixels (256x320; --quick: 128x160)"] = None,
    batch: Annotated[int | None, "images per step (2; --quick: 1)"] = None,
    classes: Annotated[int, "number of classes"] = 20,
    objects: Annotated[int, "objects per image"] = 8,
    channels: Annotated[int, "channels of the pyramid and the heads"] = 64,
    proposals: Annotated[int | None, "proposals per image that reach the R-CNN box heads (1000; --quick: 600)"] = None,
    rounds: Annotated[int | None, "rounds in which the contenders take turns (12; --quick: 4)"] = None,
    seed: Annotated[int, "seed of images, objects and weights"] = 0,
    device: Annotated[str, "a torch device, like cpu or cuda:0"] = "cpu",
    threads: Annotated[int | None, "CPU threads for torch (default: torch's choice)"] = None,
    max_seconds_per_step: Annotated[float | None, "skip steps estimated to take longer (20; --quick: 5)"] = None,
) -> None:
    """Measure seconds per iteration of each detector with RS loss, by method, against score-based losses."""
    given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}
    require("rich", "matplotlib", "timm", "torchvision", extra="detect")
    from bucketrank.bench.detectors.detector_report import show_detector_bench, write_detector_bench
    from bucketrank.bench.detectors.detector_results import QUICK, DetectorBenchSettings, parse_image_size
    from bucketrank.bench.detectors.detector_timing import measure_detectors
    from bucketrank.bench.session import present

    del given["quick"], given["out"]
    try:
        if detectors is not None:
            given["detectors"] = tuple(detectors.split(","))
        if image_size is not None:
            given["image_size"] = parse_image_size(image_size)
        settings = DetectorBenchSettings(**(QUICK if quick else {}) | given)
    except ValueError as error:
        raise UsageError(f"bench detectors: {error}") from error
    present(settings, out, measure=measure_detectors, show=show_detector_bench, write=write_detector_bench)
