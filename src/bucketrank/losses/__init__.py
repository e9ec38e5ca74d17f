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

from bucketrank.losses import backend, dr, functional, modules, quality
from bucketrank.losses.backend import *
from bucketrank.losses.dr import *
from bucketrank.losses.functional import *
from bucketrank.losses.modules import *
from bucketrank.losses.quality import *

__all__ = [*backend.__all__, *dr.__all__, *functional.__all__, *modules.__all__, *quality.__all__]
