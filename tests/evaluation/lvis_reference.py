"""Reference of the LVIS protocol: loops over classes, images, detections and objects, in plain Python and numpy.

Per image, the 300 detections of highest score count, over all classes; of equal ones the earlier. Detections without
area do not count. A class counts in an image if it has objects there (positive) or is known to have none (negative);
detections of other classes are left out. A detection that matches nothing is not wrong if the class was not annotated
exhaustively in the image. There are no crowds.

This file shares no code with src: it compares boxes itself, and pycocotools decodes the masks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as codec

MOST = 300
IOUS = np.linspace(0.5, 0.95, 10).tolist()
RECALLS = np.linspace(0, 1, 101).tolist()
AREAS = {"": (0.0, 1e10), "s": (0.0, 32.0**2), "m": (32.0**2, 96.0**2), "l": (96.0**2, 1e10)}

Entry = dict[str, Any]
Shape = NDArray[np.float64] | NDArray[np.bool_]


def lvis(document: Entry, detections: list[Entry], iou_type: str) -> dict[str, float]:
    """Return the thirteen metrics and the AP of each class by name; NaN where there are no objects."""
    images = sorted(document["images"], key=lambda image: int(image["id"]))
    categories = sorted(document["categories"], key=lambda category: int(category["id"]))
    sizes = {image["id"]: (image["height"], image["width"]) for image in images}
    objects = [prepared(entry, sizes, iou_type) | {"area": entry["area"]} for entry in document["annotations"]]
    candidates = [prepared(entry, sizes, iou_type) for entry in best(detections)]
    objects = [entry for entry in objects if entry["area"] > 0]
    candidates = [entry for entry in candidates if entry["area"] > 0]

    precisions: dict[tuple[str, int, int], list[float]] = {}  # by area, class and threshold, at every recall
    recalls: dict[tuple[str, int, int], float] = {}
    for number in (category["id"] for category in categories):
        judged = []
        for image in images:
            here = [e for e in objects if (e["image_id"], e["category_id"]) == (image["id"], number)]
            tried = [e for e in candidates if (e["image_id"], e["category_id"]) == (image["id"], number)]
            tried.sort(key=lambda entry: -entry["score"])
            if here or number in image["neg_category_ids"]:
                fits = [[overlap(entry["shape"], each["shape"]) for each in here] for entry in tried]
                judged.append((here, tried, fits, number in image["not_exhaustive_category_ids"]))
        for area, limits in AREAS.items():
            total = sum(inside(entry, limits) for here, *_ in judged for entry in here)
            for step, threshold in enumerate(IOUS if total else []):
                rows = [row for each in judged for row in matched(*each, threshold=threshold, limits=limits)]
                precisions[area, number, step], recalls[area, number, step] = curve(rows, total)

    def ap(area: str = "", *, only: set[int] | None = None, steps: set[int] | None = None) -> float:
        return mean(
            [
                value
                for (which, number, step), values in precisions.items()
                if which == area and (only is None or number in only) and (steps is None or step in steps)
                for value in values
            ]
        )

    def ar(area: str = "") -> float:
        return mean([value for (which, _, _), value in recalls.items() if which == area])

    of = {letter: {c["id"] for c in categories if c["frequency"] == letter} for letter in "rcf"}
    numbers = {"AP": ap(), "AP50": ap(steps={0}), "AP75": ap(steps={5}), "APs": ap("s"), "APm": ap("m"), "APl": ap("l")}
    numbers |= {f"AP{letter}": ap(only=of[letter]) for letter in "rcf"}
    numbers |= {"AR300": ar(), "ARs": ar("s"), "ARm": ar("m"), "ARl": ar("l")}
    return numbers | {category["name"]: ap(only={category["id"]}) for category in categories}


def best(detections: list[Entry]) -> list[Entry]:
    """Return the 300 detections of highest score per image."""
    kept = []
    for image in sorted({entry["image_id"] for entry in detections}):
        own = [entry for entry in detections if entry["image_id"] == image]
        kept += sorted(own, key=lambda entry: -entry["score"])[:MOST]
    return kept


def prepared(entry: Entry, sizes: dict[int, tuple[int, int]], iou_type: str) -> Entry:
    """Return the entry with its ``shape`` (box or mask) and the area of the shape."""
    if iou_type == "boxes":
        x, y, width, height = entry["bbox"]
        return entry | {"shape": np.array([x, y, x + width, y + height]), "area": width * height}
    mask = entry["segmentation"]
    if isinstance(mask, list):
        mask = codec.merge(codec.frPyObjects(mask, *sizes[entry["image_id"]]))
    elif isinstance(mask["counts"], list):
        mask = codec.frPyObjects(mask, *sizes[entry["image_id"]])
    shape = codec.decode(mask).astype(bool)
    return entry | {"shape": shape, "area": float(shape.sum())}


def overlap(one: Shape, other: Shape) -> float:
    """Return the intersection over union."""
    if one.dtype == bool:
        both, either = np.logical_and(one, other).sum(), np.logical_or(one, other).sum()
        return float(both / either) if either else 0.0
    width, height = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    both = max(width, 0.0) * max(height, 0.0)
    return float(both / ((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod() - both))


def inside(entry: Entry, limits: tuple[float, float]) -> bool:
    return limits[0] <= float(entry["area"]) <= limits[1]


def matched(
    objects: list[Entry],
    detections: list[Entry],
    overlaps: list[list[float]],
    excused: bool,
    *,
    threshold: float,
    limits: tuple[float, float],
) -> list[tuple[float, bool]]:
    """Return score and whether it is right for each detection of one class in one image that counts.

    In descending order of score, each detection takes the free object of highest IoU; of equal ones the last. It takes
    an object outside the range of area only if no object inside the range fits, and then it does not count.
    """
    rows = []
    free = set(range(len(objects)))
    for entry, fits in zip(detections, overlaps, strict=True):
        fitting = [k for k in free if fits[k] >= min(threshold, 1 - 1e-10)]
        counted = [k for k in fitting if inside(objects[k], limits)]
        if chosen := counted or fitting:
            free.remove(max((fits[k], k) for k in chosen)[1])
            if counted:
                rows.append((entry["score"], True))
        elif inside(entry, limits) and not excused:
            rows.append((entry["score"], False))
    return rows


def curve(rows: list[tuple[float, bool]], total: int) -> tuple[list[float], float]:
    """Return the best precision at or beyond each of 101 recalls, 0 where it is not reached, and the last recall."""
    points: list[tuple[float, float]] = []
    right = 0
    for place, (_, hit) in enumerate(sorted(rows, key=lambda row: -row[0]), start=1):
        right += hit
        points.append((right / total, right / place))
    highest = 0.0
    best_from = [highest := max(highest, precision) for _, precision in reversed(points)][::-1]
    at = [next((best_from[k] for k, (recall, _) in enumerate(points) if recall >= r), 0.0) for r in RECALLS]
    return at, points[-1][0] if points else 0.0


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
