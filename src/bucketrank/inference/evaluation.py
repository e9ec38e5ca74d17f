"""Evaluate a weights file on a data set, and calibrate it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bucketrank.data import CocoDataset, eval_transform, require_sound
from bucketrank.data.batches import ImageLoader
from bucketrank.data.layouts import find_split
from bucketrank.detectors import Detector
from bucketrank.detectors.mask_rcnn import MaskRCNN
from bucketrank.devices import resolve_device
from bucketrank.errors import DataError, WeightsError, printable
from bucketrank.evaluation import CalibrationErrors, EvaluationResult, Evaluator
from bucketrank.evaluation.calibration import Calibration, calibrate
from bucketrank.evaluation.calibration.fitting import MAX_IMAGES
from bucketrank.output import say
from bucketrank.settings import from_dict
from bucketrank.settings.choices import CalibrationMethod, CalibrationTarget
from bucketrank.weights.atomic import require_writable, write_text
from bucketrank.weights.files import RUN_FILE, Meta, describe_scores, require_replaceable, save_weights
from bucketrank.weights.load import load_model


@dataclass(frozen=True)
class EvaluationSetup:
    """A detector on its device in evaluation mode, and the images to evaluate it on."""

    model: Detector
    meta: Meta
    images: CocoDataset
    evaluator: Evaluator
    device: torch.device


@dataclass(frozen=True)
class Evaluation:
    """Box metrics, mask metrics if the model has masks, calibration errors, and the best-F1 threshold on this data."""

    boxes: EvaluationResult  # box metrics
    masks: EvaluationResult | None  # mask metrics; None without masks
    masks_in_boxes: EvaluationResult | None  # mask metrics in the ground-truth boxes; None unless requested
    errors: CalibrationErrors  # calibration errors of the boxes
    threshold: float  # best-F1 score on these images
    images: int  # number of images
    meta: Meta  # description in the weights file


def evaluate(
    weights: Path | str,
    data: Path | str,
    *,
    split: str = "val",
    layout: str | None = None,
    holdout: float | None = None,
    batch_size: int = 1,
    workers: int = 0,
    device: str = "auto",
    max_images: int | None = None,
    detections: Path | None = None,
    given_boxes: bool = False,
) -> Evaluation:
    """Evaluate a weights file on a split of the data folder ``data``, or on its first ``max_images`` images.

    Detections of every score count.

    Args:
        weights: weights file, run folder, ``save_pretrained`` folder, or hub repository.
        data: data set folder.
        split: ``"val"``, ``"train"`` or ``"test"``.
        layout: layout of the data folder; by default the one that fits.
        holdout: share of the training images that stands in for the validation images, as in the recipe of a run.
        batch_size: images per batch.
        workers: data-loading workers.
        device: a torch device; auto is cuda if available.
        max_images: evaluate only the first N images; by default all.
        detections: file to write the detections to, as COCO results.
        given_boxes: also evaluate masks in the ground-truth boxes, which measures only the masks.
    """
    if max_images is not None and max_images < 1:
        raise ValueError(f"evaluate: expected max_images of at least 1 or None, got {max_images}")
    if detections is not None:
        require_writable(detections, "detections.json")
    setup = prepare_evaluation(weights, data, split=split, layout=layout, holdout=holdout, device=device)
    masked = setup.model if given_boxes and isinstance(setup.model, MaskRCNN) else None
    if given_boxes and masked is None:
        raise DataError(
            f"{weights}: --given-boxes: expected a Mask R-CNN, got {type(setup.model).__name__}; leave the flag out"
        )
    indices = range(len(setup.images) if max_images is None else min(max_images, len(setup.images)))
    loader = ImageLoader(setup.images, sampler=list(indices), batch_size=batch_size, num_workers=workers)
    evaluator = setup.evaluator
    in_boxes = Evaluator(setup.images.split, masks=True, style=evaluator.style) if masked is not None else None
    with torch.inference_mode():
        for images, targets in loader:
            on_device = [image.to(setup.device) for image in images]
            image_ids = [int(target["image_id"]) for target in targets]
            evaluator.add(image_ids, setup.model(on_device))
            if masked is not None and in_boxes is not None:
                given = [{name: target[name].to(setup.device) for name in ("boxes", "labels")} for target in targets]
                in_boxes.add(image_ids, masked.detect_in_boxes(on_device, given))
    if detections is not None:
        write_text(detections, json.dumps(evaluator.detections))
    seen_only = max_images is not None
    threshold = evaluator.best_threshold(seen_only=seen_only)
    return Evaluation(
        boxes=evaluator.result("boxes", seen_only=seen_only),
        masks=evaluator.result("masks", seen_only=seen_only) if setup.model.masks else None,
        masks_in_boxes=None if in_boxes is None else in_boxes.result("masks", seen_only=seen_only),
        errors=evaluator.calibration_errors(seen_only=seen_only),
        threshold=0.0 if math.isnan(threshold) else threshold,
        images=len(indices),
        meta=setup.meta,
    )


def prepare_evaluation(
    weights: Path | str,
    data: Path | str,
    *,
    split: str = "val",
    layout: str | None = None,
    holdout: float | None = None,
    device: str = "auto",
) -> EvaluationSetup:
    """Load a weights file and a split of the data folder ``data``; raise DataError unless the classes are the same."""
    model, meta = load_model(weights)
    chosen = find_split(data, split, layout=layout, holdout=holdout)
    require_sound(chosen, masks=model.masks)
    images = CocoDataset(chosen, transform=eval_transform())
    if (images.category_ids, images.class_names) != (meta.category_ids, meta.classes):
        raise DataError(
            f"{chosen.name}: expected the classes of {weights}, {', '.join(meta.classes[:10])} "
            f"(categories {meta.category_ids[:10]}), got {', '.join(images.class_names[:10])} "
            f"({images.category_ids[:10]})"
        )
    style = from_dict(meta.recipe, source=str(weights)).data.style
    try:
        evaluator = Evaluator(chosen, masks=model.masks, style=style)
    except ValueError as error:  # LVIS rules need more than COCO annotations have
        raise DataError(f"{chosen.name}: {error}") from error
    torch_device = resolve_device(device)
    return EvaluationSetup(model.to(torch_device), meta, images, evaluator, torch_device)


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    """Print the metrics, the AP of each class, the calibration errors and the threshold."""
    masks = evaluation.masks
    results = {"boxes": evaluation.boxes, "masks": masks, "masks in given boxes": evaluation.masks_in_boxes}
    shown = {name: result.columns for name, result in results.items() if result is not None}
    table = Table("", *shown, box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for key in evaluation.boxes.columns:
        table.add_row(key, *(_percent(columns[key]) for columns in shown.values()))
    console.print(table)
    classes = Table("class", "AP", *(["mask AP"] if masks else []), box=None, padding=(0, 2, 0, 0))
    for name, value in evaluation.boxes.per_class.items():
        classes.add_row(escape(printable(name)), _percent(value), *([_percent(masks.per_class[name])] if masks else []))
    console.print(classes)
    errors = evaluation.errors
    scores = describe_scores(evaluation.meta)
    say(console, f"calibration error of boxes: D-ECE {errors.d_ece:.4f}, LaECE {errors.la_ece:.4f}. {scores}")
    say(
        console,
        f"{evaluation.images:,} images; the threshold with the best F1 is {evaluation.threshold:.4g} "
        f"(stored with the weights: {evaluation.meta.threshold:.4g})",
    )


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f}"


def calibrate_weights(
    weights: Path | str,
    data: Path | str,
    out: Path | str | None = None,
    *,
    split: str = "train",
    layout: str | None = None,
    holdout: float | None = None,
    target: CalibrationTarget = "match",
    per_class: bool = False,
    method: CalibrationMethod = "platt",
    max_images: int | None = MAX_IMAGES,
    device: str = "auto",
) -> Calibration:
    """Calibrate the scores of a weights file on a split of the data folder ``data``; write it to ``out``.

    By default the file itself is replaced. The training split is the usual choice, because it leaves the validation
    split untouched. A calibrated file may be calibrated again. Raises CannotCalibrateError, and writes nothing, if the
    scores cannot be calibrated.

    ``weights``, ``split``, ``layout``, ``holdout`` and ``device`` are those of :func:`evaluate`; ``target``,
    ``per_class``, ``method`` and ``max_images`` those of :func:`bucketrank.evaluation.calibration.calibrate`.
    """
    if out is None and (Path(weights) / RUN_FILE).is_file():
        weights = Path(weights) / RUN_FILE
    if out is None and not Path(weights).is_file():
        raise WeightsError(
            f"{weights}: expected a weights file to replace, got no such file; choose the file with --out"
        )
    require_replaceable(Path(weights if out is None else out), RUN_FILE)
    setup = prepare_evaluation(weights, data, split=split, layout=layout, holdout=holdout, device=device)
    calibration = calibrate(
        setup.model, setup.images, target=target, per_class=per_class, method=method, max_images=max_images
    )
    save_weights(weights if out is None else out, setup.model.cpu(), setup.meta.calibrated(calibration))
    return calibration
