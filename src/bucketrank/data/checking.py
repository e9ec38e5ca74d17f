"""Everything that is wrong with a data set, before training finds out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

from faster_coco_eval.core import mask as rle_codec

from bucketrank.data.annotations import (
    Document,
    Split,
    classes,
    clipped,
    file_name,
    finite,
    inside,
    is_text,
    read_json,
    size_of,
    usable_id,
)
from bucketrank.data.pictures import opened, read_picture, stored_turned
from bucketrank.data.problems import DataError, Problem, raise_errors

Depth = Literal["annotations", "headers", "pixels"]
Entry = dict[str, Any]

TOLERANCE = 1.0  # pixels that a box may stick out of its image: clipped without a word
LARGEST = 2 * 89_478_485  # pixels of a mask; Pillow opens no larger image
NO_IMAGES = "there are no images; training needs at least one"
FEW_IMAGES = 5000  # are decoded before training; of more, only the headers are read


def check(
    split: Split,
    *,
    masks: bool = False,
    depth: Depth | None = "pixels",
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """The problems of a split, in the order of the file.

    An error stops training; a warning says what training will do by itself. ``masks`` asks for a mask of every object.
    Of the image files, "headers" reads the size, "pixels" decodes them all, "annotations" none;
    with None up to 5000 are decoded, and of more the headers are read.
    ``progress(done, total)`` is called after each image.
    """
    report = Report(split)
    document = report.document()
    if document is None:
        return report.problems
    if depth is None:
        depth = "headers" if len(document["images"]) > FEW_IMAGES else "pixels"
    categories = check_categories(report, document["categories"])
    sizes = check_images(report, document["images"])
    check_annotations(report, document["annotations"], sizes=sizes, categories=categories, masks=masks)
    if depth != "annotations":
        images = list(report.known.values())
        report.problems += check_files(split, images, pixels=depth == "pixels", workers=workers, progress=progress)
    return report.problems


def require_sound(split: Split, *, masks: bool = False, depth: Depth | None = None) -> None:
    """Raise one DataError with the first 20 errors, if there are any (see check)."""
    raise_errors(check(split, masks=masks, depth=depth))


class Content(NamedTuple):
    """What two splits must agree on, and what there is to learn."""

    split: Split
    classes: list[tuple[int, str]]
    images: int
    objects: int

    @classmethod
    def of(cls, split: Split) -> Content:
        """Of a sound split."""
        document = split.read()
        sizes = {image["id"]: size_of(image) for image in document["images"]}
        objects = (entry for entry in document["annotations"] if not entry.get("iscrowd", 0))
        learnt = sum(clipped(entry["bbox"], sizes[entry["image_id"]]) is not None for entry in objects)
        return cls(split, classes(document), len(sizes), learnt)


def check_pair(train: Content, val: Content) -> list[Problem]:
    """What stops training though either split is sound: nothing to learn or to evaluate, or different classes."""
    problems = []
    file = str(train.split.annotations)
    if not train.objects:
        text = "no image has an object to learn; mark objects, crowds and boxes without area do not count"
        problems.append(Problem(file, "no-objects", None, text))
    if not val.images:
        problems.append(Problem(str(val.split.annotations), "no-images", None, NO_IMAGES))
    if train.classes != val.classes:
        text = f"expected the categories of {file}, got others: {sorted({*train.classes} ^ {*val.classes})[:5]}"
        text += "; list the same ids and names in both"
        problems.append(Problem(str(val.split.annotations), "other-classes", None, text))
    return problems


class Report:
    """Collects the problems of one annotation file."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.problems: list[Problem] = []
        self.known: dict[object, Entry] = {}  # the images with a usable id

    def error(self, kind: str, where: str | None, message: str) -> None:
        self.problems.append(Problem(str(self.split.annotations), kind, where, message))

    def warning(self, kind: str, where: str | None, message: str) -> None:
        self.problems.append(Problem(str(self.split.annotations), kind, where, message, "warning"))

    def document(self) -> Document | None:
        """The split's content, or None if it has not the shape of annotations at all."""
        try:
            document = read_json(self.split.annotations)
        except DataError as error:
            self.error("bad-json", None, str(error).removeprefix(f"{self.split.annotations}: "))
            return None
        for name in ("images", "annotations", "categories"):
            entries = document.get(name)
            if not isinstance(entries, list):
                self.error("missing-field", name, f"expected a list named {name!r}; COCO's format has three such lists")
                continue
            for position, entry in enumerate(entries):
                where = f"{name}[{position}]"
                if not isinstance(entry, dict):
                    self.error("wrong-type", where, f"expected an object, got {entry!r:.40}; remove or repair it")
                elif not usable_id(entry.get("id")):
                    self.error("missing-field", where, f"expected a whole number as id, got {entry.get('id')!r:.40}")
                elif name == "annotations" and not usable_id(entry.get("image_id")):
                    got = f"{entry.get('image_id')!r:.40}"
                    self.error("missing-field", where, f"expected a whole number as image_id, got {got}")
        return None if self.problems else self.split.of(document)

    def unique(self, noun: str, entries: Iterable[Entry]) -> dict[object, Entry]:
        """The entries by id; of several with the same id, the first."""
        found: dict[object, Entry] = {}
        for entry in entries:
            if entry["id"] in found:
                self.error("duplicate-id", f"{noun} {entry['id']}", f"this id is used twice; give every {noun} its own")
            found.setdefault(entry["id"], entry)
        return found


