"""Data sets in COCO's format: found, checked, converted, drawn, read, augmented and sampled.

Names are imported when they are asked for: checking or converting a folder does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketrank.data.annotations import Split
    from bucketrank.data.checking import check, require_sound
    from bucketrank.data.coco import CocoDataset
    from bucketrank.data.folder import Splits, find_splits
    from bucketrank.data.problems import DataError, Problem
    from bucketrank.data.sampling import GroupedBatchSampler, collate, repeat_factors
    from bucketrank.data.shapes import Shapes, write_shapes
    from bucketrank.data.transforms import eval_transform, train_transform

_HOME = {
    "CocoDataset": "coco",
    "DataError": "problems",
    "GroupedBatchSampler": "sampling",
    "Problem": "problems",
    "Shapes": "shapes",
    "Split": "annotations",
    "Splits": "folder",
    "check": "checking",
    "collate": "sampling",
    "eval_transform": "transforms",
    "find_splits": "folder",
    "repeat_factors": "sampling",
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
    if name in _HOME:
        return getattr(import_module(f"bucketrank.data.{_HOME[name]}"), name)
    raise AttributeError(f"module 'bucketrank.data' has no attribute {name!r}")
