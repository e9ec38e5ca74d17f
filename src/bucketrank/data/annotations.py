"""Annotation files in COCO format: find them in a folder, read them, and select the images of a split."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from bucketrank.errors import DataError

Document = dict[str, Any]

Part = Literal["all", "train", "val"]

MAX_PATH_BYTES, MAX_NAME_BYTES = 1000, 255  # limits of a path below the image folder, and of each name in it
MAX_ID = 2**63 - 1  # torch stores ids as int64
MAX_EXACT_ID = 2**53 - 1  # faster-coco-eval reads image and category ids as doubles
HELD_OUT = 0.1  # share of the images kept for validation if a folder has a single annotation file


@dataclass(frozen=True)
class Split:
    """An annotation file and its image folder.

    ``part`` selects the training or validation images of a single file. The images are sorted by the SHA-1 of
    ``"{seed} {id}"``; the first tenth (rounded, at least one, never all) is "val" and the rest "train". The result
    depends only on the ids and the seed. ``tuning`` splits these images once more, by ``share``, for trials that must
    not see the validation images.
    """

    annotations: Path  # file in COCO format
    images: Path  # image folder
    part: Part = "all"  # all, train or val
    seed: int = 0  # seed of both selections
    tuning: Part = "all"  # part of the second selection: all, train or val
    share: float = HELD_OUT  # share of the images that are val in the second selection

    def read(self) -> Document:
        """Read the file and keep only the images and annotations of this part."""
        document = read_json(self.annotations)
        missing = [name for name in ("images", "annotations", "categories") if name not in document]
        if missing:
            raise DataError(
                f"{self.annotations}: has no {missing[0]}; the COCO format has images, annotations, categories"
            )
        return self.select(document)

    def select(self, document: Document) -> Document:
        """Keep only the images and annotations of this part in the content of the whole file."""
        document = _part_of(document, self.part, seed=self.seed, share=HELD_OUT)
        # Another seed makes the second selection independent of the first.
        return _part_of(document, self.tuning, seed=self.seed + 1, share=self.share)

    def image_path(self, image: Mapping[str, Any]) -> Path:
        """Return the file path of an ``images`` entry; raise DataError if it leaves the folder."""
        return self.images / path_inside(file_name(image))


def _part_of(document: Document, part: Part, *, seed: int, share: float) -> Document:
    if part == "all":
        return document
    ids = [image["id"] for image in document["images"]]
    selected = held_out(ids, seed=seed, share=share)
    if part == "train":
        selected = set(ids) - selected
    return document | {
        "images": [image for image in document["images"] if image["id"] in selected],
        "annotations": [each for each in document["annotations"] if each["image_id"] in selected],
    }


def held_out(ids: list[int], *, seed: int, share: float = HELD_OUT) -> set[int]:
    """Choose the image ids that are kept for validation.

    >>> sorted(held_out(list(range(30)), seed=0))
    [2, 10, 29]
    """
    if len(ids) < 2:
        return set()
    order = sorted(ids, key=lambda each: hashlib.sha1(f"{seed} {each}".encode(), usedforsecurity=False).digest())
    return set(order[: min(len(ids) - 1, max(1, round(share * len(ids))))])


def read_json(path: Path) -> Document:
    """Read an annotation file; raise DataError with line and column if it is not JSON."""
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: does not exist; give the path of the annotation file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: line {error.lineno}, column {error.colno}: not JSON ({error.msg}); the file may be truncated: "
            "write or download it again"
        ) from error
    except RecursionError as error:
        raise DataError(f"{path}: nested too deeply to be annotations") from error
    except MemoryError as error:
        raise DataError(
            f"{path}: too large for the free memory; split it, or use a machine with more memory"
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: contains a number with too many digits; correct it") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a readable annotation file") from error
    if not isinstance(document, dict):
        raise DataError(
            f"{path}: expected an object with images, annotations and categories, got {_json_name(document)}; "
            "a list is the format of detections, not of annotations"
        )
    return document


def file_name(image: Mapping[str, Any]) -> str:
    """Return an image's path below the image folder; LVIS has no ``file_name`` and gives it in ``coco_url``.

    >>> file_name({"coco_url": "http://images.cocodataset.org/val2017/000000397133.jpg"})
    'val2017/000000397133.jpg'
    """
    if "file_name" in image:
        return str(image["file_name"])
    if "coco_url" in image:
        return "/".join(PurePosixPath(urlsplit(str(image["coco_url"])).path).parts[-2:])
    raise DataError(f"image {image.get('id')}: has no file_name; add the path below the image folder")


def path_inside(name: str) -> PurePosixPath:
    """Return the name as a relative path; raise DataError if it is absolute or leaves the folder through ``..``.

    Only the name is checked. A link in the folder may point elsewhere, like those of a converted data set.
    """
    if not is_text(name):
        raise DataError(f"the path {name!r:.60} is not valid Unicode; rename the file")
    if len(name.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in name.split("/")):
        raise DataError(f"the path {name!r:.60}... is too long; rename the file")
    path, windows = PurePosixPath(name), PureWindowsPath(name)
    depth = 0
    for part in windows.parts:  # split at / and \
        depth += -1 if part == ".." else part != "."
        if depth < 0:
            break
    if depth <= 0 or path.is_absolute() or windows.anchor or "\0" in name:
        raise DataError(f"the path {name!r} leaves the folder; give it relative to the folder, without ..")
    return path


def category_ids(document: Document) -> list[int]:
    """Return the category ids in ascending order; label ``k`` (from 1) is the k-th."""
    return sorted(category["id"] for category in document["categories"])


def size_of(image: Mapping[str, Any]) -> tuple[int, int]:
    """Return the height and width of an ``images`` entry."""
    return int(image["height"]), int(image["width"])


def clipped(box: Sequence[float], size: tuple[int, int]) -> tuple[float, float, float, float] | None:
    """Clip a box (x, y, width, height) to an image of (height, width); return its corners, or None if it is empty."""
    x, y, w, h = box
    height, width = size
    left, right = min(max(x, 0), width), min(max(x + w, 0), width)
    top, bottom = min(max(y, 0), height), min(max(y + h, 0), height)
    return (left, top, right, bottom) if right > left and bottom > top else None


def classes(document: Document) -> list[tuple[int, str]]:
    """Return the id and name of every category, in label order."""
    names = {category["id"]: category["name"] for category in document["categories"]}
    return [(number, names[number]) for number in category_ids(document)]


def is_text(value: object) -> bool:
    """Return whether the value is a string that UTF-8 can encode; JSON may contain lone surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def is_id(value: object) -> bool:
    """Return whether the value is a whole number that fits into 64 bits."""
    return type(value) is int and -MAX_ID <= value <= MAX_ID


