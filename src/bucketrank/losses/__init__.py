"""Ranking-based losses: the functions, the modules, self-balancing, and the choice of backend."""

from bucketrank.losses.backend import use_backend
from bucketrank.losses.balance import self_balance
from bucketrank.losses.dr import dr_loss
from bucketrank.losses.functional import ALRPTerms, RankSortTerms, alrp_loss, ap_loss, rank_sort_loss
from bucketrank.losses.modules import ALRPLoss, APLoss, DRLoss, RankSortLoss

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
