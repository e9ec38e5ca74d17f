"""Average precision by COCO and LVIS rules: detections become COCO results, which faster-coco-eval matches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed
from faster_coco_eval import COCO
from faster_coco_eval.core import mask as rle_codec
from faster_coco_eval.core.faster_eval_api import COCOeval_faster
from torch import Tensor

from bucketrank.data.annotations import Document, Split, classes, usable_polygons
from bucketrank.data.labels import encode_mask
from bucketrank.errors import DataError
from bucketrank.evaluation.metrics import (
    OVERLAP,
    CalibrationErrors,
    Curve,
    MatchedDetections,
    OptimalLRP,
    best_threshold,
)
from bucketrank.settings.choices import MASK_THRESHOLD

Record = dict[str, Any]
IouType = Literal["boxes", "masks"]

COCO_MAX_DETECTIONS = 100  # per image and class
LVIS_MAX_DETECTIONS = 300  # per image, over all classes
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


def coco_records(
    detections: Mapping[str, Tensor], *, image_id: int, categories: Sequence[int], masks: bool
) -> list[Record]:
    """Convert the detections of the image ``image_id`` to COCO results.

    ``detections`` has ``boxes`` (n, 4) as corners, ``labels`` (n,) from 1, ``scores`` (n,) and, if ``masks`` is true,
    ``masks`` (n, H, W) or (n, 1, H, W) of 0 and 1 or of probabilities. ``categories`` gives the category id of each
    label. A record has ``image_id``, ``category_id``, ``bbox`` (x, y, width, height), ``score`` and, with masks,
    ``segmentation`` as compressed RLE.
    """
    fields = ("boxes", "labels", "scores", "masks") if masks else ("boxes", "labels", "scores")
    missing = [name for name in fields if name not in detections]
    if missing:
        raise ValueError(f"Evaluator: expected detections with {', '.join(fields)}, got no {missing[0]}")
    lengths = {name: len(detections[name]) for name in fields}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"Evaluator: expected as many boxes as labels and scores, got {lengths} in image {image_id}")
    if not torch.isfinite(detections["boxes"]).all() or not torch.isfinite(detections["scores"]).all():
        raise DataError(
            f"Evaluator: expected finite boxes and scores, got NaN or infinity in image {image_id}; "
            "if the training diverged, lower schedule.lr or set schedule.clip"
        )
    corners = detections["boxes"].detach().double().cpu().reshape(-1, 4)
    boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1).tolist()
    labels, scores = detections["labels"].tolist(), detections["scores"].detach().double().tolist()
    if labels and not 1 <= min(labels) <= max(labels) <= len(categories):
        raise ValueError(
            f"Evaluator: expected labels from 1 to {len(categories)}, the number of categories, got {min(labels)} to "
            f"{max(labels)} in image {image_id}"
        )
    records: list[Record] = [
        {"image_id": image_id, "category_id": categories[label - 1], "bbox": box, "score": score}
        for box, label, score in zip(boxes, labels, scores, strict=True)
    ]
    if masks:
        for record, mask in zip(records, detections["masks"], strict=True):
            flat = mask.detach().reshape(mask.shape[-2:])
            binary = (flat >= MASK_THRESHOLD) if flat.is_floating_point() else flat.bool()
            record["segmentation"] = encode_mask(binary.cpu().numpy())
    return records


@dataclass(frozen=True)
class EvaluationResult:
    """AP and AR from 0 to 1; NaN where the data has no object of that class or size.

    ``metrics`` has AP, AP50, AP75, APs, APm, APl, AR1, AR10, AR100, ARs, ARm and ARl. For LVIS it also has APr, APc and
    APf, and AR300 instead of AR1, AR10 and AR100. ``per_class`` has the AP of each class by name.
    """

    metrics: dict[str, float]  # metrics by name
    per_class: dict[str, float]  # AP by class name
    lrp: OptimalLRP  # optimal LRP error with its parts

    @property
    def columns(self) -> dict[str, float]:
        """The metrics, and optimal LRP with its parts: oLRP, oLRP_loc, oLRP_fp, oLRP_fn."""
        return self.metrics | self.lrp.metrics()


class Evaluator:
    """Collects the detections in a split and computes AP and AR of boxes and, with ``masks``, of masks.

    ``annotations`` is a split, or the content of an annotation file. Every image of it counts, even if no detections
    were added for it; ``seen_only`` restricts the result to the images that were added. An image that is added twice,
    for example by a distributed sampler that fills the last batch, counts once. A detection on a crowd counts neither
    as right nor as wrong.

    The rules are those of COCO by default. ``style="lvis"`` keeps the 300 highest-scoring detections per image and
    drops those without area. It counts a class only in the images that LVIS annotated for that class. With ``"auto"``,
    ``style`` is ``"lvis"`` if every category has a frequency, otherwise ``"coco"``.

    >>> annotation = {"id": 1, "image_id": 7, "category_id": 3, "bbox": [2, 2, 10, 10]}
    >>> document = {
    ...     "images": [{"id": 7, "width": 20, "height": 20}],
    ...     "categories": [{"id": 3, "name": "cat"}],
    ...     "annotations": [annotation],
    ... }
    >>> evaluator = Evaluator(document)
    >>> boxes = torch.tensor([[2.0, 2, 12, 12], [0, 0, 5, 5]])
    >>> labels, scores = torch.tensor([1, 1]), torch.tensor([0.2, 0.1])
    >>> evaluator.add([7], [{"boxes": boxes, "labels": labels, "scores": scores}])
    >>> round(evaluator.result().metrics["AP"], 4), evaluator.best_threshold()
    (1.0, 0.15...)
    """

    def __init__(
        self, annotations: Split | Document, *, masks: bool = False, style: Literal["auto", "coco", "lvis"] = "coco"
    ) -> None:
        document = annotations.read() if isinstance(annotations, Split) else annotations
        self.masks = masks
        self.categories = [number for number, _ in classes(document)]
        self._label_of = {category_id: label for label, category_id in enumerate(self.categories, start=1)}
        with_frequencies = all("frequency" in category for category in document["categories"])
        self.style = ("lvis" if with_frequencies else "coco") if style == "auto" else style
        if style == "lvis" and not with_frequencies:
            raise ValueError("Evaluator: expected the frequency of every category for style='lvis'; use style='coco'")
        self._document = document
        self._image_ids = {image["id"] for image in document["images"]}
        self._records: dict[int, list[Record]] = {}  # image id: detections

    def add(self, image_ids: Sequence[int] | Tensor, detections: Sequence[Mapping[str, Tensor]]) -> None:
        """Add the detections in some images, as torchvision detectors return them: boxes, labels, scores, masks."""
        for image_id, each in zip(map(int, image_ids), detections, strict=True):
            if image_id not in self._image_ids:
                raise ValueError(f"Evaluator: expected ids of images in the annotations, got {image_id}")
            records = coco_records(each, image_id=image_id, categories=self.categories, masks=self.masks)
            if self.style == "lvis":
                records = sorted(records, key=lambda record: -record["score"])[:LVIS_MAX_DETECTIONS]
            self._records[image_id] = records

    def add_records(self, records: Iterable[Record]) -> None:
        """Add detections as COCO results, as :attr:`detections` returns them."""
        for record in records:
            if record["image_id"] not in self._image_ids:
                raise ValueError(f"Evaluator: expected ids of images in the annotations, got {record['image_id']}")
            self._records.setdefault(record["image_id"], []).append(record)

    def gather(self) -> None:
        """Give every process the detections of all processes; do nothing outside distributed training.

        An image that several processes have counts once.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parts: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, self._records)
            for part in parts:
                self._records |= part

    def reset(self) -> None:
        """Remove all detections."""
        self._records = {}

    @property
    def image_ids(self) -> set[int]:
        """The ids of all images in the split."""
        return set(self._image_ids)

    def objects(self) -> list[tuple[int, int]]:
        """List the image id and the label, from 1, of every object except crowds."""
        entries = [entry for entry in self._document["annotations"] if not entry.get("iscrowd")]
        return [(entry["image_id"], self._label_of[entry["category_id"]]) for entry in entries]

    @property
    def detections(self) -> list[Record]:
        """All detections as COCO results, ready for JSON, in ascending order of image ids."""
        return [record for image_id in sorted(self._records) for record in self._records[image_id]]

    def result(self, iou_type: IouType = "boxes", *, seen_only: bool = False) -> EvaluationResult:
        """Compute AP and AR of boxes or masks."""
        evaluation = self._evaluation(iou_type, seen_only=seen_only)
        if self.style == "lvis":
            evaluation.params.maxDets = [LVIS_MAX_DETECTIONS]
        evaluation.run()
        if self.style == "lvis":
            stats = evaluation.stats_as_dict
            metrics = {name: _or_nan(stats[lvis_name]) for lvis_name, name in LVIS_NAMES.items()}
        else:
            metrics = {name: _or_nan(each) for name, each in zip(COCO_NAMES, evaluation.stats, strict=True)}
        # Axes: IoU thresholds, recalls, classes, ranges of area, numbers of detections.
        precision = np.asarray(evaluation.eval["precision"])[:, :, :, 0, -1]
        names = {category["id"]: category["name"] for category in self._document["categories"]}
        per_class = {}
        for position, category_id in enumerate(self.categories):
            values = precision[:, :, position]
            per_class[names[category_id]] = float(values[values > -1].mean()) if (values > -1).any() else math.nan
        return EvaluationResult(metrics, per_class, OptimalLRP.of(self.matched(iou_type, seen_only=seen_only)))

    def metrics(self) -> dict[str, float]:
        """Compute all metrics in one dict for logging: ``boxes/AP``, ... and, with masks, ``masks/AP``, ..."""
        iou_types: tuple[IouType, ...] = ("boxes", "masks") if self.masks else ("boxes",)
        columns = {iou_type: self.result(iou_type).columns for iou_type in iou_types}
        return {f"{iou_type}/{name}": value for iou_type, each in columns.items() for name, value in each.items()}

    def precision_recall(self, iou_type: IouType = "boxes", *, iou: float = 0.5, seen_only: bool = False) -> Curve:
        """Compute precision and recall by score over all classes together, with detections matched at ``iou``."""
        return self.matched(iou_type, iou=iou, seen_only=seen_only).curve

    def matched(
        self, iou_type: IouType = "boxes", *, iou: float = 0.5, seen_only: bool = False, limited: bool = False
    ) -> MatchedDetections:
        """Match detections to objects of their class with at least ``iou``, by the COCO rule.

        With ``limited``, only the detections that AP counts remain: by COCO rules, the top 100 per image and class.
        """
        evaluation = self._evaluation(iou_type, seen_only=seen_only)
        evaluation.params.iouThrs = np.asarray([iou])
        evaluation.params.areaRng = evaluation.params.areaRng[:1]
        evaluation.params.areaRngLbl = evaluation.params.areaRngLbl[:1]
        evaluation.params.maxDets = [max((len(records) for records in self._records.values()), default=1)]
        evaluation.evaluate()
        evaluation.accumulate()
        annotations, detections = evaluation.cocoGt.anns, evaluation.cocoDt.anns  # id: entry
        ious: dict[int, float] = {}  # detection id: IoU with the matched object
        on_crowds = set()
        for pair, overlap in evaluation.eval["matched"].items():
            detection_id, annotation_id = map(int, pair.split("_"))
            if annotations[annotation_id]["iscrowd"]:
                on_crowds.add(detection_id)
            else:
                ious[detection_id] = float(overlap)
        counted = [detection_id for detection_id in detections if detection_id not in on_crowds]
        if limited and self.style == "coco":
            kept = _top_ids_per_class(detections)
            counted = [detection_id for detection_id in counted if detection_id in kept]
        objects = [self._label_of[entry["category_id"]] for entry in annotations.values() if not entry["iscrowd"]]
        return MatchedDetections(
            scores=np.asarray([detections[each]["score"] for each in counted], dtype=np.float64),
            labels=np.asarray([self._label_of[detections[each]["category_id"]] for each in counted], dtype=np.int64),
            ious=np.asarray([ious.get(each, 0.0) for each in counted], dtype=np.float64),
            right=np.asarray([each in ious for each in counted], dtype=bool),
            numbers=np.asarray([detections[each]["number"] for each in counted], dtype=np.int64),
            objects=np.bincount(np.asarray(objects, dtype=np.int64) - 1, minlength=len(self.categories)),
        )

    def calibration_errors(self, *, seen_only: bool = False) -> CalibrationErrors:
        """Compute the calibration errors of the boxes: D-ECE at an IoU of 0.5, and LaECE_0."""
        matched, overlapping = (self.matched(iou=iou, seen_only=seen_only) for iou in (0.5, OVERLAP))
        return CalibrationErrors.of(matched, overlapping)

    def best_threshold(self, iou_type: IouType = "boxes", *, iou: float = 0.5, seen_only: bool = False) -> float:
        """Return the minimum score to report: :func:`~bucketrank.evaluation.best_threshold` of all detections."""
        return best_threshold(self.precision_recall(iou_type, iou=iou, seen_only=seen_only))

    def _evaluation(self, iou_type: IouType, *, seen_only: bool) -> Any:
        if iou_type == "masks" and not self.masks:
            raise ValueError("Evaluator: expected masks=True for iou_type='masks', got masks=False")
        image_ids = set(self._records) if seen_only else self._image_ids
        document = ground_truth_document(self._document, image_ids=image_ids, masks=iou_type == "masks")
        records = [{**record, "number": number} for number, record in enumerate(self.detections)]
        if self.style == "lvis":
            records = counted_by_lvis(document, records, iou_type)
        left_out = "segmentation" if iou_type == "boxes" else "bbox"  # given a bbox, loadRes would use its area
        records = [{name: each for name, each in record.items() if name != left_out} for record in records]
        ground_truth = COCO(document)
        return COCOeval_faster(
            ground_truth,
            ground_truth.loadRes(records),
            {"boxes": "bbox", "masks": "segm"}[iou_type],
            print_function=lambda *_: None,
            lvis_style=self.style == "lvis",
        )


