"""``bucketrank check-data``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bucketrank.arguments import UsageError, require, require_flag


def check_data(
    folder: Annotated[Path, "folder of the data set, in its own layout, COCO's, LVIS's or Roboflow's"],
    *,
    layout: Annotated[str | None, "own, coco, lvis or roboflow (default: the first that fits)"] = None,
    masks: Annotated[bool, "require a mask for every object"] = False,
    decode: Annotated[bool, "decode every image, not only its header"] = True,
    show: Annotated[int, "problems of each type to list"] = 10,
    workers: Annotated[int | None, "decoding threads (default: one per core)"] = None,
) -> int:
    """Check a whole data set and list every problem with its fix (exit status 1 if training would refuse the data)."""
    require("rich", "PIL", "faster_coco_eval", extra="detect")
    from bucketrank.data.annotations import LAYOUTS
    from bucketrank.data.summary import check_folder

    if workers is not None and workers < 1:
        raise UsageError(f"check-data: --workers: expected at least 1, got {workers}")
    require_flag("check-data", "layout", layout, LAYOUTS)
    return check_folder(folder, layout=layout, masks=masks, decode=decode, show=show, workers=workers)
