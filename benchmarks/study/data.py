"""Data sets for imbalance studies: most training images without objects, or one class among look-alikes.

Both write a new folder in COCO format. Validation keeps all its images, which are linked, not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bucketrank.data import find_splits
from bucketrank.data.annotations import Document, Split, by_image, classes
from bucketrank.data.convert.writer import Writer, Written
from bucketrank.data.images import read_image
from bucketrank.errors import DataError

MIN_SCALE = 0.2  # smallest side of a crop, as a fraction of the image's
MIN_SIDE = 32  # pixels
ATTEMPTS = 200  # random crops to try per image, ever smaller ones
FOLDER = "empty-crops"  # of the crops, inside images/

Crop = tuple[int, int, int, int]  # x1, y1, x2, y2


def add_empty_images(source: Path, folder: Path, *, share: float, seed: int = 0, copy: bool = False) -> list[Written]:
    """Add training images without objects until they make up ``share`` of all, and write the data set to ``folder``.

    An empty image is a random crop of a training image that overlaps no object and no crowd, enlarged to the size of
    its image. All images of ``source`` are kept; those without objects count towards the share.
    """
    if not 0 <= share < 1:
        raise DataError(f"--share: expected a share from 0 to below 1, got {share:g}")
    train, val = read_splits(source)
    document = train.read()
    owners = _objects_by_image(document)
    occupied = sum(image["id"] in owners for image in document["images"])
    missing = round(occupied * share / (1 - share)) - (len(document["images"]) - occupied)
    random = np.random.default_rng(seed)
    with Writer(source, folder, categories=dict(classes(document)), copy=copy, follow_links=True) as writer:
        _add_all(writer, train, document, owners)
        _add_crops(writer, train, document, owners, count=max(0, missing), random=random)
        written = [writer.write("train")]
        _add_all(writer, val, validation := val.read(), _objects_by_image(validation))
        return [*written, writer.write("val")]


def keep_one_class(source: Path, folder: Path, *, name: str, copy: bool = False) -> list[Written]:
    """Keep the objects of one class; the other objects stay in the images as look-alikes without annotation."""
    splits = read_splits(source)
    ids = {title: number for number, title in classes(splits[0].read())}
    if name not in ids:
        raise DataError(f"--name: expected one of {', '.join(ids)}, got {name!r}")
    with Writer(source, folder, categories={ids[name]: name}, copy=copy, follow_links=True) as writer:
        written = []
        for part, split in zip(("train", "val"), splits, strict=True):
            document = split.read()
            own = [entry for entry in document["annotations"] if entry["category_id"] == ids[name]]
            _add_all(writer, split, document, _objects_by_image({**document, "annotations": own}))
            written.append(writer.write(part))
        return written


def read_splits(source: Path, *, holdout: float | None = None) -> tuple[Split, Split]:
    """Return the training and validation images of a data set, or a share of the training images held out for these."""
    train, val = find_splits(source).with_holdout(holdout)[:2]
    if train is None or val is None:
        raise DataError(f"{source}: expected training and validation images, got one part; run bucketrank split")
    return train, val


def _objects_by_image(document: Document) -> dict[int, list[dict[str, Any]]]:
    return dict(by_image(document["annotations"]))


def _add_all(writer: Writer, split: Split, document: Document, owners: dict[int, list[dict[str, Any]]]) -> None:
    """Add all images of a split with their objects."""
    for image in document["images"]:
        writer.copy_image(split.image_path(image), owners.get(image["id"], ()))


def _add_crops(
    writer: Writer,
    split: Split,
    document: Document,
    owners: dict[int, list[dict[str, Any]]],
    *,
    count: int,
    random: np.random.Generator,
) -> None:
    """Write ``count`` crops without objects, one of each image after another; DataError if no image has room."""
    images = [document["images"][number] for number in random.permutation(len(document["images"]))]
    missing = count
    while missing > 0:
        if not images:
            raise DataError(
                f"{split.annotations}: expected images with room for a crop without objects, of at least {MIN_SIDE} "
                f"pixels and {MIN_SCALE:.0%} of a side, got none; lower --share"
            )
        crowded = set()  # images without room are not tried again
        for image in images[:missing]:
            boxes = [entry["bbox"] for entry in owners.get(image["id"], ())]
            pixels = Image.fromarray(read_image(split.image_path(image)))
            crop = find_empty_crop(pixels.size, boxes, random)
            if crop is None:
                crowded.add(image["id"])
                continue
            missing -= 1
            number = len(writer.images) + 1
            path = writer.unfinished / "images" / FOLDER / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels.crop(crop).resize(pixels.size, Image.Resampling.BILINEAR).save(path, quality=95)
            width, height = pixels.size
            name = f"{FOLDER}/{number}.jpg"
            writer.images.append({"id": number, "file_name": name, "width": width, "height": height})
        images = [image for image in images if image["id"] not in crowded]


def find_empty_crop(
    size: tuple[int, int], boxes: Sequence[Sequence[float]], random: np.random.Generator
) -> Crop | None:
    """Find a random crop with the shape of the image that overlaps none of the boxes (x, y, width, height).

    None if ATTEMPTS random crops all overlap one, or if the image is smaller than MIN_SIDE.

    >>> find_empty_crop((100, 100), [(0, 0, 100, 100)], np.random.default_rng(0)) is None
    True
    """
    width, height = size
    least = max(MIN_SCALE, MIN_SIDE / min(size))
    if least > 1:
        return None
    for largest in np.linspace(1, least, ATTEMPTS):
        scale = random.uniform(least, largest)
        crop_width, crop_height = max(MIN_SIDE, int(width * scale)), max(MIN_SIDE, int(height * scale))
        x1, y1 = int(random.integers(width - crop_width + 1)), int(random.integers(height - crop_height + 1))
        x2, y2 = x1 + crop_width, y1 + crop_height
        if not any(x < x2 and x + w > x1 and y < y2 and y + h > y1 for x, y, w, h in boxes):
            return x1, y1, x2, y2
    return None
