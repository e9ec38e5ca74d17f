"""A synthetic data set of circles, squares, triangles and stars, which needs no download.

An image depends only on its seed, series and number, and is the same on every machine: only numpy's raw uniform numbers
are used, and the corners of a shape are rounded before any decision depends on them. The colour is independent of the
class. Shapes overlap, and at least two fifths of each shape stay visible. Faint outlines of the same shapes in the
background are not objects, so that a detector has to rank its detections well.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bucketrank.data.labels import encode_mask
from bucketrank.errors import DataError

CLASSES = ("circle", "square", "triangle", "star")
COLOURS = (  # fills that stand out on every background
    (230, 85, 70),
    (245, 160, 50),
    (240, 205, 75),
    (105, 180, 95),
    (60, 165, 165),
    (70, 130, 205),
    (130, 100, 190),
    (220, 110, 160),
)
BACKGROUNDS = ((214, 222, 230), (228, 220, 206), (60, 68, 84), (88, 82, 78), (206, 218, 204), (74, 62, 82))
MIN_VISIBLE = 0.4  # visible share of each shape
MAX_TRIES = 40  # random positions tried for a shape before it is left out

Plane = NDArray[np.float64]
Window = tuple[slice, slice]


@dataclass(frozen=True)
class Drawing:
    """An image and its objects: ``pixels`` (H, W, 3), ``masks`` (n, H, W) of the visible parts, ``labels`` from 1."""

    pixels: NDArray[np.uint8]
    masks: NDArray[np.bool_]
    labels: list[int]

    @property
    def boxes(self) -> list[tuple[int, int, int, int]]:
        """x, y, width and height of the visible part of each object."""
        boxes = []
        for mask in self.masks:
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            x, y = int(columns[0]), int(rows[0])
            boxes.append((x, y, int(columns[-1]) - x + 1, int(rows[-1]) - y + 1))
        return boxes


@dataclass(frozen=True)
class Shapes:
    """A series of drawings; the same seed, series and number give the same image.

    Each image gets a random number of objects from ``min_objects`` to ``max_objects``. An object that does not fit
    after ``MAX_TRIES`` random positions is left out.

    >>> drawing = Shapes(size=96).draw(0)
    >>> drawing.pixels.shape, [CLASSES[label - 1] for label in drawing.labels]
    ((96, 96, 3), [...])
    """

    size: int = 160  # side of an image in pixels
    min_objects: int = 4  # minimum number of objects per image
    max_objects: int = 12  # maximum number of objects per image
    seed: int = 0  # seed of all series
    series: int = 0  # number of the series

    def __post_init__(self) -> None:
        if self.size < 32:
            raise ValueError(f"Shapes: expected a size of at least 32 pixels, got {self.size}")
        if not 0 <= self.min_objects <= self.max_objects:
            raise ValueError(
                f"Shapes: expected 0 <= min_objects <= max_objects, got {self.min_objects} and {self.max_objects}"
            )

    def draw(self, number: int) -> Drawing:
        """Draw image ``number`` of the series."""
        rng = np.random.Generator(np.random.PCG64([self.seed, self.series, number]))
        canvas = Canvas(self.size, rng)
        for _ in range(4):
            canvas.outline()
        num_objects = self.min_objects + int(rng.random() * (self.max_objects - self.min_objects + 1))
        for _ in range(num_objects):
            canvas.add()
        return canvas.finish()


class Canvas:
    """A background on which shapes are drawn, later ones on top."""

    def __init__(self, size: int, rng: np.random.Generator) -> None:
        self.size = size
        self.rng = rng
        self.y, self.x = np.mgrid[:size, :size] + 0.5
        self.colour = np.asarray(self._one_of(BACKGROUNDS), dtype=np.float64)
        self.pixels = self._background()
        self.masks: list[NDArray[np.bool_]] = []
        self.areas: list[int] = []
        self.labels: list[int] = []

    def outline(self) -> None:
        """Draw a faint contour, which is not an object."""
        _, near, distance = self._shape()
        tone = -22.0 if self.colour.mean() > 128 else 26.0
        self.pixels[near] += (tone * _coverage(np.abs(distance) - 0.7))[..., None]

    def add(self) -> None:
        """Draw one more shape where every other shape stays visible enough; skip it if no position is found."""
        for _ in range(MAX_TRIES):
            label, near, distance = self._shape()
            inside = distance < 0
            hidden = [int((mask[near] & inside).sum()) for mask in self.masks]
            if inside.any() and all(
                int(mask.sum()) - lost >= MIN_VISIBLE * area
                for mask, lost, area in zip(self.masks, hidden, self.areas, strict=True)
            ):
                break
        else:
            return
        for mask in self.masks:
            mask[near] &= ~inside
        self.masks.append(np.zeros((self.size, self.size), dtype=bool))
        self.masks[-1][near] = inside
        self.areas.append(int(inside.sum()))
        self.labels.append(label)

        pixels = self.pixels[near]
        shadow = np.zeros_like(distance)
        shadow[2:, 2:] = _coverage(distance[:-2, :-2] / 3)  # wide and soft, to the lower right
        pixels *= 1 - 0.35 * shadow[..., None]
        colour = np.asarray(self._one_of(COLOURS)) * (0.85 + 0.3 * self.rng.random())
        light = 1.12 - 0.24 * (self.x[near] + self.y[near]) / (2 * self.size)
        rim = 1 - 0.35 * _coverage(np.abs(distance + 1) - 0.8)
        pixels += _coverage(distance)[..., None] * (colour * (light * rim)[..., None] - pixels)

    def finish(self) -> Drawing:
        """Add noise and return the drawing."""
        grain = (self.rng.random((self.size, self.size, 3)) + self.rng.random((self.size, self.size, 3)) - 1) * 14
        pixels = np.clip(np.rint(self.pixels + grain), 0, 255).astype(np.uint8)
        masks = np.stack(self.masks) if self.masks else np.zeros((0, self.size, self.size), dtype=bool)
        return Drawing(pixels, masks, self.labels)

    def _background(self) -> Plane:
        blotches = np.zeros((self.size, self.size))
        for cells, weight in ((3, 22.0), (6, 12.0), (12, 6.0)):
            blotches += weight * (_smooth(self.rng.random((cells + 1, cells + 1)), self.size) - 0.5)
        toned: Plane = self.colour + blotches[..., None] * np.asarray([1.0, 0.95, 1.1])
        return toned

    def _shape(self) -> tuple[int, Window, Plane]:
        """Choose a random shape: label, window around it, and the signed distance of each pixel from its contour."""
        label = 1 + int(self.rng.random() * len(CLASSES))
        radius = _rounded(self.size * (0.06 + 0.12 * self.rng.random() ** 2) + 2)
        x, y = (_rounded(radius * 0.6 + self.rng.random() * (self.size - 1.2 * radius)) for _ in range(2))
        turn = self.rng.random() * 2 * math.pi
        margin = 1.4 * radius + 5  # room for the longest spike and the shadow
        near = _around(y, margin), _around(x, margin)
        return label, near, _contour(label, self.x[near] - x, self.y[near] - y, radius, turn)

    def _one_of(self, choices: tuple[tuple[int, int, int], ...]) -> tuple[int, int, int]:
        return choices[int(self.rng.random() * len(choices))]


def write_shapes(folder: Path | str, *, train: int = 400, val: int = 100, size: int = 160, seed: int = 0) -> Path:
    """Draw a data set in COCO format into the new folder ``folder``, and return it.

    It has images/, train.json and val.json, with boxes and masks: ``train`` and ``val`` images of ``size`` x ``size``
    pixels, drawn by ``seed``. The validation images do not depend on the number of training images.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder}: is not empty; give a new folder for the drawn images")
    (folder / "images").mkdir(parents=True)
    for series, (name, count) in enumerate((("train", train), ("val", val))):
        shapes = Shapes(size=size, seed=seed, series=series)
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(count):
            drawing = shapes.draw(number)
            file = f"{name}-{number:05}.png"
            Image.fromarray(drawing.pixels).save(folder / "images" / file)
            images.append({"id": number + 1, "file_name": file, "width": size, "height": size})
            annotations += _annotations(drawing, image_id=number + 1, first=len(annotations) + 1)
        categories = [{"id": label, "name": name} for label, name in enumerate(CLASSES, start=1)]
        document = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def _annotations(drawing: Drawing, *, image_id: int, first: int) -> list[dict[str, Any]]:
    annotations = []
    for number, (mask, box, label) in enumerate(zip(drawing.masks, drawing.boxes, drawing.labels, strict=True)):
        annotations.append(
            {
                "id": first + number,
                "image_id": image_id,
                "category_id": label,
                "bbox": box,
                "area": int(mask.sum()),
                "iscrowd": 0,
                "segmentation": encode_mask(mask),
            }
        )
    return annotations


