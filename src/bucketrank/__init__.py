"""Ranking-based losses for object detection, exact for every delta, at the price of focal loss on a CPU."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.api import load as load
    from bucketrank.api import train as train
    from bucketrank.evaluation.calibration import calibrate as calibrate
    from bucketrank.evaluation.calibration import calibrate_scores as calibrate_scores
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
# The losses are imported on first use because torch takes seconds to load. The other names need more than torch, so
# they are not in __all__.
_lazy, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.losses": " ".join(__all__),
        "bucketrank.api": "load train",
        "bucketrank.evaluation.calibration": "calibrate calibrate_scores",
        "bucketrank.inference": "from_pretrained",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *_lazy})
