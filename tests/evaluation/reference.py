"""pycocotools on the same detections: the yardstick."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

NAMES = ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl"]


def pycocotools(document: dict[str, Any], detections: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """The twelve numbers and, by name, the AP of each class; NaN where pycocotools says -1."""
    left_out = {"boxes": "segmentation", "masks": "bbox"}[kind]
    found = [{name: copy.deepcopy(each[name]) for name in each if name != left_out} for each in detections]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = copy.deepcopy(document)
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(found), {"boxes": "bbox", "masks": "segm"}[kind])
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    numbers = dict(zip(NAMES, evaluation.stats, strict=True))
    for position, category in enumerate(truth.loadCats(sorted(truth.getCatIds()))):
        precision = evaluation.eval["precision"][:, :, position, 0, -1]
        numbers[category["name"]] = np.mean(precision[precision > -1]) if (precision > -1).any() else -1
    return {name: float(value) if value > -1 else float("nan") for name, value in numbers.items()}
