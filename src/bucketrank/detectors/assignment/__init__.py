"""Assignment of objects to anchors, proposals or queries.

Every assigner returns an int64 tensor (A,): for each anchor the index of its object, ``NEGATIVE`` or ``IGNORED``. All
work on any device, without gradients, and on one image; ``assign_atss_batch``, ``assign_hungarian_batch`` and
``assign_paa`` also on a batch.
"""

from bucketrank.detectors.assignment.atss import assign_atss, assign_atss_batch
from bucketrank.detectors.assignment.checks import IGNORED, NEGATIVE
from bucketrank.detectors.assignment.hungarian import assign_hungarian, assign_hungarian_batch
from bucketrank.detectors.assignment.max_iou import assign_max_iou
from bucketrank.detectors.assignment.paa import assign_paa

__all__ = [
    "IGNORED",
    "NEGATIVE",
    "assign_atss",
    "assign_atss_batch",
    "assign_hungarian",
    "assign_hungarian_batch",
    "assign_max_iou",
    "assign_paa",
]