def ground_truth_document(document: Document, *, image_ids: Set[int], masks: bool) -> Document:
    """Copy a document with only these images, annotation ids from 1, and an area for every annotation.

    faster-coco-eval writes into the document, and reads an id of 0 as "not matched".
    """
    annotations = []
    for number, entry in enumerate(document["annotations"], start=1):
        if entry["image_id"] not in image_ids:
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
        "images": [dict(image) for image in document["images"] if image["id"] in image_ids],
        "categories": [dict(category) for category in document["categories"]],
        "annotations": annotations,
    }


def counted_by_lvis(document: Document, records: Sequence[Record], iou_type: IouType) -> list[Record]:
    """Keep the detections that LVIS counts: those with an area, of classes that were annotated in their image.

    A class was annotated in an image if it has an object there or is listed in ``neg_category_ids``. Objects without
    area are removed from ``document`` first, so that they do not make their class count.
    """
    document["annotations"] = [entry for entry in document["annotations"] if entry["area"] > 0]
    annotated = {image["id"]: set(image.get("neg_category_ids", ())) for image in document["images"]}
    for entry in document["annotations"]:
        annotated[entry["image_id"]].add(entry["category_id"])
    return [
        record
        for record in records
        if record["category_id"] in annotated[record["image_id"]] and _area(record, iou_type) > 0
    ]


def _top_ids_per_class(detections: Mapping[int, Record]) -> set[int]:
    """Select the ids of the top COCO_MAX_DETECTIONS detections per image and class."""
    by_class: dict[tuple[int, int], list[int]] = {}
    for detection_id in sorted(detections, key=lambda each: -detections[each]["score"]):
        record = detections[detection_id]
        by_class.setdefault((record["image_id"], record["category_id"]), []).append(detection_id)
    return {detection_id for own in by_class.values() for detection_id in own[:COCO_MAX_DETECTIONS]}


def _area(record: Record, iou_type: IouType) -> float:
    _, _, width, height = record["bbox"]
    return width * height if iou_type == "boxes" else float(rle_codec.area(record["segmentation"]))


def _or_nan(value: float) -> float:
    return float(value) if value > -1 else math.nan