def is_exact_as_double(number: int) -> bool:
    """Return whether a double can hold this id and no other integer is rounded to the same double.

    >>> is_exact_as_double(2**53 - 1), is_exact_as_double(2**53)
    (True, False)
    """
    return -MAX_EXACT_ID <= number <= MAX_EXACT_ID


def is_finite(value: object) -> bool:
    """Return whether the value is a number, and neither NaN nor infinite."""
    max_float = sys.float_info.max  # a Python int may be larger
    return isinstance(value, int | float) and not isinstance(value, bool) and -max_float <= value <= max_float


def usable_polygons(segmentation: list[list[float]]) -> list[list[float]]:
    """Drop polygons with fewer than three corners; the RLE codec would read a list of four numbers as a box."""
    return [polygon for polygon in segmentation if len(polygon) >= 6]


def polygon_area(polygon: Sequence[float]) -> float:
    """Compute the area of a polygon x1, y1, x2, y2, ... that does not cross itself.

    >>> polygon_area([0, 0, 4, 0, 4, 3])
    6.0
    """
    xs, ys = polygon[::2], polygon[1::2]
    next_xs, next_ys = [*xs[1:], xs[0]], [*ys[1:], ys[0]]
    twice: float = sum(map(mul, xs, next_ys)) - sum(map(mul, next_xs, ys))  # faster than a loop over the corners
    return abs(twice) / 2


