"""The folder that a conversion writes: images/, and a file of annotations for each split."""

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

from bucketrank.data.pictures import opened
from bucketrank.data.problems import DataError


@dataclass(frozen=True)
class Written:
    """One file of annotations, and what is in it."""

    annotations: Path
    images: int
    objects: int
    crowds: int


class Writer:
    """Collects images and objects of one split after the other; each ends with ``write``."""

    def __init__(self, source: Path, folder: Path, *, categories: dict[int, str], copy: bool) -> None:
        if not source.is_dir():
            raise DataError(f"{source}: there is no such folder; give the folder to convert")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(f"{folder}: is there already and not empty; give a new folder to write to")
        self.source = source
        self.folder = folder
        self.categories = categories
        self.copy = copy
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []

    def add_image(self, path: Path) -> tuple[int, int, int]:
        """Link or copy an image, under its path in the source; returns its id, width and height."""
        with opened(path) as picture:
            width, height = picture.size
        name = path.relative_to(self.source).as_posix()
        place(path, self.folder / "images" / name, copy=self.copy)
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
        """An object by its box (x, y, width, height); ``area`` is that of the box unless given."""
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
        """End a split: its annotations go into ``split``.json."""
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
    """A text file; DataError if it cannot be read, or is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a file that can") from error


def place(source: Path, destination: Path, *, copy: bool) -> None:
    """A link to the file, or the file itself; it is also copied where the system makes no links."""
    if destination.is_symlink() or destination.exists():
        return  # in two splits
    destination.parent.mkdir(parents=True, exist_ok=True)
    if not copy:
        try:
            destination.symlink_to(os.path.relpath(source.resolve(), destination.parent.resolve()))
        except OSError:
            pass
        else:
            return
    shutil.copyfile(source, destination)


def encoded(mask: NDArray[np.bool_]) -> tuple[dict[str, Any], list[float], int]:
    """A mask (H, W) as compressed RLE, its box and its area."""
    rle = rle_codec.encode(np.asfortranarray(mask.astype(np.uint8)))
    box = [float(each) for each in rle_codec.toBbox(rle)]
    return {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}, box, int(rle_codec.area(rle))
