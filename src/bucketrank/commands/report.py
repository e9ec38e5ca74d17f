"""``bucketrank report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bucketrank.arguments import UsageError, require, require_device


def report(
    runs: Annotated[list[Path], "run folders, as train writes them"],
    *,
    out: Annotated[Path, "the page to write"] = Path("report.html"),
    data: Annotated[Path | None, "folder of the data set (default: the one each run was trained on)"] = None,
    images: Annotated[int, "number of best and of worst images to show"] = 6,
    most: Annotated[int | None, "evaluate only the first N images"] = None,
    device: Annotated[str, "a torch device, like cpu or cuda:0; auto is cuda if available"] = "auto",
) -> None:
    """Write one page about runs: curves, AP, precision and recall, best and worst images, ranked lists."""
    require("rich", "PIL", "faster_coco_eval", "yaml", "timm", "matplotlib", extra="detect")
    from bucketrank.report.page import write_report

    if images < 1:
        raise UsageError(f"report: --images: expected at least 1, got {images}")
    if most is not None and most < 1:
        raise UsageError(f"report: --most: expected at least 1, got {most}")
    require_device("report", device)
    write_report(runs, out, data=data, images=images, max_images=most, device=device)
