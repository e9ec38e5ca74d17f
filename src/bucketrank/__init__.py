"""Ranking-based losses for object detection, exact for every delta, at the price of focal loss on a CPU."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketrank.evaluation.calibration import calibrate as calibrate
    from bucketrank.inference.hub import from_pretrained as from_pretrained
    from bucketrank.losses import *

try:
    __version__ = version("bucketrank")
except PackageNotFoundError:  # a checkout on the path that is not installed
    __version__ = "0+unknown"

__all__ = [
    "ALRPLoss",
    "ALRPTerms",
    "APLoss",
    "DRLoss",
    "IoUAwareBCELoss",
    "MALLoss",
    "QualityFocalLoss",
    "RankSortLoss",
    "RankSortTerms",
    "SoftBCELoss",
    "VarifocalLoss",
    "alrp_loss",
    "ap_loss",
    "dr_loss",
    "iou_aware_bce_loss",
    "mal_loss",
    "quality_focal_loss",
    "rank_sort_loss",
    "self_balance",
    "soft_bce_loss",
    "use_backend",
    "varifocal_loss",
]

HOMES = {  # of names that are not in __all__, because they need more than torch
    "calibrate": "bucketrank.evaluation.calibration",
    "from_pretrained": "bucketrank.inference",
}


def __getattr__(name: str) -> Any:
    # The losses are imported when first used: torch takes seconds to import, and the command line's help needs none.
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    if name in __all__:
        return getattr(import_module("bucketrank.losses"), name)
    raise AttributeError(f"module 'bucketrank' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