def _contour(label: int, x: Plane, y: Plane, radius: float, turn: float) -> Plane:
    """Compute the signed distance from the contour of a shape around the origin, negative inside."""
    if label == 1:
        return np.sqrt(x**2 + y**2) - radius
    corners = {2: 4, 3: 3, 4: 10}[label]
    reach = {2: (1.15, 1.15), 3: (1.25, 1.25), 4: (1.35, 0.62)}[label]
    points = []
    for corner in range(corners):
        angle, length = turn + 2 * math.pi * corner / corners, radius * reach[corner % 2]
        points.append((_rounded(length * math.cos(angle)), _rounded(length * math.sin(angle))))
    return _distance(x, y, points)


def _distance(x: Plane, y: Plane, points: list[tuple[float, float]]) -> Plane:
    """Compute the signed distance from the nearest polygon edge, negative inside."""
    nearest = np.full(x.shape, np.inf)
    inside = np.zeros(x.shape, dtype=bool)
    for (x1, y1), (x2, y2) in zip(points, points[1:] + points[:1], strict=True):
        along = np.clip(((x - x1) * (x2 - x1) + (y - y1) * (y2 - y1)) / ((x2 - x1) ** 2 + (y2 - y1) ** 2), 0, 1)
        nearest = np.minimum(nearest, (x - x1 - along * (x2 - x1)) ** 2 + (y - y1 - along * (y2 - y1)) ** 2)
        if y1 != y2:
            crosses = (y1 <= y) != (y2 <= y)
            inside ^= crosses & (x < x1 + (y - y1) * (x2 - x1) / (y2 - y1))
    signed: Plane = np.where(inside, -1.0, 1.0) * np.sqrt(nearest)
    return signed


def _coverage(distance: Plane) -> Plane:
    """Estimate the covered share of each pixel from the signed distance of its centre."""
    return np.clip(0.5 - distance, 0, 1)


def _smooth(values: Plane, size: int) -> Plane:
    """Interpolate a coarse grid of values to (size, size)."""
    position = (np.arange(size) + 0.5) / size * (len(values) - 1)
    low = position.astype(int)
    share = position - low
    share = share * share * (3 - 2 * share)
    rows = values[low] * (1 - share)[:, None] + values[low + 1] * share[:, None]
    mixed: Plane = rows[:, low] * (1 - share) + rows[:, low + 1] * share
    return mixed


def _around(centre: float, margin: float) -> slice:
    return slice(max(0, int(centre - margin)), int(centre + margin) + 1)


def _rounded(value: float) -> float:
    return round(value * 16) / 16
