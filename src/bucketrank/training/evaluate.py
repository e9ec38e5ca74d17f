"""AP of a weights file on a data set."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from bucketrank.data import CocoDataset, DataError, Split, collate, eval_transform, find_splits, require_sound
from bucketrank.detectors import Detector
from bucketrank.evaluation import EvaluationResult, Evaluator
from bucketrank.training.atomic import write_text
from bucketrank.training.recipe import Recipe, from_dict
from bucketrank.training.weights import Meta, load_model


@dataclass(frozen=True)
class Prepared:
    """A detector on its device in evaluation mode, and the images that it is to be measured on."""

    model: Detector
    meta: Meta
    images: CocoDataset
    evaluator: Evaluator
    device: torch.device


@dataclass(frozen=True)
class Evaluation:
    """The numbers for boxes and, where the model has them, masks; and the score of the best F1 on this data."""

    boxes: EvaluationResult
    masks: EvaluationResult | None
    threshold: float
    images: int
    meta: Meta


def evaluate(
    weights: Path | str,
    data: Path | str,
    *,
    split: str = "val",
    layout: str | None = None,
    batch_size: int = 1,
    workers: int = 0,
    device: str = "auto",
    most: int | None = None,
    detections: Path | None = None,
) -> Evaluation:
    """Evaluate on a split of the folder ``data``, or on its first ``most`` images.

    No detection is cut by its score. ``detections`` is a file for what was found, in COCO's result format.
    """
    ready = prepare(weights, data, split=split, layout=layout, device=device)
    model, meta, images, evaluator, place = ready.model, ready.meta, ready.images, ready.evaluator, ready.device
    wanted = range(len(images) if most is None else min(most, len(images)))
    loader = DataLoader(images, sampler=list(wanted), batch_size=batch_size, num_workers=workers, collate_fn=collate)
    with torch.inference_mode():
        for pictures, targets in loader:
            found = model([picture.to(place) for picture in pictures])
            evaluator.add([int(target["image_id"]) for target in targets], found)
    if detections is not None:
        write_text(detections, json.dumps(evaluator.detections))
    threshold = evaluator.best_threshold(seen_only=most is not None)
    return Evaluation(
        boxes=evaluator.result("boxes", seen_only=most is not None),
        masks=evaluator.result("masks", seen_only=most is not None) if model.masks else None,
        threshold=0.0 if math.isnan(threshold) else threshold,
        images=len(wanted),
        meta=meta,
    )


def prepare(
    weights: Path | str, data: Path | str, *, split: str = "val", layout: str | None = None, device: str = "auto"
) -> Prepared:
    """The detector of a weights file and a split of the folder ``data``; DataError unless the classes are the same."""
    model, meta = load_model(weights)
    chosen = _split(data, split, layout)
    require_sound(chosen, masks=model.masks)
    images = CocoDataset(chosen, transform=eval_transform())
    if (images.category_ids, images.class_names) != (meta.category_ids, meta.classes):
        raise DataError(
            f"{chosen.annotations}: expected the classes of {weights}, {', '.join(meta.classes[:10])} "
            f"(categories {meta.category_ids[:10]}), got {', '.join(images.class_names[:10])} "
            f"({images.category_ids[:10]})"
        )
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    evaluator = evaluator_for(chosen, from_dict(meta.recipe, source=str(weights)), masks=model.masks)
    return Prepared(model.to(place), meta, images, evaluator, place)


def evaluator_for(split: Split, recipe: Recipe, *, masks: bool) -> Evaluator:
    """By COCO's rules or LVIS's, as the recipe says or the categories tell."""
    document = split.read()
    style = recipe.data.style
    if style == "auto":
        style = "lvis" if all("frequency" in category for category in document["categories"]) else "coco"
    return Evaluator(document, masks=masks, style=style)  # type: ignore[arg-type]


def _split(data: Path | str, split: str, layout: str | None) -> Split:
    splits = find_splits(data, layout=layout)
    chosen = {"val": splits.val, "train": splits.train}.get(split)
    if chosen is None:
        raise DataError(f"{data}: there is no split {split!r}; there are val and train, where the folder has both")
    return chosen
