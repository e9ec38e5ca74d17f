"""Random annotations, and random detections derived from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bucketrank.data.coco import decode_masks

Detections = dict[int, dict[str, Tensor]]


def random_document(seed: int, *, images: int = 12, classes: int = 4, crowds: bool = True) -> dict[str, Any]:
    """Return annotations with boxes of all sizes and masks; the third class never occurs, the first image is empty."""
    rng = np.random.default_rng(seed)
    annotations: list[dict[str, Any]] = []
    for image in range(1, images):
        for _ in range(rng.integers(1, 9)):
            w, h = 4 + rng.random(2) ** 3 * 150
            x, y = rng.random(2) * (200 - np.array([w, h]))
            crowd = bool(crowds and rng.random() < 0.15)
            mask: Any = [[x, y, x + w, y, x + w, y + h, x, y + h * 0.8]]
            if crowd:
                inside = np.zeros((200, 200), dtype=int)
                inside[int(y) : int(y + h) + 1, int(x) : int(x + w) + 1] = 1
                flat = inside.ravel(order="F")
                edges = np.flatnonzero(np.diff(flat)) + 1
                counts = np.diff([0, *edges, flat.size]).tolist()
                mask = {"size": [200, 200], "counts": counts if flat[0] == 0 else [0, *counts]}
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image * 10,
                    "category_id": [2, 5, 7, 11][rng.choice([0, 1, 3])],
                    "bbox": [float(each) for each in (x, y, w, h)],
                    "area": float(w * h * 0.9),
                    "iscrowd": int(crowd),
                    "segmentation": mask,
                }
            )
    return {
        "images": [{"id": image * 10, "width": 200, "height": 200} for image in range(images)],
        "categories": [{"id": number, "name": f"class {number}"} for number in [2, 5, 7, 11][:classes]],
        "annotations": annotations,
    }


def random_lvis_document(seed: int, *, images: int = 10) -> dict[str, Any]:
    """Return a document in LVIS's format, with negative and not exhaustively annotated classes per image.

    The first image is empty. Class 7 never occurs, so that class 2 is the only rare class with objects.
    """
    rng = np.random.default_rng(seed)
    ground_truth = random_document(seed, images=images, crowds=False)
    for category, letter in zip(ground_truth["categories"], "rcrf", strict=True):
        category["frequency"] = letter
    numbers = {category["id"] for category in ground_truth["categories"]}
    for entry in ground_truth["annotations"]:
        del entry["iscrowd"]
    for image in ground_truth["images"]:
        present = {entry["category_id"] for entry in ground_truth["annotations"] if entry["image_id"] == image["id"]}
        image["neg_category_ids"] = [number for number in sorted(numbers - present) if rng.random() < 0.5]
        image["not_exhaustive_category_ids"] = [number for number in sorted(numbers) if rng.random() < 0.25]
    return ground_truth


def add_detections(detections: Detections, seed: int, *, images: list[int], count: int, masks: bool) -> Detections:
    """Add detections to some images: slightly moved copies of those that exist, with scores of two digits."""
    rng = np.random.default_rng(seed)
    more = dict(detections)
    for image in images:
        own = detections[image]
        chosen = torch.from_numpy(rng.integers(0, len(own["boxes"]), count))
        extra = {name: values[chosen] for name, values in own.items()}
        extra["boxes"] = extra["boxes"] + torch.from_numpy(rng.normal(0, 3, (count, 1))).float()
        extra["labels"] = torch.from_numpy(rng.integers(1, 5, count))
        extra["scores"] = torch.from_numpy(np.round(rng.random(count), 2)).float()
        if masks:
            shifts = rng.integers(-4, 5, count).tolist()
            moved = [mask.roll(shift, dims=-1) for mask, shift in zip(extra["masks"], shifts, strict=True)]
            extra["masks"] = torch.stack(moved)
        more[image] = {name: torch.cat([own[name], extra[name]]) for name in own}
    return more


def random_detections(ground_truth: dict[str, Any], seed: int, *, masks: bool, noise: float = 0.12) -> Detections:
    """Return noisy copies of the objects and crowds, some twice, some of a wrong class, and some random boxes."""
    rng = np.random.default_rng(seed)
    numbers = sorted(category["id"] for category in ground_truth["categories"])
    detections: Detections = {}
    for image in ground_truth["images"]:
        boxes, labels, segments = [], [], []
        for entry in ground_truth["annotations"]:
            if entry["image_id"] != image["id"]:
                continue
            for _ in range(rng.integers(0, 3)):
                x, y, w, h = entry["bbox"]
                dx, dy, dw, dh = rng.normal(0, noise, 4) * [w, h, w, h]
                boxes.append([x + dx, y + dy, x + dx + abs(w + dw), y + dy + abs(h + dh)])
                right = rng.random() < 0.85
                labels.append(
                    numbers.index(entry["category_id"]) + 1 if right else int(rng.integers(1, len(numbers) + 1))
                )
        for _ in range(rng.integers(0, 4)):
            corner = rng.random(2) * 150
            boxes.append([*corner, *(corner + 5 + rng.random(2) * 40)])
            labels.append(int(rng.integers(1, len(numbers) + 1)))
        size = image["height"], image["width"]
        segments = [[[x1, y1, x2, y1, x2, y2, x1, y2 - (y2 - y1) * 0.2]] for x1, y1, x2, y2 in boxes]
        detections[image["id"]] = {
            "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            "labels": torch.tensor(labels, dtype=torch.int64),
            # Rounded, so that some are equal.
            "scores": torch.tensor(np.round(rng.random(len(boxes)), 2), dtype=torch.float32),
        }
        if masks:
            detections[image["id"]]["masks"] = decode_masks(segments, size)[:, None].float() * 0.9
    return detections
