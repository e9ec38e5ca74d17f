"""Assignment of objects to anchors, proposals or queries.

Every assigner returns int64 tensors with the object index of each anchor, ``NEGATIVE`` or ``IGNORED``. All work on any
device, without gradients. ``assign_max_iou`` takes one image, ``assign_paa`` one image or a batch, the others a batch.
"""

from bucketrank.detectors.assignment.atss import assign_atss
from bucketrank.detectors.assignment.checks import IGNORED, NEGATIVE
from bucketrank.detectors.assignment.hungarian import assign_hungarian
from bucketrank.detectors.assignment.max_iou import assign_max_iou
from bucketrank.detectors.assignment.paa import assign_paa

__all__ = [
    "IGNORED",
    "NEGATIVE",
    "assign_atss",
    "assign_hungarian",
    "assign_max_iou",
    "assign_paa",
]
