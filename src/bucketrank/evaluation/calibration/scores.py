"""Calibrate the scores of anybody's detector, from its detections and the ground truth.

No detection library is imported: their outputs are told apart by their attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bucketrank.errors import CannotCalibrateError
from bucketrank.evaluation.calibration.fitting import FitSettings, Samples, collect, fitted, summary
from bucketrank.evaluation.calibration.mapping import Calibration, ScoreHead
from bucketrank.settings.choices import CalibrationTarget

KEYS = ("boxes", "labels", "scores")
# Where the libraries keep boxes, labels and scores: attributes of an output, or of its ``boxes``.
SUPERVISION = ("xyxy", "class_id", "confidence")  # also rfdetr
ULTRALYTICS = ("xyxy", "cls", "conf")


@torch.inference_mode(mode=False)  # the fit needs gradients
def calibrate_scores(
    detections: Iterable[Any],
    ground_truths: Iterable[Any],
    *,
    target: CalibrationTarget = "match",
    per_class: bool = False,
    num_classes: int | None = None,
    first_label: int = 0,
) -> Calibration:
    """Fit a map from the scores of any detector, trained with any loss, to probabilities.

    ``detections`` and ``ground_truths`` have one entry per image, in the same order. An entry is the output of
    torchvision, transformers (``post_process_object_detection``), rfdetr, supervision or Ultralytics, or a dict with
    ``boxes`` (n, 4) as corners, ``labels`` (n,) and, for detections, ``scores`` (n,); ground truth may have
    ``iscrowd``. Both need the same labels and pixels. Use held-out images, and keep low scores: a detector's minimum
    score should be close to 0.

    ``target`` is ``"match"``, the probability of a match at an IoU of 0.5, or ``"iou"``, the expected IoU.
    ``calibration(scores)`` then maps scores; with ``per_class``, which fits each class with enough detections
    separately, ``calibration(scores, labels)`` does. To fold that map into a layer, its pairs must be the layer's
    ``num_classes``, by default up to the highest label, from ``first_label`` on. ``calibration.save`` and
    ``Calibration.load`` keep it as JSON. Raises CannotCalibrateError if there is nothing to calibrate: too few right or
    wrong detections, or higher scores that are not right more often.
    """
    settings = FitSettings(target, per_class)
    detected, objects = [*map(as_detections, detections)], [*map(as_objects, ground_truths)]
    if len(detected) != len(objects):
        raise ValueError(
            f"calibrate_scores: expected ground truth for each of {len(detected)} images with detections, "
            f"got {len(objects)}; give an entry without boxes for an image without objects"
        )
    pairs = list(zip(detected, objects, strict=True))
    if num_classes is None:
        labels = torch.cat([each["labels"] for pair in pairs for each in pair]) if pairs else torch.zeros(0)
        num_classes = int(labels.max()) + 1 - first_label if len(labels) else 1
    if not any(len(each["scores"]) for each in detected):
        raise CannotCalibrateError(
            f"calibrate_scores: expected detections, got none in {len(pairs)} images; lower the detector's minimum "
            "score, or train for longer"
        )
    head = ScoreHead("other", columns=num_classes, first_label=first_label)
    before = collect(head, Samples(pairs, detect=lambda each: each))
    score_map = fitted(head, before, settings)
    return summary(settings, score_map, before, before.mapped(score_map))


def as_detections(output: Any) -> dict[str, Tensor]:
    """Convert the detections of one image, as a detection library returns them, to boxes, labels and scores.

    >>> as_detections({"boxes": [[0.0, 0, 4, 4]], "labels": [1], "scores": [0.9]})["scores"]
    tensor([0.9000])
    """
    detections = as_objects(output)
    if "scores" not in detections:
        raise ValueError(
            f"calibrate_scores: expected detections with scores, got {type(output).__name__} without; give the "
            "detections first and the ground truth second"
        )
    return detections


def as_objects(output: Any) -> dict[str, Tensor]:
    """Convert the objects of one image to boxes and labels; scores and ``iscrowd`` stay if they are there."""
    if isinstance(output, Mapping):
        if "class_labels" in output:
            return _of_transformers(output)
        if "boxes" in output and "labels" in output:
            return {key: _tensor(key, output[key]) for key in (*KEYS, "iscrowd") if key in output}
    for owner, names in ((output, SUPERVISION), (getattr(output, "boxes", None), ULTRALYTICS)):
        values = {key: getattr(owner, name, None) for key, name in zip(KEYS, names, strict=True)}
        if values["boxes"] is not None and values["labels"] is not None:
            return {key: _tensor(key, value) for key, value in values.items() if value is not None}
    raise TypeError(
        "calibrate_scores: expected the output of torchvision, transformers, rfdetr, supervision or Ultralytics for "
        f"one image, or a dict with boxes, labels and scores, got {type(output).__name__}"
    )


def _of_transformers(target: Mapping[str, Any]) -> dict[str, Tensor]:
    """Convert a training target of transformers, with relative centres and sizes, to corners in pixels."""
    if "orig_size" not in target:
        raise ValueError(
            "calibrate_scores: expected orig_size next to class_labels, to scale the relative boxes to pixels, got none"
        )
    centres, sizes = _tensor("boxes", target["boxes"]).split(2, dim=1)
    height, width = torch.as_tensor(target["orig_size"]).tolist()
    corners = torch.cat([centres - sizes / 2, centres + sizes / 2], dim=1)
    crowds = {"iscrowd": _tensor("iscrowd", target["iscrowd"])} if "iscrowd" in target else {}
    scale = torch.tensor([width, height, width, height])
    return {"boxes": corners * scale, "labels": _tensor("labels", target["class_labels"]), **crowds}


def _tensor(key: str, values: Any) -> Tensor:
    tensor = torch.as_tensor(values).detach().cpu()
    if key == "boxes":
        return tensor.float().reshape(-1, 4)
    return tensor.flatten().float() if key == "scores" else tensor.flatten().long()
