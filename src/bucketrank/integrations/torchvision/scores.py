"""Calibrate the scores of torchvision detectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.ssd import SSD

from bucketrank.evaluation.calibration import Calibration, ScoreHead
from bucketrank.evaluation.calibration.fitting import MAX_IMAGES, Data, FitSettings, Samples, calibrate_head
from bucketrank.settings.choices import CalibrationMethod, CalibrationTarget

CENTERNESS = (
    "FCOS multiplies the class score by the centerness and takes the root, so a map of the class score would change "
    "the order of detections"
)


def calibrate(
    model: nn.Module,
    data: Data,
    *,
    target: CalibrationTarget = "match",
    per_class: bool = False,
    method: CalibrationMethod = "platt",
    max_images: int | None = MAX_IMAGES,
) -> Calibration:
    """Turn the scores of a torchvision ``model`` into probabilities, in place; return the fitted map with its errors.

    ``data`` is an iterable of (image, target) as in training, such as a data set without augmentation or a DataLoader.
    The other arguments are those of :func:`~bucketrank.evaluation.calibration.calibrate`. RetinaNet takes
    ``method="platt"``; the R-CNNs and SSD have softmax scores and take ``method="temperature"``. FCOS is refused: its
    score is a product.
    """
    untyped_model: Any = model
    head = score_head(model)
    device = next(model.parameters()).device

    def detect(image: Tensor) -> Mapping[str, Tensor]:
        detections: Mapping[str, Tensor] = untyped_model([image.to(device)])[0]
        return detections

    settings = FitSettings(target, per_class, method)
    samples = Samples.of(data, detect, max_images=max_images)
    if samples.split is not None:  # data set labels start at 1, but RetinaNet also scores label 0
        samples = replace(samples, detect=lambda image: _without_label_0(detect(image)))
    return calibrate_head(model, head, samples, settings)


def score_head(model: nn.Module) -> ScoreHead:
    """Describe the last classification layers of a torchvision ``model``; labels are columns of their outputs."""
    untyped_model: Any = model
    if isinstance(model, RetinaNet):
        layer = untyped_model.head.classification_head.cls_logits
        columns = untyped_model.head.classification_head.num_classes
        thresholds = ((model, "score_thresh"),)
        return ScoreHead("sigmoid", layers=(layer,), columns=columns, first_label=0, thresholds=thresholds)
    if isinstance(model, FCOS):
        return ScoreHead("other", reason=CENTERNESS)
    if isinstance(model, FasterRCNN):
        layer = untyped_model.roi_heads.box_predictor.cls_score
        return ScoreHead("softmax", layers=(layer,), columns=layer.out_features, first_label=0, background=0)
    if isinstance(model, SSD):
        classifier = untyped_model.head.classification_head
        return ScoreHead(
            "softmax",
            layers=tuple(_last_layer(block) for block in classifier.module_list),
            columns=classifier.num_columns,
            first_label=0,
            background=0,
            logits=(classifier,),
        )
    raise TypeError(
        "calibrate: expected torchvision's FasterRCNN, MaskRCNN, KeypointRCNN, RetinaNet or SSD, got "
        f"{type(model).__name__}; pass a wrapped model without its wrapper; for other models see docs/calibration.md"
    )


def _without_label_0(detections: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    keep = detections["labels"] > 0
    return {name: value[keep] for name, value in detections.items()}


def _last_layer(block: Any) -> Any:
    """Return an SSD block's convolution; an SSDLite block ends in it."""
    return block[-1] if isinstance(block, nn.Sequential) else block
