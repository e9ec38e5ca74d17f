"""``bucketrank split``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from bucketrank.arguments import UsageError, require, require_flag


def split(
    source: Annotated[Path, "folder of the data set; its training and validation images are joined first"],
    destination: Annotated[Path, "new folder with train.json, val.json and images"],
    *,
    val: Annotated[float, "share of the images for validation"] = 0.2,
    seed: Annotated[int, "seed of the division"] = 0,
    layout: Annotated[str | None, "own, coco or roboflow (default: the first that fits)"] = None,
    copy: Annotated[bool, "copy the images instead of linking to them"] = False,
) -> None:
    """Divide a data set into training and validation images anew, so that every class keeps its share in both."""
    require("rich", "PIL", "faster_coco_eval", extra="detect")
    from bucketrank.data.annotations import LAYOUTS
    from bucketrank.data.split import resplit as write_new_split
    from bucketrank.data.summary import convert_folder

    if not 0 < val < 1:
        raise UsageError(f"split: --val: expected a share above 0 and below 1, got {val:g}")
    require_flag("split", "layout", layout, LAYOUTS)
    convert_folder(partial(write_new_split, val=val, seed=seed, layout=layout), source, destination, copy=copy)
