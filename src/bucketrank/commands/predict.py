"""``bucketrank predict``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from bucketrank.arguments import UsageError, require, require_device


def predict(
    weights: Annotated[Path, "weights file, folder of a run or of save_pretrained, or owner/name on the hub"],
    images: Annotated[list[Path], "image files, or folders that are searched recursively"],
    *,
    out: Annotated[Path, "folder for the drawn images and predictions.json"] = Path("predictions"),
    threshold: Annotated[
        float | None, "minimum score to report (default: the threshold stored with the weights)"
    ] = None,
    device: Annotated[str, "a torch device, like cpu or cuda:0; auto is cuda if available"] = "auto",
    batch: Annotated[int, "images per batch"] = 1,
) -> int:
    """Detect objects in images: draw them and write them as JSON (exit status 1 if an image was skipped)."""
    require("rich", "PIL", "torchvision", "safetensors", "matplotlib", extra="detect")
    from bucketrank.inference.prediction import predict_files

    if batch < 1:
        raise UsageError(f"predict: --batch: expected at least 1, got {batch}")
    if threshold is not None and not math.isfinite(threshold):
        raise UsageError(f"predict: --threshold: expected a finite number, got {threshold}; scores are from 0 to 1")
    require_device("predict", device)
    return int(predict_files(weights, images, out, threshold=threshold, device=device, batch_size=batch) > 0)
