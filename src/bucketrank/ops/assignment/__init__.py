"""Assignment of objects to anchors, proposals or queries.

Every assigner returns an int64 tensor (A,): for each anchor the index of its object, ``NEGATIVE`` or ``IGNORED``. All
work on any device, without gradients, and on one image; ``assign_atss_batch``, ``assign_hungarian_batch`` and
``assign_paa`` also on a batch.
"""

from bucketrank.ops.assignment.assign_atss import assign_atss, assign_atss_batch
from bucketrank.ops.assignment.assign_hungarian import assign_hungarian, assign_hungarian_batch
from bucketrank.ops.assignment.assign_max_iou import assign_max_iou
from bucketrank.ops.assignment.assign_paa import assign_paa
from bucketrank.ops.assignment.checks import IGNORED, NEGATIVE

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
