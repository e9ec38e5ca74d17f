"""AP and AR of detections, computed by pycocotools."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

NAMES = ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl"]


def pycocotools(document: dict[str, Any], detections: list[dict[str, Any]], iou_type: str) -> dict[str, float]:
    """Return the twelve metrics and the AP of each class by name; NaN where pycocotools returns -1."""
    left_out = {"boxes": "segmentation", "masks": "bbox"}[iou_type]
    records = [{name: copy.deepcopy(each[name]) for name in each if name != left_out} for each in detections]
    with contextlib.redirect_stdout(io.StringIO()):
        ground_truth = COCO()
        ground_truth.dataset = copy.deepcopy(document)
        ground_truth.createIndex()
        evaluation = COCOeval(ground_truth, ground_truth.loadRes(records), {"boxes": "bbox", "masks": "segm"}[iou_type])
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    numbers = dict(zip(NAMES, evaluation.stats, strict=True))
    for position, category in enumerate(ground_truth.loadCats(sorted(ground_truth.getCatIds()))):
        precision = evaluation.eval["precision"][:, :, position, 0, -1]
        numbers[category["name"]] = np.mean(precision[precision > -1]) if (precision > -1).any() else -1
    return {name: float(value) if value > -1 else float("nan") for name, value in numbers.items()}
