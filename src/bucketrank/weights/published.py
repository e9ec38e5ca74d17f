"""Published checkpoints for our detectors: recognise, convert and load the weights of MMDetection.

``convert_published`` writes a model file that every command takes. ``load_published`` gives the weights to a detector
that is about to be trained, with other classes or another loss if need be. Every tensor of a checkpoint must have its
place, and every tensor of the detector must be filled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bucketrank.detectors import Detector
from bucketrank.detectors.criterion import Criterion
from bucketrank.errors import WeightsError, first_line
from bucketrank.settings import detectors as detector_names
from bucketrank.settings import from_dict
from bucketrank.weights.files import Meta, save_weights
from bucketrank.weights.load import build_detector, parameters_limited_by
from bucketrank.weights.published_file import Checkpoint, read_checkpoint
from bucketrank.weights.published_recognition import DETECTORS, Source, coco_classes, recognise
from bucketrank.weights.published_table import HEADS, LAST_NORM, UNUSED
from bucketrank.weights.tensor_table import Adaptation, Translated, translate

FIVE_LEVELS = 5  # Co-DINO's, which start at the finest map of the backbone
THRESHOLD = 0.3  # minimum score to report; MMDetection draws detections from this score on


@dataclass(frozen=True)
class Converted:
    """A published checkpoint as one of our detectors."""

    model: Detector
    meta: Meta
    keys: int  # tensors of the checkpoint

    def __str__(self) -> str:
        detector, backbone, loss = (self.meta.recipe[group]["name"] for group in ("detector", "backbone", "loss"))
        return (
            f"{detector} with {backbone}, trained with {loss}; {self.keys} of {self.keys} keys, "
            f"{len(self.meta.classes)} classes"
        )


def convert_published(
    path: Path | str,
    out: Path | str | None = None,
    *,
    detector: str | None = None,
    classes: Sequence[str] | None = None,
    threshold: float = THRESHOLD,
    ema: bool = False,
) -> Converted:
    """Convert the checkpoint ``path`` of MMDetection 2 or 3; write it to ``out``, if given, as a model file.

    The detector, its backbone and its loss are recognised from names and shapes of the tensors. Those of ATSS and PAA
    are the same: ``detector`` tells them apart, by default the file's configuration or name. Class names come from the
    checkpoint; one without any has ``classes`` or, with 80 classes, COCO's. ``threshold`` is the minimum score to
    report. ``ema`` takes the copies named ``ema_`` instead of the weights. No code in the checkpoint is run.
    WeightsError, in one line, for a file that cannot be read, another detector, and missing or unknown tensors.
    """
    checkpoint = read_checkpoint(path, ema=ema)
    source = recognise(checkpoint, detector=detector)
    names, ids = _classes(checkpoint, source, classes)
    translated = _translated(checkpoint, source)
    try:
        recipe = from_dict(source.recipe, source=str(path))
        with parameters_limited_by(translated.state):
            model = build_detector(recipe, num_classes=len(names))
    except (ArithmeticError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise WeightsError(
            f"{path}: expected tensors of {source.detector}, got sizes that build none ({first_line(error):.150}); the "
            "file is damaged or of another architecture"
        ) from error
    _load_strictly(checkpoint, source, model, translated.state, unknown=translated.unknown)
    model.stored_threshold, model.stored_classes = threshold, names
    meta = Meta(
        classes=names,
        category_ids=ids,
        threshold=threshold,
        recipe=recipe.to_dict(),
        origin=checkpoint.origin,
    )
    if out is not None:
        save_weights(out, model, meta)
    return Converted(model.eval(), meta, keys=len(checkpoint.state))


def load_published(model: Detector, path: Path | str, *, classes: Sequence[str] | None = None) -> list[str]:
    """Load a checkpoint of MMDetection into ``model``; return the names of the tensors that keep their values.

    ``classes`` are the names of the model's classes. Class layers take the rows of these names if the checkpoint has
    them all, otherwise they keep their values. A model without a background logit takes the difference to it; box
    deltas are rescaled for the model's own deviations.
    """
    checkpoint = read_checkpoint(path)
    spec = next((name for name, each in detector_names().items() if each.load() is type(model)), "")
    if spec not in DETECTORS.split(", "):
        raise WeightsError(f"init: expected one of {DETECTORS} for mmdet:{path}, got {spec or type(model).__name__}")
    ambiguous = "bbox_head.atss_cls.weight" in checkpoint.state  # ATSS and PAA have the same tensors
    source = recognise(checkpoint, detector=spec if ambiguous and spec in ("atss", "paa") else None)
    if source.detector != spec:
        raise WeightsError(
            f"init: expected weights of {spec}, got those of {source.detector} in {path}; train with --detector.name "
            f"{source.detector}"
        )
    heads = getattr(model, "auxiliary", None)
    if heads is not None and set(heads) != set(HEADS):
        raise WeightsError(f"init: expected detector.auxiliary {', '.join(HEADS)} for mmdet:{path}, got {list(heads)}")
    names, _ = _classes(checkpoint, source, None, required=False)
    translated = _translated(checkpoint, source)
    adaptation = _adaptation(model, source, names, classes)
    state, skipped = {}, []
    own = model.state_dict()
    for name, tensor in translated.state.items():
        rows = translated.rows[name]
        if name not in own and (rows == "quality" or name.startswith("denoising.")):
            continue  # a loss that sees the IoU needs no branch for it; denoising can be switched off
        try:
            adapted = adaptation(rows, tensor)
        except (IndexError, RuntimeError) as error:
            raise WeightsError(
                f"{path}: expected rows for {source.num_classes} classes, got {tuple(tensor.shape)} in {name}; the "
                "file is damaged or of another architecture"
            ) from error
        if adapted is None:
            skipped.append(name)
        else:
            state[name] = adapted
    _load_strictly(checkpoint, source, model, state, unknown=translated.unknown, skipped=skipped)
    return skipped


def _classes(
    checkpoint: Checkpoint, source: Source, given: Sequence[str] | None, *, required: bool = True
) -> tuple[list[str], list[int]]:
    coco, coco_ids = coco_classes()
    names = list(given) if given is not None else checkpoint.classes
    if names is None and source.num_classes == len(coco):
        names = coco
    if names is None and not required:
        return [], []
    if names is None or len(names) != source.num_classes:
        got = "none" if names is None else str(len(names))
        raise WeightsError(
            f"{checkpoint.path}: expected the names of {source.num_classes} classes, got {got}; give them in order "
            "with --classes NAME,NAME,..."
        )
    if len(set(names)) < len(names):
        raise WeightsError(
            f"{checkpoint.path}: expected different class names, got some twice; give them with --classes"
        )
    if set(names) == set(coco):
        return names, [coco_ids[coco.index(name)] for name in names]
    return names, list(range(1, len(names) + 1))


def _translated(checkpoint: Checkpoint, source: Source) -> Translated:
    try:
        return translate(checkpoint.state, source.table)
    except (IndexError, RuntimeError, ValueError) as error:
        raise WeightsError(
            f"{checkpoint.path}: expected the tensors of {source.detector}, got one of another shape; the file "
            "is damaged or of another architecture"
        ) from error


def _load_strictly(
    checkpoint: Checkpoint,
    source: Source,
    model: Detector,
    state: Mapping[str, Tensor],
    *,
    unknown: Sequence[str],
    skipped: Sequence[str] = (),
) -> None:
    """Load tensors that fit, or raise: nothing without a place, nothing unfilled, no number that is not finite."""
    own = model.state_dict()
    every_map = source.detector.endswith("rcnn") or source.recipe["detector"].get("levels") == FIVE_LEVELS
    unused = LAST_NORM if every_map else UNUSED
    faults = {
        "unknown": [*unknown, *(name for name in state if name not in own)],
        "missing": [
            name
            for name in own
            if name not in state
            and name not in skipped
            and not name.endswith("num_batches_tracked")
            and not re.fullmatch(unused, name)
        ],
        "of another shape": [name for name, each in state.items() if name in own and each.shape != own[name].shape],
        "of another type": [
            name
            for name, each in state.items()
            if name in own and each.is_floating_point() != own[name].is_floating_point()
        ],
        "not finite": [
            name for name, each in state.items() if each.is_floating_point() and not bool(each.isfinite().all())
        ],
    }
    if any(faults.values()):
        parts = [f"{len(names)} {fault} ({names[0]})" for fault, names in faults.items() if names]
        raise WeightsError(
            f"{checkpoint.path}: expected every tensor of {source.detector} ({source.recipe['backbone']['name']}), got "
            f"{', '.join(parts)}; the file is incomplete or of another architecture"
        )
    model.load_state_dict({name: tensor.to(own[name].dtype) for name, tensor in state.items()}, strict=False)


def _adaptation(model: Any, source: Source, names: Sequence[str], classes: Sequence[str] | None) -> Adaptation:
    labels: list[int] | None = None
    if classes is not None and names:
        labels = [names.index(name) for name in classes] if set(classes) <= set(names) else None
    elif model.num_classes == source.num_classes:
        labels = list(range(source.num_classes))
    return Adaptation(
        labels=labels,
        num_labels=source.num_classes,
        background=-1 if source.softmax else None,
        softmax=any(module.softmax for module in model.modules() if isinstance(module, Criterion)),
        delta_factors=_delta_factors(model, source),
        proposer_rows=model.proposer.classes.out_features if source.detector == "co_detr" else 0,
        marks=len(model.auxiliary_queries["atss"].head) if source.detector == "co_detr" else 0,
    )


def _delta_factors(model: Any, source: Source) -> tuple[float, float, float, float]:
    """Return the model's weights of box deltas, divided by the published ones."""
    if source.detector == "retinanet":
        coder, published = model.coder, "giou" if source.recipe["loss"]["name"] == "rs" else "l1"
    elif source.detector in ("faster_rcnn", "mask_rcnn", "cascade_rcnn"):
        coder, published = model.rpn.box_coder, "l1" if source.softmax else "giou"
    else:
        return 1.0, 1.0, 1.0, 1.0
    theirs = (10.0, 10.0, 5.0, 5.0) if published == "giou" else (1.0, 1.0, 1.0, 1.0)
    shift, _, size, _ = (own / other for own, other in zip(coder.weights, theirs, strict=True))
    return shift, shift, size, size
