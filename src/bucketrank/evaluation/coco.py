"""Average precision by COCO's and LVIS's rules; the matching is done by faster-coco-eval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch.distributed
from faster_coco_eval import COCO
from faster_coco_eval.core import mask as rle_codec
from faster_coco_eval.core.faster_eval_api import COCOeval_faster
from torch import Tensor

from bucketrank.data.annotations import Document, Split, category_ids, usable_polygons
from bucketrank.evaluation.detections import Record, best, records
from bucketrank.evaluation.threshold import Curve, best_threshold

Kind = Literal["boxes", "masks"]

LVIS_MOST = 300  # detections of an image, over all classes
COCO_NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
LVIS_NAMES = {
    "AP_all": "AP",
    "AP_50": "AP50",
    "AP_75": "AP75",
    "AP_small": "APs",
    "AP_medium": "APm",
    "AP_large": "APl",
    "APr": "APr",
    "APc": "APc",
    "APf": "APf",
    "AR_all": "AR300",
    "AR_small": "ARs",
    "AR_medium": "ARm",
    "AR_large": "ARl",
}


@dataclass(frozen=True)
class Result:
    """The numbers, from 0 to 1; NaN where there is nothing to find (no such object in the data).

    ``metrics`` has AP, AP50, AP75, APs, APm, APl, AR1, AR10, AR100, ARs, ARm and ARl; of LVIS APr, APc and APf as well,
    and AR300 in place of the three. ``per_class`` has the AP of each class.
    """

    metrics: dict[str, float]
    per_class: dict[str, float]


class Evaluator:
    """Collects the detections of a split and measures them.

    Every image of the split counts, also one that was never added; ``seen_only`` restricts the result to those that
    were. An image that is added twice, as when a distributed sampler fills up the last batch, counts once. Crowds
    excuse the detections on them.

    ``style="lvis"`` keeps the best 300 detections of an image, and reads which classes were looked for in which image;
    of the 300, those without area are left out. ``style="auto"`` is ``"lvis"`` if every category has a frequency.

    >>> document = {
    ...     "images": [{"id": 7, "width": 20, "height": 20}],
    ...     "categories": [{"id": 3, "name": "cat"}],
    ...     "annotations": [{"id": 1, "image_id": 7, "category_id": 3, "bbox": [2, 2, 10, 10]}],
    ... }
    >>> evaluator = Evaluator(document)
    >>> found = {"boxes": [[2.0, 2, 12, 12], [0, 0, 5, 5]], "labels": [1, 1], "scores": [0.2, 0.1]}
    >>> evaluator.add([7], [{name: torch.tensor(values) for name, values in found.items()}])
    >>> round(evaluator.result().metrics["AP"], 4), evaluator.best_threshold()
    (1.0, 0.15...)
    """

    def __init__(
        self, annotations: Split | Document, *, masks: bool = False, style: Literal["auto", "coco", "lvis"] = "coco"
    ) -> None:
        document = annotations.read() if isinstance(annotations, Split) else annotations
        self.masks = masks
        self.categories = category_ids(document)
        with_frequencies = all("frequency" in category for category in document["categories"])
        self.style = ("lvis" if with_frequencies else "coco") if style == "auto" else style
        if style == "lvis" and not with_frequencies:
            raise ValueError("Evaluator: expected the frequency of every category for style='lvis'; use style='coco'")
        self._document = document
        self._images = {image["id"] for image in document["images"]}
        self._found: dict[int, list[Record]] = {}

    def add(self, image_ids: Sequence[int] | Tensor, detections: Sequence[Mapping[str, Tensor]]) -> None:
        """Detections of some images, as torchvision's detectors return them: boxes, labels, scores and masks."""
        for image_id, each in zip(map(int, image_ids), detections, strict=True):
            if image_id not in self._images:
                raise ValueError(f"Evaluator: image {image_id} is not in the annotations that are evaluated against")
            found = records(each, image_id=image_id, categories=self.categories, masks=self.masks)
            self._found[image_id] = best(found, LVIS_MOST) if self.style == "lvis" else found

    def merge(self, other: Evaluator) -> None:
        """Add what another process has found; images that both have are taken once."""
        self._found |= other._found

    def gather(self) -> None:
        """In distributed training: give every process the detections of all; otherwise nothing."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parts: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, self._found)
            for part in parts:
                self._found |= part

    def reset(self) -> None:
        """Forget all detections."""
        self._found = {}

    @property
    def detections(self) -> list[Record]:
        """COCO's result format, ready for JSON, in ascending order of the images' ids."""
        return [record for image_id in sorted(self._found) for record in self._found[image_id]]

    def result(self, kind: Kind = "boxes", *, seen_only: bool = False) -> Result:
        """AP and AR of boxes or masks."""
        evaluation = self._evaluation(kind, seen_only=seen_only)
        if self.style == "lvis":
            evaluation.params.maxDets = [LVIS_MOST]
        evaluation.run()
        if self.style == "lvis":
            stats = evaluation.stats_as_dict
            metrics = {name: _or_nan(stats[theirs]) for theirs, name in LVIS_NAMES.items()}
        else:
            metrics = {name: _or_nan(each) for name, each in zip(COCO_NAMES, evaluation.stats, strict=True)}
        # Its axes: IoU thresholds, recalls, classes, ranges of area, numbers of detections.
        precision = np.asarray(evaluation.eval["precision"])[:, :, :, 0, -1]
        names = {category["id"]: category["name"] for category in self._document["categories"]}
        per_class = {}
        for position, number in enumerate(self.categories):
            values = precision[:, :, position]
            per_class[names[number]] = float(values[values > -1].mean()) if (values > -1).any() else math.nan
        return Result(metrics, per_class)

    def metrics(self, *, seen_only: bool = False) -> dict[str, float]:
        """All numbers in one dict for logging: ``boxes/AP`` ... and, with masks, ``masks/AP`` ..."""
        kinds: tuple[Kind, ...] = ("boxes", "masks") if self.masks else ("boxes",)
        each = {kind: self.result(kind, seen_only=seen_only).metrics for kind in kinds}
        return {f"{kind}/{name}": value for kind, numbers in each.items() for name, value in numbers.items()}

    def precision_recall(self, kind: Kind = "boxes", *, iou: float = 0.5, seen_only: bool = False) -> Curve:
        """Precision and recall over the score, of all classes together, as detections are matched at ``iou``."""
        evaluation = self._evaluation(kind, seen_only=seen_only)
        evaluation.params.iouThrs = np.asarray([iou])
        evaluation.params.areaRng = evaluation.params.areaRng[:1]
        evaluation.params.areaRngLbl = evaluation.params.areaRngLbl[:1]
        evaluation.params.maxDets = [max((len(found) for found in self._found.values()), default=1)]
        evaluation.evaluate()
        evaluation.accumulate()
        truth, found = evaluation.cocoGt.anns, evaluation.cocoDt.anns
        matched = {}  # a detection's id to whether it is of an object, not of a crowd
        for pair in evaluation.eval["matched"]:
            detection, annotation = map(int, pair.split("_"))
            matched[detection] = not truth[annotation]["iscrowd"]
        counted = [number for number in found if matched.get(number, True)]
        return Curve.of(
            scores=np.asarray([found[number]["score"] for number in counted], dtype=np.float64),
            right=np.asarray([number in matched for number in counted], dtype=bool),
            objects=sum(not entry["iscrowd"] for entry in truth.values()),
        )

    def best_threshold(self, kind: Kind = "boxes", *, iou: float = 0.5, seen_only: bool = False) -> float:
        """The score from which on detections are shown: that of the best F1 (see threshold.best_threshold)."""
        return best_threshold(self.precision_recall(kind, iou=iou, seen_only=seen_only))

    def _evaluation(self, kind: Kind, *, seen_only: bool) -> Any:
        if kind == "masks" and not self.masks:
            raise ValueError("Evaluator: expected masks=True for kind='masks', got masks=False")
        images = set(self._found) if seen_only else self._images
        document = ground_truth(self._document, images=images, masks=kind == "masks")
        records = judged_by_lvis(document, self.detections, kind) if self.style == "lvis" else self.detections
        truth = COCO(document)
        left_out = "segmentation" if kind == "boxes" else "bbox"  # COCO takes the area from the box, if there is one
        found = [{name: each for name, each in record.items() if name != left_out} for record in records]
        return COCOeval_faster(
            truth,
            truth.loadRes(found),
            {"boxes": "bbox", "masks": "segm"}[kind],
            print_function=lambda *_: None,
            lvis_style=self.style == "lvis",
        )


def ground_truth(document: Document, *, images: Set[int], masks: bool) -> Document:
    """A copy of some images for the evaluation, which writes into it: ids from 1, an area for every object.

    (An id of 0 would count as "not matched".)
    """
    annotations = []
    for number, entry in enumerate(document["annotations"], start=1):
        if entry["image_id"] not in images:
            continue
        copy = {name: entry[name] for name in ("image_id", "category_id", "bbox")}
        copy["id"] = number
        copy["iscrowd"] = int(entry.get("iscrowd", 0))
        copy["area"] = entry.get("area", entry["bbox"][2] * entry["bbox"][3])
        if masks:
            mask = entry.get("segmentation") or []
            copy["segmentation"] = usable_polygons(mask) if isinstance(mask, list) else mask
        annotations.append(copy)
    return {
        "images": [dict(image) for image in document["images"] if image["id"] in images],
        "categories": [dict(category) for category in document["categories"]],
        "annotations": annotations,
    }


def judged_by_lvis(document: Document, found: Sequence[Record], kind: Kind) -> list[Record]:
    """The detections that LVIS judges: of classes that were looked for in the image, and with an area.

    Objects without area leave the document; they would make their class one that was looked for.
    """
    document["annotations"] = [entry for entry in document["annotations"] if entry["area"] > 0]
    looked_for = {image["id"]: set(image.get("neg_category_ids", ())) for image in document["images"]}
    for entry in document["annotations"]:
        looked_for[entry["image_id"]].add(entry["category_id"])
    return [
        record
        for record in found
        if record["category_id"] in looked_for[record["image_id"]]
        and (record["bbox"][2] * record["bbox"][3] if kind == "boxes" else rle_codec.area(record["segmentation"])) > 0
    ]


def _or_nan(value: float) -> float:
    return float(value) if value > -1 else math.nan