def check_categories(report: Report, categories: list[Entry]) -> set[object]:
    """The known ids."""
    if not categories:
        report.error("unknown-category", None, "there are no categories; list every class with its id and name")
    names: dict[str, object] = {}
    found = report.unique("category", categories)
    for number, category in found.items():
        name = category.get("name")
        if not isinstance(name, str) or not is_text(name):
            report.error("missing-field", f"category {number}", "has no name; add the class's name as text")
        elif names.setdefault(name, number) != number:
            text = f"has the name {name!r} of category {names[name]}; reports will not tell them apart"
            report.warning("duplicate-name", f"category {number}", text)
    return set(found)


def check_images(report: Report, images: list[Entry]) -> dict[object, tuple[int, int] | None]:
    """Width and height of every image; None where the file does not give them."""
    if not images:
        report.error("no-images", None, NO_IMAGES)
    report.known = report.unique("image", images)
    files: dict[str, object] = {}
    sizes: dict[object, tuple[int, int] | None] = {}
    for number, image in report.known.items():
        where = f"image {number}"
        width, height = image.get("width"), image.get("height")
        if type(width) is int and type(height) is int and width > 0 and height > 0:
            sizes[number] = width, height
        else:
            sizes[number] = None
            text = f"expected width and height as whole numbers above 0, got {width!r:.20} and {height!r:.20}"
            report.error("missing-field", where, f"{text}; write the size of the image file")
        try:
            name = file_name(image)
            inside(name)
        except DataError as error:
            kind = "path-leaves-folder" if "leaves" in str(error) else "missing-field"
            report.error(kind, where, str(error).removeprefix(f"{where}: "))
            continue
        if files.setdefault(name, number) != number:
            report.warning("duplicate-file", where, f"shows the same file as image {files[name]}: {name}")
    return sizes


def check_annotations(
    report: Report,
    annotations: list[Entry],
    *,
    sizes: dict[object, tuple[int, int] | None],
    categories: set[object],
    masks: bool,
) -> None:
    """Every object: what it belongs to, its box and its mask."""
    for number, entry in report.unique("annotation", annotations).items():
        where = f"annotation {number}"
        if entry["image_id"] not in sizes:
            text = f"belongs to image {entry['image_id']}, which is not listed; add the image or remove the annotation"
            report.error("unknown-image", where, text)
        category = entry.get("category_id")
        if type(category) is not int or category not in categories:
            text = f"is of category {category!r:.40}, which is not listed; add it to categories"
            report.error("unknown-category", where, text)
        if entry.get("iscrowd", 0) not in (0, 1):
            report.error("wrong-type", where, f"expected iscrowd 0 or 1, got {entry['iscrowd']!r:.40}")
        if "area" in entry and not finite(entry["area"]):
            report.error("not-a-number", where, f"expected a finite area, got {entry['area']!r:.40}; leave it out")
        size = sizes.get(entry["image_id"])
        check_box(report, where, entry.get("bbox"), size)
        check_mask(report, where, entry.get("segmentation"), size, wanted=masks)


