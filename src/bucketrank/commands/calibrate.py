"""``bucketrank calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from bucketrank.arguments import UsageError, require, require_device, require_flag
from bucketrank.suggestions import printable


def calibrate(
    weights: Annotated[Path, "weights.safetensors of a run"],
    data: Annotated[Path, "folder of the data set"],
    *,
    out: Annotated[Path | None, "the file to write (default: replace WEIGHTS)"] = None,
    split: Annotated[str, "images to fit on: train or val"] = "train",
    layout: Annotated[str | None, "own, coco, lvis or roboflow (default: the first that fits)"] = None,
    target: Annotated[
        Literal["match", "iou"], "match: probability of an IoU of at least 0.5; iou: expected IoU"
    ] = "match",
    per_class: Annotated[bool, "fit each class on its own"] = False,
    method: Annotated[
        Literal["platt", "temperature"], "platt for sigmoid scores; temperature for a softmax, may change the order"
    ] = "platt",
    most: Annotated[int, "maximum number of images"] = 500,
    device: Annotated[str, "a torch device, like cpu or cuda:0; auto is cuda if available"] = "auto",
) -> None:
    """Turn the scores of a detector into probabilities, without changing their order or AP."""
    require("rich", "PIL", "faster_coco_eval", "yaml", "timm", extra="detect")
    from rich.console import Console

    from bucketrank.data.annotations import LAYOUTS
    from bucketrank.inference.evaluation import calibrate_weights

    if most < 1:
        raise UsageError(f"calibrate: --most: expected at least 1, got {most}")
    if per_class and method == "temperature":
        raise UsageError("calibrate: --per-class: expected --method platt, got temperature, which classes share")
    require_flag("calibrate", "split", split, ("train", "val"))
    require_flag("calibrate", "layout", layout, LAYOUTS)
    require_device("calibrate", device)
    calibration = calibrate_weights(
        weights,
        data,
        out,
        split=split,
        layout=layout,
        target=target,
        per_class=per_class,
        method=method,
        max_images=most,
        device=device,
    )
    lines = printable(f"{calibration}\nwrote {out or weights}")
    Console().print(lines, highlight=False, markup=False, soft_wrap=True)
