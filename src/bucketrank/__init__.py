"""Ranking-based losses for object detection, exact for every delta, at the price of focal loss."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketrank.losses import (
        ALRPLoss,
        ALRPTerms,
        APLoss,
        DRLoss,
        RankSortLoss,
        RankSortTerms,
        alrp_loss,
        ap_loss,
        dr_loss,
        rank_sort_loss,
        self_balance,
        use_backend,
    )

__version__ = version("bucketrank")

__all__ = [
    "ALRPLoss",
    "ALRPTerms",
    "APLoss",
    "DRLoss",
    "RankSortLoss",
    "RankSortTerms",
    "alrp_loss",
    "ap_loss",
    "dr_loss",
    "rank_sort_loss",
    "self_balance",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    # Torch takes seconds to import; the command line's help should not.
    if name in __all__:
        return getattr(import_module("bucketrank.losses"), name)
    raise AttributeError(f"module 'bucketrank' has no attribute {name!r}")