def check_box(report: Report, where: str, box: object, size: tuple[int, int] | None) -> None:
    """x, y, width and height."""
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(each, int | float) for each in box):
        report.error("bad-box", where, f"expected bbox as [x, y, width, height], got {box!r:.60}")
        return
    if not all(map(finite, box)):
        report.error("not-a-number", where, f"expected finite numbers in bbox, got {box}; remove the annotation")
        return
    x, y, width, height = box
    if width < 0 or height < 0:
        text = f"bbox {box} has a negative width or height; bbox is [x, y, width, height], not two corners"
        report.error("bad-box", where, text)
        return
    if width == 0 or height == 0:
        report.warning("box-without-area", where, f"bbox {box} has no area; training leaves it out")
        return
    if size is None:
        return
    gap = max(-x - width, -y - height, x - size[0], y - size[1])
    out = max(-x, -y, x + width - size[0], y + height - size[1])
    of = f"bbox {box} in an image of {size[0]} x {size[1]}"
    if gap >= TOLERANCE:
        text = f"{of} lies wholly outside; bbox is [x, y, width, height] in pixels of the stored image"
        report.error("box-outside", where, text)
    elif gap >= 0:
        report.warning("box-without-area", where, f"{of} has no area inside; training leaves it out")
    elif out > TOLERANCE:
        report.warning("box-sticks-out", where, f"{of} sticks out by {out:g} pixels; training clips it")


def check_mask(report: Report, where: str, mask: object, size: tuple[int, int] | None, *, wanted: bool) -> None:
    """Polygons, or runs as counts or as text."""
    if mask is None or mask == []:
        if wanted:
            report.error("no-mask", where, "has no segmentation; a model with masks needs polygons or RLE")
    elif isinstance(mask, list):
        check_polygons(report, where, mask, size)
    elif isinstance(mask, dict):
        check_rle(report, where, mask, size)
    else:
        report.error("bad-mask", where, f"expected segmentation as polygons or RLE, got {mask!r:.40}")


def check_polygons(report: Report, where: str, polygons: list[Any], size: tuple[int, int] | None) -> None:
    """Each a list x1, y1, x2, y2, ... of at least three corners."""
    corners: list[float] = []
    for position, polygon in enumerate(polygons):
        name = f"polygon {position}"
        if not isinstance(polygon, list) or not all(isinstance(each, int | float) for each in polygon):
            report.error("bad-polygon", where, f"{name}: expected a list [x1, y1, x2, y2, ...], got {polygon!r:.40}")
        elif not all_finite(polygon):
            report.error("not-a-number", where, f"{name} holds NaN or infinity; draw it again")
        elif len(polygon) % 2:
            text = f"{name} has {len(polygon)} numbers, which are no pairs of x and y; draw it again"
            report.error("bad-polygon", where, text)
        elif len(polygon) < 6:
            text = f"{name} has {len(polygon) // 2} corners, fewer than 3; it is left out of the mask"
            report.warning("bad-polygon", where, text)
        else:
            corners += polygon
    if size is not None and corners:
        xs, ys = corners[::2], corners[1::2]
        if max(xs) <= 0 or max(ys) <= 0 or min(xs) >= size[0] or min(ys) >= size[1]:
            text = f"the mask lies wholly outside the image of {size[0]} x {size[1]}; give pixels of the stored image"
            report.error("mask-outside", where, text)
        elif min(xs) < -size[0] or min(ys) < -size[1] or max(xs) > 2 * size[0] or max(ys) > 2 * size[1]:
            # Drawing costs the length of the border, also of what is cut off.
            text = f"the polygons reach further than an image's size out of the image of {size[0]} x {size[1]}"
            report.error("bad-polygon", where, f"{text}; give pixels of the stored image")


