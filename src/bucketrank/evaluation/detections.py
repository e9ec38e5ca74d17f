"""Detections of one image, from a model's tensors to COCO's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as rle_codec
from torch import Tensor

from bucketrank.data.problems import DataError

Record = dict[str, Any]

MASK_THRESHOLD = 0.5  # of a soft mask


def records(detections: Mapping[str, Tensor], *, image_id: int, categories: Sequence[int], masks: bool) -> list[Record]:
    """COCO's records: ``bbox`` x, y, width, height; ``category_id``; ``score``; ``segmentation`` as compressed RLE.

    ``detections`` has ``boxes`` (n, 4) corners, ``labels`` (n,) from 1, ``scores`` (n,) and, with ``masks``, ``masks``
    (n, H, W) or (n, 1, H, W), of 0 and 1 or of probabilities.
    """
    wanted = ("boxes", "labels", "scores", "masks") if masks else ("boxes", "labels", "scores")
    missing = [name for name in wanted if name not in detections]
    if missing:
        raise ValueError(f"Evaluator: expected detections with {', '.join(wanted)}, got no {missing[0]}")
    lengths = {name: len(detections[name]) for name in wanted}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"Evaluator: expected as many boxes as labels and scores, got {lengths} in image {image_id}")
    if not torch.isfinite(detections["boxes"]).all() or not torch.isfinite(detections["scores"]).all():
        raise DataError(f"Evaluator: expected finite boxes and scores, got NaN or infinity in image {image_id}")
    corners = detections["boxes"].detach().double().cpu().reshape(-1, 4)
    boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1).tolist()
    labels, scores = detections["labels"].tolist(), detections["scores"].detach().double().tolist()
    if labels and not 1 <= min(labels) <= max(labels) <= len(categories):
        raise ValueError(
            f"Evaluator: expected labels from 1 to {len(categories)}, the number of categories, got {min(labels)} to "
            f"{max(labels)} in image {image_id}"
        )
    found: list[Record] = [
        {"image_id": image_id, "category_id": categories[label - 1], "bbox": box, "score": score}
        for box, label, score in zip(boxes, labels, scores, strict=True)
    ]
    if masks:
        for record, mask in zip(found, detections["masks"], strict=True):
            record["segmentation"] = encode_mask(mask)
    return found


def encode_mask(mask: Tensor) -> dict[str, Any]:
    """A mask (H, W) or (1, H, W) as compressed RLE that JSON can hold."""
    flat = mask.detach().reshape(mask.shape[-2:])
    hard = (flat > MASK_THRESHOLD) if flat.is_floating_point() else flat.bool()
    rle = rle_codec.encode(np.asfortranarray(hard.cpu().numpy().astype(np.uint8)))
    return {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}


def best(found: Sequence[Record], most: int) -> list[Record]:
    """The ``most`` of highest score; of equal ones the earlier."""
    return sorted(found, key=lambda record: -record["score"])[:most]
