"""``bucketrank eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bucketrank.arguments import UsageError, require, require_device, require_flag


def evaluate(
    weights: Annotated[Path, "weights file, folder of a run or of save_pretrained, or owner/name on the hub"],
    data: Annotated[Path, "folder of the data set"],
    *,
    split: Annotated[str, "val or train"] = "val",
    layout: Annotated[str | None, "own, coco, lvis or roboflow (default: the first that fits)"] = None,
    batch: Annotated[int, "images per batch"] = 1,
    workers: Annotated[int, "data-loading workers"] = 0,
    device: Annotated[str, "a torch device, like cpu or cuda:0; auto is cuda if available"] = "auto",
    most: Annotated[int | None, "evaluate only the first N images"] = None,
    detections: Annotated[Path | None, "file for the detections, in COCO's result format"] = None,
    given_boxes: Annotated[bool, "Mask R-CNN: also evaluate its masks in the ground-truth boxes"] = False,
) -> None:
    """Evaluate a trained detector on a data set: AP by COCO's or LVIS's rules."""
    require("rich", "PIL", "faster_coco_eval", "yaml", "timm", extra="detect")
    from rich.console import Console

    from bucketrank.data.annotations import LAYOUTS
    from bucketrank.inference.evaluation import evaluate, print_evaluation

    if batch < 1:
        raise UsageError(f"eval: --batch: expected at least 1, got {batch}")
    if workers < 0:
        raise UsageError(f"eval: --workers: expected at least 0, got {workers}")
    if most is not None and most < 1:
        raise UsageError(f"eval: --most: expected at least 1, got {most}")
    require_flag("eval", "split", split, ("val", "train"))
    require_flag("eval", "layout", layout, LAYOUTS)
    require_device("eval", device)
    evaluation = evaluate(
        weights,
        data,
        split=split,
        layout=layout,
        batch_size=batch,
        workers=workers,
        device=device,
        max_images=most,
        detections=detections,
        given_boxes=given_boxes,
    )
    print_evaluation(Console(), evaluation)