def check_rle(report: Report, where: str, mask: Entry, size: tuple[int, int] | None) -> None:
    """``size`` [height, width] and ``counts``, column by column."""
    extent, counts = mask.get("size"), mask.get("counts")
    if not (isinstance(extent, list) and len(extent) == 2 and all(type(each) is int and each > 0 for each in extent)):
        report.error("bad-rle", where, f"expected the RLE's size as [height, width], got {extent!r:.40}")
        return
    if size is not None and extent != [size[1], size[0]]:
        text = f"the RLE is for {extent[1]} x {extent[0]}, the image is {size[0]} x {size[1]}; encode the mask again"
        report.error("rle-size", where, text)
        return
    pixels = extent[0] * extent[1]
    if pixels > LARGEST:
        report.error(
            "bad-rle", where, f"the RLE is for {extent[1]} x {extent[0]}, larger than any image that can be read"
        )
        return
    advice = f"do not fill the {pixels} pixels of the mask; encode it again"
    if isinstance(counts, list):
        if not all(type(each) is int and each >= 0 for each in counts):
            report.error("bad-rle", where, "expected whole numbers of 0 or more as counts; encode the mask again")
        elif sum(counts) != pixels:
            report.error("rle-counts", where, f"the RLE's counts sum to {sum(counts)} and {advice}")
    elif isinstance(counts, str):
        try:
            rle_codec.decode({"size": extent, "counts": counts})
        except (RuntimeError, ValueError):
            report.error("rle-counts", where, f"the RLE's compressed counts {advice}")
    else:
        report.error("bad-rle", where, f"expected the RLE's counts as a list or a text, got {counts!r:.40}")


def check_files(
    split: Split,
    images: list[Entry],
    *,
    pixels: bool,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """The problems of the image files; decoding runs on ``workers`` threads, one for each core by default."""
    problems: list[Problem] = []
    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1)
    try:
        found = pool.map(lambda image: check_file(split, image, pixels=pixels), images)
        for done, each in enumerate(found, start=1):
            problems += each
            if progress is not None:
                progress(done, len(images))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, not all the rest
    return problems


def check_file(split: Split, image: Entry, *, pixels: bool) -> list[Problem]:
    """One image file against its entry."""
    try:
        path = split.image_path(image)
    except DataError:
        return []  # said already, of the entry
    where = f"image {image['id']}"

    def told(kind: str, message: str, severity: Literal["error", "warning"] = "error") -> list[Problem]:
        return [Problem(str(path), kind, where, message.removeprefix(f"{path}: "), severity)]

    try:
        with opened(path) as picture:
            size, turned = picture.size, stored_turned(picture)
        if pixels:
            read_picture(path)
    except DataError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        return told("image-missing" if missing else "image-unreadable", str(error))
    expected = image.get("width"), image.get("height")
    if size == expected:
        if turned:
            text = "EXIF says it is to be turned; it is read as stored, where width and height fit the annotations"
            return told("image-turned", text, "warning")
        return []
    text = f"the file is {size[0]} x {size[1]}, its entry says {expected[0]} x {expected[1]}"
    if turned and size == expected[::-1]:
        text += "; EXIF says it is to be turned, which is not applied: store the pixels upright"
        return told("image-size", f"{text} and remove the EXIF orientation")
    return told("image-size", f"{text}; correct the entry, and see whether the boxes fit")


def all_finite(numbers: Sequence[float]) -> bool:
    """Whether none is NaN, infinite, or a whole number larger than any float."""
    try:
        return math.isfinite(sum(numbers)) or all(map(finite, numbers))  # the sum is quicker
    except OverflowError:
        return False


def relative(problem: Problem, folder: Path) -> str:
    """The problem's file as seen from the folder."""
    path = Path(problem.file)
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else problem.file
