"""``bucketrank export``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from bucketrank.arguments import UsageError, require
from bucketrank.data.problems import DataError
from bucketrank.suggestions import printable


def export(
    weights: Annotated[Path, "weights file, folder of a run or of save_pretrained, or owner/name on the hub"],
    *,
    out: Annotated[Path, "the file to write"] = Path("model.onnx"),
    size: Annotated[
        str | None, "HEIGHTxWIDTH of the images it will get (default: that of --image, or a square of min_size)"
    ] = None,
    image: Annotated[Path | None, "image for the comparison with torch (default: drawn shapes)"] = None,
) -> None:
    """Export a detector to ONNX and verify that onnxruntime matches torch."""
    require("onnx", "onnxruntime", extra="export")
    from bucketrank.catalogue.model_settings import MAX_PIXELS
    from bucketrank.inference.onnx import ExportError, export_weights

    try:
        sides = None if size is None else tuple(int(side) for side in size.lower().split("x"))
    except ValueError:
        sides = ()
    if sides is not None and (len(sides) != 2 or min(sides) < 1):
        raise UsageError(f"export: --size: expected HEIGHTxWIDTH like 480x640, got {size!r}")
    if sides is not None and sides[0] * sides[1] > MAX_PIXELS:
        raise UsageError(f"export: --size: expected at most {MAX_PIXELS:,} pixels, got {size!r}; choose a smaller size")
    try:
        agreement = export_weights(weights, out, size=sides, image=image)
    except ExportError as error:
        raise DataError(f"export: {error}") from error
    sys.stdout.write(f"{agreement}\nwrote {printable(out)}\n")
