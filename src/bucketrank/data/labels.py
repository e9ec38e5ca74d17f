"""Build a COCO document in memory from the images and label files of other formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as rle_codec
from numpy.typing import NDArray

from bucketrank.data.annotations import Document, Parsed
from bucketrank.data.images import is_turned, open_image
from bucketrank.data.problems import Problem
from bucketrank.errors import DataError


class DocumentBuilder:
    """Collects images and objects with ids from 1 and returns them as a COCO document.

    Images must lie in ``source``; with ``follow_links`` they may be links to other places.
    """

    def __init__(self, source: Path, *, categories: Mapping[int, str], follow_links: bool) -> None:
        self.source = source
        self.categories = categories
        self.follow_links = follow_links
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.places: dict[str, tuple[str, str | None]] = {}

    def add_image(self, path: Path, *, upright: bool = False) -> tuple[int, int, int]:
        """Add an image file; return its id, width and height.

        With ``upright``, raise DataError if EXIF asks to rotate the image: its boxes may refer to the rotated pixels,
        but training reads the stored ones.
        """
        if not self.follow_links:
            require_inside(path, self.source)
        with open_image(path) as image:
            width, height = image.size
            if upright and is_turned(image):
                raise DataError(
                    f"{path}: EXIF asks to rotate or mirror the image, so the boxes may not fit the stored pixels; "
                    "store the pixels upright and remove the EXIF orientation, for example with mogrify -auto-orient"
                )
        name = path.relative_to(self.source).as_posix()
        self.images.append({"id": len(self.images) + 1, "file_name": name, "width": width, "height": height})
        self.places[f"image {len(self.images)}"] = (str(path), None)
        return len(self.images), width, height

    def add_object(
        self,
        image_id: int,
        category_id: int,
        *,
        box: list[float],
        area: float | None = None,
        crowd: bool = False,
        segmentation: Any = None,
        place: tuple[Path, int] | None = None,
    ) -> None:
        """Add an object with its box (x, y, width, height); ``area`` defaults to the box area.

        ``place`` is the label file and the line for messages.
        """
        entry: dict[str, Any] = {
            "id": len(self.annotations) + 1,
            "image_id": image_id,
            "category_id": category_id,
            "bbox": box,
            "area": box[2] * box[3] if area is None else area,
            "iscrowd": int(crowd),
        }
        if segmentation is not None:
            entry["segmentation"] = segmentation
        if place is not None:
            self.places[f"annotation {entry['id']}"] = (str(place[0]), f"line {place[1]}")
        self.annotations.append(entry)

    def document(self) -> Document:
        """Return the images and objects collected so far, with the categories in ascending order of their ids."""
        categories = [{"id": number, "name": name} for number, name in sorted(self.categories.items())]
        return {"images": self.images, "annotations": self.annotations, "categories": categories}

    def parsed(self, problems: list[Problem]) -> Parsed:
        """Return the document with the problems of its label files."""
        return Parsed(json.dumps(self.document()), self.places, problems)


def encode_mask(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Encode a mask (H, W) as compressed RLE, ready for JSON."""
    rle = rle_codec.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}


def file_problem(path: Path, code: str, error: DataError) -> Problem:
    """Turn an error about a file into a problem; a missing image gets the code image-missing."""
    missing = code == "image-unreadable" and isinstance(error.__cause__, FileNotFoundError)
    return Problem(str(path), "image-missing" if missing else code, None, str(error).removeprefix(f"{path}: "))


def read_text(path: Path, *, source: Path, follow_links: bool = False) -> str:
    """Read a text file inside ``source``; raise DataError if it cannot be read or is not UTF-8."""
    if not follow_links:
        require_inside(path, source)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a readable file") from error


def require_inside(path: Path, source: Path) -> None:
    """Raise DataError if links on the path lead out of the folder ``source``."""
    try:
        inside = path.resolve().is_relative_to(source.resolve())
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); replace the link with a file") from error
    if not inside:
        raise DataError(f"{path}: is a link to a file outside {source}; copy the file into the folder")
