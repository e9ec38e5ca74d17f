"""Conversion of a model's detections, as tensors, to records in COCO's result format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as rle_codec
from torch import Tensor

from bucketrank.data.problems import DataError

Record = dict[str, Any]

MASK_THRESHOLD = 0.5  # for masks of probabilities


def coco_records(
    detections: Mapping[str, Tensor], *, image_id: int, categories: Sequence[int], masks: bool
) -> list[Record]:
    """Return the detections of one image in COCO's result format.

    ``detections`` has ``boxes`` (n, 4) as corners, ``labels`` (n,) from 1, ``scores`` (n,) and, if ``masks`` is true,
    ``masks`` (n, H, W) or (n, 1, H, W) of 0 and 1 or of probabilities. ``categories`` gives the category id of each
    label. A record has ``image_id``, ``category_id``, ``bbox`` (x, y, width, height), ``score`` and, with masks,
    ``segmentation`` as compressed RLE.

    Args:
        detections: boxes, labels, scores and maybe masks of one image.
        image_id: id of the image.
        categories: category id of each label.
        masks: write the masks, too.
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
            record["segmentation"] = encode_mask(mask)
    return records


def encode_mask(mask: Tensor) -> dict[str, Any]:
    """Return a mask (H, W) or (1, H, W) as compressed RLE, ready for JSON."""
    flat = mask.detach().reshape(mask.shape[-2:])
    binary = (flat > MASK_THRESHOLD) if flat.is_floating_point() else flat.bool()
    rle = rle_codec.encode(np.asfortranarray(binary.cpu().numpy().astype(np.uint8)))
    return {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}


def highest_scoring(records: Sequence[Record], most: int) -> list[Record]:
    """Return the ``most`` records of highest score; of equal ones the earlier."""
    return sorted(records, key=lambda record: -record["score"])[:most]
