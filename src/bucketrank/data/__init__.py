"""Data sets in the formats of COCO, YOLO and Pascal VOC: find, check, convert, draw, read, augment and sample them."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.data.annotations import Split as Split
    from bucketrank.data.annotations import Splits as Splits
    from bucketrank.data.batches import GroupedBatchSampler as GroupedBatchSampler
    from bucketrank.data.batches import collate as collate
    from bucketrank.data.batches import repeat_factors as repeat_factors
    from bucketrank.data.checks import check as check
    from bucketrank.data.checks import require_sound as require_sound
    from bucketrank.data.coco import CocoDataset as CocoDataset
    from bucketrank.data.layouts import find_splits as find_splits
    from bucketrank.data.problems import Problem as Problem
    from bucketrank.data.shapes import Shapes as Shapes
    from bucketrank.data.shapes import write_shapes as write_shapes
    from bucketrank.data.transforms import eval_transform as eval_transform
    from bucketrank.data.transforms import train_transform as train_transform
    from bucketrank.errors import DataError as DataError

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.data.annotations": "Split Splits",
        "bucketrank.data.batches": "GroupedBatchSampler collate repeat_factors",
        "bucketrank.data.checks": "check require_sound",
        "bucketrank.data.coco": "CocoDataset",
        "bucketrank.data.layouts": "find_splits",
        "bucketrank.data.problems": "Problem",
        "bucketrank.data.shapes": "Shapes write_shapes",
        "bucketrank.data.transforms": "eval_transform train_transform",
        "bucketrank.errors": "DataError",
    },
)
