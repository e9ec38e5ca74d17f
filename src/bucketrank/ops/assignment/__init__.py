"""Which object each anchor should find.

Every assigner returns an int64 tensor (A,): for each anchor the index of its object, ``NEGATIVE`` or ``IGNORED``. All
work on one image, on any device, without gradients.
"""

from bucketrank.ops.assignment.atss import assign_atss
from bucketrank.ops.assignment.checks import IGNORED, NEGATIVE
from bucketrank.ops.assignment.hungarian import assign_hungarian
from bucketrank.ops.assignment.max_iou import assign_max_iou
from bucketrank.ops.assignment.paa import assign_paa

__all__ = ["IGNORED", "NEGATIVE", "assign_atss", "assign_hungarian", "assign_max_iou", "assign_paa"]
