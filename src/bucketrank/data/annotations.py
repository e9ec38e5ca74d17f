"""An annotation file in COCO's format, and where its images lie."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal
from urllib.parse import urlsplit

from bucketrank.data.problems import DataError

Document = dict[str, Any]

LONGEST, LONGEST_PART = 1000, 255  # bytes of a path below the folder of images, and of a name in it
LARGEST_ID = 2**63 - 1  # of torch's whole numbers
HELD_OUT = 0.1  # of the images, where a folder comes with one annotation file


@dataclass(frozen=True)
class Split:
    """Annotations and the folder of their images.

    ``part`` divides a single file: the images are put in the order of the SHA-1 of ``"{seed} {id}"``, the first tenth
    (rounded, at least one, never all) is "val" and the rest "train". The division depends on the ids alone.
    """

    annotations: Path
    images: Path
    part: Literal["all", "train", "val"] = "all"
    seed: int = 0

    def read(self) -> Document:
        """The file's content, with the images and annotations of this part only."""
        document = read_json(self.annotations)
        missing = [name for name in ("images", "annotations", "categories") if name not in document]
        if missing:
            raise DataError(
                f"{self.annotations}: has no {missing[0]}; COCO's format has images, annotations, categories"
            )
        return self.of(document)

    def of(self, document: Document) -> Document:
        """This part of the whole file's content."""
        if self.part == "all":
            return document
        ids = [image["id"] for image in document["images"]]
        wanted = held_out(ids, seed=self.seed)
        if self.part == "train":
            wanted = set(ids) - wanted
        return document | {
            "images": [image for image in document["images"] if image["id"] in wanted],
            "annotations": [each for each in document["annotations"] if each["image_id"] in wanted],
        }

    def image_path(self, image: Mapping[str, Any]) -> Path:
        """Where the file of an entry of ``images`` lies; DataError if its name leads out of the folder."""
        return self.images / inside(file_name(image))


def held_out(ids: list[int], *, seed: int) -> set[int]:
    """The ids that are kept for validation.

    >>> sorted(held_out(list(range(30)), seed=0))
    [2, 10, 29]
    """
    if len(ids) < 2:
        return set()
    order = sorted(ids, key=lambda each: hashlib.sha1(f"{seed} {each}".encode(), usedforsecurity=False).digest())
    return set(order[: max(1, round(HELD_OUT * len(ids)))])


def read_json(path: Path) -> Document:
    """An annotation file; DataError names the line and column of what is not JSON."""
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; give the annotation file's path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: line {error.lineno}, column {error.colno}: not JSON ({error.msg}); the file may be cut off, "
            "write or download it again"
        ) from error
    except RecursionError as error:
        raise DataError(f"{path}: nested too deeply to be annotations") from error
    except ValueError as error:
        raise DataError(f"{path}: holds a number of more digits than can be read; correct it") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give an annotation file that can") from error
    if not isinstance(document, dict):
        raise DataError(
            f"{path}: expected an object with images, annotations and categories, got {_json_name(document)}; "
            "a list is what detections are stored as, not annotations"
        )
    return document


def file_name(image: Mapping[str, Any]) -> str:
    """The image's file below the folder of images. LVIS gives no ``file_name``: its folder and name end ``coco_url``.

    >>> file_name({"coco_url": "http://images.cocodataset.org/val2017/000000397133.jpg"})
    'val2017/000000397133.jpg'
    """
    if "file_name" in image:
        return str(image["file_name"])
    if "coco_url" in image:
        return "/".join(PurePosixPath(urlsplit(str(image["coco_url"])).path).parts[-2:])
    raise DataError(f"image {image.get('id')}: has no file_name; add the path below the folder of images")


def inside(name: str) -> PurePosixPath:
    """The name as a relative path; DataError if it is absolute or climbs out by ``..``.

    Only the name is judged: a link in the folder may point elsewhere, as a converted data set's do.
    """
    if not is_text(name):
        raise DataError(f"the path {name!r:.60} is no text; rename the file")
    if len(name.encode()) > LONGEST or any(len(part.encode()) > LONGEST_PART for part in name.split("/")):
        raise DataError(f"the path {name!r:.60}... is longer than a path can be; rename the file")
    path, windows = PurePosixPath(name), PureWindowsPath(name)
    depth = 0
    for part in windows.parts:  # both kinds of slashes
        depth += -1 if part == ".." else part != "."
        if depth < 0:
            break
    if depth <= 0 or path.is_absolute() or windows.anchor or "\0" in name:
        raise DataError(f"the path {name!r} leaves the folder; give it relative to the folder, without ..")
    return path


def category_ids(document: Document) -> list[int]:
    """The categories' ids in ascending order: label ``k`` (from 1) is the k-th."""
    return sorted(category["id"] for category in document["categories"])


def size_of(image: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width."""
    return int(image["height"]), int(image["width"])


def clipped(box: Sequence[float], size: tuple[int, int]) -> tuple[float, float, float, float] | None:
    """The corners of a box (x, y, width, height) within an image of (height, width); None if nothing is left of it."""
    x, y, w, h = box
    height, width = size
    left, right = min(max(x, 0), width), min(max(x + w, 0), width)
    top, bottom = min(max(y, 0), height), min(max(y + h, 0), height)
    return (left, top, right, bottom) if right > left and bottom > top else None


def classes(document: Document) -> list[tuple[int, str]]:
    """Id and name of every category, in the order of the labels."""
    names = {category["id"]: category["name"] for category in document["categories"]}
    return [(number, names[number]) for number in category_ids(document)]


def is_text(value: object) -> bool:
    """Whether it can be printed and written: JSON may hold halves of characters."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def usable_id(value: object) -> bool:
    """Whether it is a whole number that fits into 64 bits."""
    return type(value) is int and -LARGEST_ID <= value <= LARGEST_ID


def finite(value: object) -> bool:
    """Whether it is a number, and neither NaN nor infinite."""
    largest = sys.float_info.max  # a whole number may be larger than any float
    return isinstance(value, int | float) and not isinstance(value, bool) and -largest <= value <= largest


def usable_polygons(segmentation: list[list[float]]) -> list[list[float]]:
    """Those with at least three corners; a list of four numbers would be read as a box."""
    return [polygon for polygon in segmentation if len(polygon) >= 6]


def _json_name(value: object) -> str:
    return {list: "a list", str: "a text", type(None): "null"}.get(type(value), "a number")
