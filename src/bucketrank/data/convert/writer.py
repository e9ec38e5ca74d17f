"""Writing of a converted data set: the folder images/ and one annotation file per split."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as rle_codec
from numpy.typing import NDArray

from bucketrank.data.image_files import open_image
from bucketrank.data.problems import DataError


@dataclass(frozen=True)
class Written:
    """A written annotation file and the number of its images, objects and crowds."""

    annotations: Path
    images: int
    objects: int
    crowds: int


class Writer:
    """Collect the images and objects of one split after the other; ``write`` ends a split."""

    def __init__(self, source: Path, folder: Path, *, categories: dict[int, str], copy: bool) -> None:
        if not source.is_dir():
            raise DataError(f"{source}: the folder does not exist; give the folder to convert")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(f"{folder}: already exists and is not empty; give a new folder to write to")
        self.source = source
        self.folder = folder
        self.categories = categories
        self.copy = copy
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []

    def add_image(self, path: Path) -> tuple[int, int, int]:
        """Link or copy an image, under its path in the source; return its id, width and height."""
        with open_image(path) as image:
            width, height = image.size
        name = path.relative_to(self.source).as_posix()
        link_or_copy(path, self.folder / "images" / name, copy=self.copy)
        self.images.append({"id": len(self.images) + 1, "file_name": name, "width": width, "height": height})
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
    ) -> None:
        """Add an object with its box (x, y, width, height); ``area`` defaults to that of the box."""
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
        self.annotations.append(entry)

    def write(self, split: str) -> Written:
        """Write the annotations of a split to ``split``.json and start the next split."""
        path = self.folder / f"{split}.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        categories = [{"id": number, "name": name} for number, name in sorted(self.categories.items())]
        document = {"images": self.images, "annotations": self.annotations, "categories": categories}
        path.write_text(json.dumps(document), encoding="utf-8")
        crowds = sum(entry["iscrowd"] for entry in self.annotations)
        written = Written(path, len(self.images), len(self.annotations) - crowds, crowds)
        self.images, self.annotations = [], []
        return written


def read_text(path: Path) -> str:
    """Read a text file; raise DataError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a readable file") from error


def link_or_copy(source: Path, destination: Path, *, copy: bool) -> None:
    """Link to the file; copy it if ``copy`` is true or the system does not support links."""
    if destination.is_symlink() or destination.exists():
        return  # the image is in two splits
    destination.parent.mkdir(parents=True, exist_ok=True)
    if not copy:
        try:
            destination.symlink_to(os.path.relpath(source.resolve(), destination.parent.resolve()))
        except OSError:
            pass
        else:
            return
    shutil.copyfile(source, destination)


def encode_mask_and_box(mask: NDArray[np.bool_]) -> tuple[dict[str, Any], list[float], int]:
    """Return a mask (H, W) as compressed RLE, its box (x, y, width, height) and its area."""
    rle = rle_codec.encode(np.asfortranarray(mask.astype(np.uint8)))
    box = [float(each) for each in rle_codec.toBbox(rle)]
    return {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}, box, int(rle_codec.area(rle))
