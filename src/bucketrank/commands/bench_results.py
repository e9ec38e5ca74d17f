"""``bucketrank bench results``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bucketrank.cli.arguments import require
from bucketrank.errors import UsageError


def bench_results(
    file: Annotated[Path, "losses.json or detectors.json, as a benchmark writes them"],
    *,
    out: Annotated[Path | None, "folder for the Markdown and the figure (default: none are written)"] = None,
) -> None:
    """Show the results in the JSON of a benchmark, also one from another machine."""
    require("rich", "matplotlib")
    from bucketrank.bench.bench_reading import BenchFileError, read_document, restore_bench
    from bucketrank.bench.session import console_of_bench

    console = console_of_bench()
    paths: list[Path] = []
    try:
        document = read_document(file)
        if document["benchmark"] == "losses":
            from bucketrank.bench.losses.loss_report import show_loss_bench, write_loss_bench
            from bucketrank.bench.losses.loss_results import LossBench

            losses = restore_bench(LossBench, document)
            show_loss_bench(losses, console)
            paths = [] if out is None else write_loss_bench(losses, out)
        else:
            require("timm", "torchvision", extra="detect")
            from bucketrank.bench.detectors.detector_report import show_detector_bench, write_detector_bench
            from bucketrank.bench.detectors.detector_results import DetectorBench

            detectors = restore_bench(DetectorBench, document)
            show_detector_bench(detectors, console)
            paths = [] if out is None else write_detector_bench(detectors, out)
    except BenchFileError as error:
        raise UsageError(f"bench results: {error}") from error
    for path in paths:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