def _json_name(value: object) -> str:
    return {list: "a list", str: "a string", type(None): "null"}.get(type(value), "a number")


class Splits(NamedTuple):
    """The training and validation splits of a folder; at least one of them is not None."""

    train: Split | None  # None if only the validation file exists
    val: Split | None  # validation images

    def with_holdout(self, share: float | None) -> Splits:
        """Replace the validation images by ``share`` of the training images; None changes nothing."""
        if share is None or self.train is None:
            return self
        return Splits(replace(self.train, tuning="train", share=share), replace(self.train, tuning="val", share=share))


class Layout(NamedTuple):
    """Annotation file and image folder, relative to the data set folder, for training and for validation."""

    train: tuple[str, str]
    val: tuple[str, str]


LAYOUTS = {
    "own": Layout(("train.json", "images"), ("val.json", "images")),
    "coco": Layout(
        ("annotations/instances_train2017.json", "train2017"), ("annotations/instances_val2017.json", "val2017")
    ),
    # LVIS splits COCO's images differently: the path in coco_url includes train2017 or val2017.
    "lvis": Layout(("annotations/lvis_v1_train.json", "."), ("annotations/lvis_v1_val.json", ".")),
    "roboflow": Layout(("train/_annotations.coco.json", "train"), ("valid/_annotations.coco.json", "valid")),
}


def find_splits(folder: Path | str, *, layout: str | None = None, seed: int = 0) -> Splits:
    """Find the training and validation splits of a folder in one of the known layouts.

    | layout | annotations | images |
    |---|---|---|
    | own | train.json, val.json | images/ (or next to the files) |
    | coco | annotations/instances_train2017.json | train2017/, val2017/ |
    | lvis | annotations/lvis_v1_train.json | train2017/, val2017/, by ``coco_url`` |
    | roboflow | train/_annotations.coco.json | train/, valid/ |

    Without ``layout``, the first layout with an existing annotation file is chosen. If only the validation file exists,
    ``train`` is None. If only the training file exists, or a single ``*.json`` with any other name, a tenth of its
    images, chosen by id and ``seed``, is kept for validation (see Split).

    Args:
        folder: data set folder, or the data.yaml in it.
        layout: own, coco, lvis or roboflow; by default the first that fits.
        seed: seed that chooses the validation images if there is a single file.
    """
    folder = Path(folder)
    if is_yaml(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise DataError(f"{folder}: the folder does not exist; give the data set folder")
    if layout is not None and layout not in LAYOUTS:
        raise DataError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    chosen = LAYOUTS if layout is None else {layout: LAYOUTS[layout]}
    for each in chosen.values():
        train, val = _split(folder, *each.train), _split(folder, *each.val)
        if train is not None and val is None:
            return _split_in_two(train, seed)
        if val is not None:
            return Splits(train, val)
    single = sorted(path for path in folder.glob("*.json") if path.is_file())
    if len(single) == 1 and layout is None:
        return _split_in_two(Split(single[0], _images(folder, "images")), seed)
    expected = "".join(f"\n  {name}: {each.train[0]}, {each.val[0]}" for name, each in chosen.items())
    expected += "\n  or a single *.json" if layout is None else ""
    others = f"; it has {len(single)} other *.json: " + ", ".join(path.name for path in single[:5]) if single else ""
    raise DataError(
        f"{folder}: no annotations found{others}. Looked for:{expected}\n"
        "Rename the files, or convert them: bucketrank convert --help"
    )


def is_yaml(path: Path) -> bool:
    """Return whether the path is a yaml file, such as the data.yaml of a YOLO data set."""
    return path.suffix in (".yaml", ".yml") and path.is_file()


def _split(folder: Path, annotations: str, images: str) -> Split | None:
    path = folder / annotations
    return Split(path, _images(folder, images)) if path.is_file() else None


def _images(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).is_dir() else folder


def _split_in_two(split: Split, seed: int) -> Splits:
    return Splits(replace(split, part="train", seed=seed), replace(split, part="val", seed=seed))
