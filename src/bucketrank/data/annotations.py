"""The annotations of a split: read a file in COCO format, or label files of another one, and select the images."""

from __future__ import annotations

import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from bucketrank.data.problems import Problem, raise_errors
from bucketrank.errors import DataError

Document = dict[str, Any]

Part = Literal["all", "train", "val"]

MAX_PATH_BYTES, MAX_NAME_BYTES = 1000, 255  # limits of a path below the image folder, and of each name in it
MAX_ID = 2**63 - 1  # torch stores ids as int64
MAX_EXACT_ID = 2**53 - 1  # faster-coco-eval reads image and category ids as doubles, which round larger ones
HELD_OUT = 0.1  # share of the images kept for validation if a folder has a single annotation file


class Parsed(NamedTuple):
    """The content of a subset's label files, and the problems found while reading them.

    The document is kept as JSON: one compact object, from which every reader gets a copy of its own.
    """

    text: str  # the document as JSON
    places: Mapping[str, tuple[str, str | None]]  # "annotation 3": label file and line; "image 2": image file
    problems: list[Problem]

    def document(self) -> Document:
        """Return the document without the images and objects that have problems."""
        document: Document = json.loads(self.text)
        return document


@dataclass(frozen=True)
class LabelFiles(ABC):
    """A data set whose subsets (train, val, ...) have label files of their own, parsed at the first use.

    Label files and images lie below ``folder``. Links may lead out of it only with ``follow_links``. The content is
    read once per object: ``find_splits`` makes a new one, which sees changed files.
    """

    folder: Path
    follow_links: bool = True
    _parsed: dict[str, Parsed] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    @abstractmethod
    def source(self) -> Path:
        """The file or folder that names the data set in messages."""

    @abstractmethod
    def subsets(self) -> list[str]:
        """List the subsets: some of train, val and test, or only "annotations" for a data set without subsets."""

    @abstractmethod
    def parse(self, subset: str) -> Parsed:
        """Read the label files of a subset; raise DataError if not even its images can be listed."""

    def parsed(self, subset: str) -> Parsed:
        """Return the content of a subset; its files are read by the first call."""
        if subset not in self._parsed:
            self._parsed[subset] = self.parse(subset)
        return self._parsed[subset]

    def read(self, subset: str) -> Document:
        """Return the document of a subset; raise DataError if a label file has an error."""
        parsed = self.parsed(subset)
        errors = [problem for problem in parsed.problems if problem.severity == "error"]
        if len(errors) == 1:
            raise DataError(str(errors[0]))
        raise_errors(errors)
        return parsed.document()

    def __getstate__(self) -> dict[str, Any]:
        # Data-loading workers need no annotations.
        return {**self.__dict__, "_parsed": {}}


@dataclass(frozen=True)
class Split:
    """An annotation file and its image folder, or a ``subset`` of a data set in another format.

    ``part`` selects the training or validation images of a single file. The images are sorted by the SHA-1 of
    ``"{seed} {id}"``; the first tenth (rounded, at least one, never all) is "val" and the rest "train". The result
    depends only on the ids and the seed. ``tuning`` splits these images once more, by ``share``, for trials that must
    not see the validation images.
    """

    annotations: Path  # file in COCO format; for another format, its yaml file or folder
    images: Path  # image folder
    part: Part = "all"  # all, train or val
    seed: int = 0  # seed of both selections
    tuning: Part = "all"  # part of the second selection: all, train or val
    share: float = HELD_OUT  # share of the images that are val in the second selection

    labels: LabelFiles | None = None  # the label files, if the format is not COCO
    subset: str = ""  # which of the label files: train, val, test, or annotations for all

    @property
    def name(self) -> str:
        """The annotation file, or the folder with the subset, for messages."""
        return str(self.annotations) if self.labels is None else f"{self.annotations} ({self.subset})"

    @property
    def whole(self) -> Split:
        """The split with all images of its file or subset."""
        return Split(self.annotations, self.images, labels=self.labels, subset=self.subset)

    @property
    def is_annotated(self) -> bool:
        """Whether the file or subset has any annotation."""
        document = read_json(self.annotations) if self.labels is None else self.labels.parsed(self.subset).document()
        return bool(document.get("annotations"))

    def read(self) -> Document:
        """Read the annotations and keep only the images and annotations of this part."""
        if self.labels is not None:
            return self.select(self.labels.read(self.subset))
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
    return set(shuffled(ids, seed)[: min(len(ids) - 1, max(1, round(share * len(ids))))])


def shuffled(keys: Iterable[int], seed: int) -> list[int]:
    """Sort keys by the SHA-1 of ``"{seed} {key}"``, so that the order depends on nothing else."""
    return sorted(keys, key=lambda key: hashlib.sha1(f"{seed} {key}".encode(), usedforsecurity=False).digest())


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


def by_image(entries: Iterable[dict[str, Any]]) -> defaultdict[int, list[dict[str, Any]]]:
    """Group annotations or detections by image id."""
    groups: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        groups[entry["image_id"]].append(entry)
    return groups


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
    """Return the id and name of every category, in label order: label ``k`` (from 1) has the k-th id."""
    return sorted((category["id"], category["name"]) for category in document["categories"])


def is_text(value: object) -> bool:
    """Return whether the value is a string that UTF-8 can encode; JSON may contain lone surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def is_id(value: object) -> bool:
    """Return whether the value is a whole number that fits into 64 bits."""
    return type(value) is int and -MAX_ID <= value <= MAX_ID


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


def is_yaml(path: Path) -> bool:
    """Return whether the path is a yaml file, such as the data.yaml of a YOLO data set."""
    return path.suffix in (".yaml", ".yml") and path.is_file()
