"""Ranking-based losses as functions and modules, self-balancing and the choice of backend.

From ``ap_loss`` to its gradient:

1. ``functional.py``: ``ap_loss`` checks and flattens its arguments and calls ``rank``. ``modules.py`` wraps it.
2. ``autograd.py``: ``rank`` connects the loss to autograd, for eager calls and for ``torch.compile``.
3. ``rankings.py`` compares the entries of each ranking and prepares the backward pass. ``backend.py`` chooses the class
   for the method, a ``Comparison`` (``comparison.py``). On a GPU the Triton kernels take all rankings at once and do
   the following steps themselves.
4. ``pairwise.py``, ``exact.py`` and ``fused.py`` (with ``kernels.py`` and ``sorting.py``) sum the smoothed step H over
   positives and negatives.
5. ``terms.py``: ``average_precision`` turns these sums into errors and gradients. The loss is the mean error.
6. The backward pass in ``rankings.py`` scales the gradients, and ``Comparison.spread`` writes them to all logits.

DR loss (``dr.py``) and the score-based rivals (``quality.py``) use ordinary autograd.
"""

from bucketrank.losses.backend import use_backend as use_backend
from bucketrank.losses.dr import dr_loss as dr_loss
from bucketrank.losses.functional import ALRPTerms as ALRPTerms
from bucketrank.losses.functional import RankSortTerms as RankSortTerms
from bucketrank.losses.functional import alrp_loss as alrp_loss
from bucketrank.losses.functional import ap_loss as ap_loss
from bucketrank.losses.functional import rank_sort_loss as rank_sort_loss
from bucketrank.losses.functional import self_balance as self_balance
from bucketrank.losses.modules import ALRPLoss as ALRPLoss
from bucketrank.losses.modules import APLoss as APLoss
from bucketrank.losses.modules import DRLoss as DRLoss
from bucketrank.losses.modules import RankSortLoss as RankSortLoss
from bucketrank.losses.quality import IoUAwareBCELoss as IoUAwareBCELoss
from bucketrank.losses.quality import MALLoss as MALLoss
from bucketrank.losses.quality import QualityFocalLoss as QualityFocalLoss
from bucketrank.losses.quality import SoftBCELoss as SoftBCELoss
from bucketrank.losses.quality import VarifocalLoss as VarifocalLoss
from bucketrank.losses.quality import iou_aware_bce_loss as iou_aware_bce_loss
from bucketrank.losses.quality import mal_loss as mal_loss
from bucketrank.losses.quality import quality_focal_loss as quality_focal_loss
from bucketrank.losses.quality import soft_bce_loss as soft_bce_loss
from bucketrank.losses.quality import varifocal_loss as varifocal_loss
