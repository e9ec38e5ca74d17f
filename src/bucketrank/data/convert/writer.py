"""Write a converted data set: the folder images/ and one annotation file per split."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as rle_codec
from numpy.typing import NDArray

from bucketrank.data.images import is_turned, open_image
from bucketrank.errors import DataError

UNFINISHED = ".converting-"  # prefix of the hidden folder name; the process id follows


@dataclass(frozen=True)
class Written:
    """A written annotation file with its counts of images, objects and crowds."""

    annotations: Path
    images: int
    objects: int
    crowds: int


class Writer:
    """Collects the images and objects of one split after another; ``write`` ends a split.

    Use it in a ``with`` block. Files are written to a hidden folder inside ``folder`` and moved to their places at the
    end of the block. If the block raises, nothing is left. If the process is killed, only the hidden folder is left;
    the next conversion removes it. Images must lie in ``source``; with ``follow_links`` they may be links to other
    places, as in a converted data set.
    """

    def __init__(
        self, source: Path, folder: Path, *, categories: dict[int, str], copy: bool, follow_links: bool = False
    ) -> None:
        if not source.is_dir():
            raise DataError(f"{source}: the folder does not exist; give the folder to convert")
        if folder.exists() and not (folder.is_dir() and all(map(_is_abandoned, folder.iterdir()))):
            raise DataError(f"{folder}: already exists and is not empty; give a new folder to write to")
        self.source = source
        self.folder = folder
        self.unfinished = folder / f"{UNFINISHED}{os.getpid()}"
        self.categories = categories
        self.copy = copy
        self.follow_links = follow_links
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []

    def __enter__(self) -> Writer:
        self._created = [each for each in (self.folder, *self.folder.parents) if not each.exists()]
        if not self._created:
            for leftover in self.folder.iterdir():
                shutil.rmtree(leftover)
        self.unfinished.mkdir(parents=True)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            # Annotation files come last: the folder is a data set only once they exist.
            for path in sorted(self.unfinished.iterdir(), key=Path.is_file):
                path.rename(self.folder / path.name)
            self.unfinished.rmdir()
        else:
            shutil.rmtree(self.unfinished, ignore_errors=True)
            with suppress(OSError):  # another process may use a folder by now
                for folder in self._created:
                    folder.rmdir()

    def add_image(self, path: Path, *, upright: bool = False) -> tuple[int, int, int]:
        """Link or copy an image to the same relative path; return its id, width and height.

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
        link_or_copy(path, self.unfinished / "images" / name, final=self.folder / "images" / name, copy=self.copy)
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
        """Add an object with its box (x, y, width, height); ``area`` defaults to the box area."""
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
        """Write the collected annotations to ``split``.json and start the next split."""
        categories = [{"id": number, "name": name} for number, name in sorted(self.categories.items())]
        document = {"images": self.images, "annotations": self.annotations, "categories": categories}
        (self.unfinished / f"{split}.json").write_text(json.dumps(document), encoding="utf-8")
        crowds = sum(entry["iscrowd"] for entry in self.annotations)
        written = Written(self.folder / f"{split}.json", len(self.images), len(self.annotations) - crowds, crowds)
        self.images, self.annotations = [], []
        return written


def read_text(path: Path, *, source: Path) -> str:
    """Read a text file inside ``source``; raise DataError if it cannot be read or is not UTF-8."""
    require_inside(path, source)
    try:
        return path.read_text(encoding="utf-8")
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


def link_or_copy(source: Path, destination: Path, *, final: Path, copy: bool) -> None:
    """Link to the file; copy it if ``copy`` is true or the system does not support links.

    A relative link is written for its ``final`` path, to which the destination is moved later.
    """
    if destination.is_symlink() or destination.exists():
        return  # the image is in two splits
    destination.parent.mkdir(parents=True, exist_ok=True)
    if not copy:
        try:
            destination.symlink_to(os.path.relpath(source.resolve(), final.parent.resolve()))
        except OSError:
            pass
        else:
            return
    shutil.copyfile(source, destination)


def encode_mask_and_box(mask: NDArray[np.bool_]) -> tuple[dict[str, Any], list[float], int]:
    """Encode a mask (H, W) as compressed RLE; return it with its box (x, y, width, height) and area."""
    rle = rle_codec.encode(np.asfortranarray(mask.astype(np.uint8)))
    box = [float(each) for each in rle_codec.toBbox(rle)]
    return {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}, box, int(rle_codec.area(rle))


def _is_abandoned(path: Path) -> bool:
    """Return whether the path is the hidden folder of a process that no longer runs."""
    number = path.name.removeprefix(UNFINISHED)
    if number == path.name or not number.isdecimal() or path.is_symlink() or not path.is_dir():
        return False
    if int(number) == os.getpid():
        return True
    if os.name != "posix":
        return False
    try:
        os.kill(int(number), 0)  # sends no signal
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False
