"""``bucketrank convert-weights``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bucketrank.arguments import UsageError, require, require_flag


def convert_weights(
    file: Annotated[Path, "checkpoint of MMDetection 2 or 3, .pth"],
    *,
    out: Annotated[Path, "model file to write"] = Path("model.safetensors"),
    detector: Annotated[str | None, "atss or paa, if neither the checkpoint nor its name tells"] = None,
    classes: Annotated[str | None, "class names in order, separated by commas, if the checkpoint has none"] = None,
    threshold: Annotated[float, "minimum score to report"] = 0.3,
    ema: Annotated[bool, "take the copies named ema_ instead of the weights"] = False,
) -> None:
    """Convert a published checkpoint to a model file that eval, predict, train --init, export and report take."""
    require("rich", "timm", "transformers", "safetensors", "faster_coco_eval", extra="detect")
    from rich.console import Console

    from bucketrank.weights.atomic import require_no_folder, require_no_input
    from bucketrank.weights.published import convert_published

    if not 0 <= threshold <= 1:
        raise UsageError(f"convert-weights: --threshold: expected a score from 0 to 1, got {threshold}")
    require_flag("convert-weights", "detector", detector, ("atss", "paa"))
    require_no_folder(out, "model.safetensors")
    require_no_input(out, [file])
    names = None if classes is None else [name.strip() for name in classes.split(",")]
    converted = convert_published(file, out, detector=detector, classes=names, threshold=threshold, ema=ema)
    Console().print(f"{out}: {converted}", soft_wrap=True, markup=False, highlight=False)
