"""Data sets in COCO's format: find, check, convert, draw, read, augment and sample them.

Names are imported on first use, so that checking or converting a folder does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketrank.data.annotations import Split
    from bucketrank.data.batch_sampling import GroupedBatchSampler, collate, repeat_factors
    from bucketrank.data.checking import check, require_sound
    from bucketrank.data.coco import CocoDataset
    from bucketrank.data.problems import DataError, Problem
    from bucketrank.data.shapes import Shapes, write_shapes
    from bucketrank.data.splits import Splits, find_splits
    from bucketrank.data.transforms import eval_transform, train_transform

_MODULES = {
    "CocoDataset": "coco",
    "DataError": "problems",
    "GroupedBatchSampler": "batch_sampling",
    "Problem": "problems",
    "Shapes": "shapes",
    "Split": "annotations",
    "Splits": "splits",
    "check": "checking",
    "collate": "batch_sampling",
    "eval_transform": "transforms",
    "find_splits": "splits",
    "repeat_factors": "batch_sampling",
    "require_sound": "checking",
    "train_transform": "transforms",
    "write_shapes": "shapes",
}

__all__ = [
    "CocoDataset",
    "DataError",
    "GroupedBatchSampler",
    "Problem",
    "Shapes",
    "Split",
    "Splits",
    "check",
    "collate",
    "eval_transform",
    "find_splits",
    "repeat_factors",
    "require_sound",
    "train_transform",
    "write_shapes",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"bucketrank.data.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'bucketrank.data' has no attribute {name!r}")
