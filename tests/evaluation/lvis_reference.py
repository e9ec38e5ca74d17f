"""The LVIS protocol, read slowly: loops over classes, images, detections and objects, in plain Python and numpy.

Of each image the 300 detections of highest score count, over all classes; of equal ones the earlier. Those without area
do not count at all. A class is judged in an image if it has objects there (positive) or is known to have none
(negative); detections of other classes there are left out. Detections that match nothing are excused if not all
objects of the class were marked in the image. There are no crowds.

It shares no code with src: boxes are compared here, masks are decoded by pycocotools.
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


def lvis(document: Entry, detections: list[Entry], kind: str) -> dict[str, float]:
    """The thirteen numbers and, by name, the AP of each class; NaN where there is nothing to find."""
    images = sorted(document["images"], key=lambda image: int(image["id"]))
    categories = sorted(document["categories"], key=lambda category: int(category["id"]))
    sizes = {image["id"]: (image["height"], image["width"]) for image in images}
    objects = [prepared(entry, sizes, kind) | {"area": entry["area"]} for entry in document["annotations"]]
    found = [prepared(entry, sizes, kind) for entry in best(detections)]
    objects = [entry for entry in objects if entry["area"] > 0]
    found = [entry for entry in found if entry["area"] > 0]

    precisions: dict[tuple[str, int, int], list[float]] = {}  # by area, class and threshold, at every recall
    recalls: dict[tuple[str, int, int], float] = {}
    for number in (category["id"] for category in categories):
        judged = []
        for image in images:
            here = [e for e in objects if (e["image_id"], e["category_id"]) == (image["id"], number)]
            tried = [e for e in found if (e["image_id"], e["category_id"]) == (image["id"], number)]
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
    """The 300 of each image."""
    kept = []
    for image in sorted({entry["image_id"] for entry in detections}):
        own = [entry for entry in detections if entry["image_id"] == image]
        kept += sorted(own, key=lambda entry: -entry["score"])[:MOST]
    return kept


def prepared(entry: Entry, sizes: dict[int, tuple[int, int]], kind: str) -> Entry:
    """With its ``shape``, and the shape's area."""
    if kind == "boxes":
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
    """Intersection over union."""
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
    found: list[Entry],
    overlaps: list[list[float]],
    excused: bool,
    *,
    threshold: float,
    limits: tuple[float, float],
) -> list[tuple[float, bool]]:
    """Score and rightness of the detections of one class in one image, without those that are excused.

    The best detection first, each takes the free object that it fits best; one of another range of area only where none
    of this range fits, and then it is neither right nor wrong. Of objects that fit equally, the last.
    """
    rows = []
    free = set(range(len(objects)))
    for entry, fits in zip(found, overlaps, strict=True):
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
    """The best precision at each of 101 recalls or beyond, 0 where it is never reached; and the last recall."""
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
