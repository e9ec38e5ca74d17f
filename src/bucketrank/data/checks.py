"""Checks of a data set before training: the annotation file, the image files, and a pair of splits."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

from faster_coco_eval.core import mask as rle_codec

from bucketrank.data.annotations import (
    MAX_EXACT_ID,
    Document,
    LabelFiles,
    Split,
    classes,
    clipped,
    file_name,
    is_finite,
    is_id,
    is_text,
    path_inside,
    polygon_area,
    read_json,
    size_of,
    usable_polygons,
)
from bucketrank.data.images import is_turned, open_image, read_image
from bucketrank.data.problems import Problem, Severity, counted, raise_errors
from bucketrank.errors import DataError, short_repr
from bucketrank.settings.choices import MAX_PIXELS

Entry = dict[str, Any]
Depth = Literal["annotations", "headers", "pixels"]

FEW_IMAGES = 5000  # up to this number, all images are decoded before training; beyond it, only the headers are read
TOLERANCE = 1.0  # pixels by which a box may stick out of its image; it is clipped without a warning
LARGE_POLYGON = 4.0  # square pixels; a polygon of this area is assumed to cover a pixel, which saves drawing it
NO_AREA = 1e-4  # square pixels; a smaller polygon area is a rounding error


def check(
    split: Split,
    *,
    masks: bool = False,
    depth: Depth | None = "pixels",
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Check a ``split`` and return its problems in file order.

    An error stops training; a warning says how training deals with the problem. ``masks`` requires a mask for every
    object. ``depth`` says how much of each image file is read: "annotations" nothing, "headers" the size, "pixels"
    everything. None means "pixels" for up to 5000 images and "headers" for more. The images are read by ``workers``
    threads, by default one per CPU core. ``progress``, if given, is called after each image with the number of images
    done and their total.
    """
    if not isinstance(split, Split):
        raise TypeError(f"check: expected a Split, as find_splits returns for a folder, got {type(split).__name__}")
    report = AnnotationReport(split)
    document = report.read()
    if document is None:
        return report.problems
    if depth is None:
        depth = "headers" if len(document["images"]) > FEW_IMAGES else "pixels"
    categories = check_categories(report, document["categories"])
    sizes = check_images(report, document["images"])
    check_annotations(report, document["annotations"], sizes=sizes, categories=categories, masks=masks)
    if depth != "annotations":
        images = list(report.images.values())
        report.problems += check_files(split, images, pixels=depth == "pixels", workers=workers, progress=progress)
    return report.problems


def require_sound(split: Split, *, masks: bool = False, depth: Depth | None = None) -> None:
    """Raise one DataError with the first 20 errors of ``check``; ``split``, ``masks`` and ``depth`` are its own."""
    raise_errors(check(split, masks=masks, depth=depth))


class AnnotationReport:
    """The problems of one annotation file, collected by the checks below."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.problems: list[Problem] = []
        self.images: dict[object, Entry] = {}  # id: entry
        self.errors = 0  # number of errors among the problems

    def error(self, code: str, where: str | None, message: str) -> None:
        self.errors += 1
        self._add(code, where, message, "error")

    def warning(self, code: str, where: str | None, message: str) -> None:
        self._add(code, where, message, "warning")

    def _add(self, code: str, where: str | None, message: str, severity: Severity) -> None:
        # The annotation file with the given id, or the label file and its line.
        places = {} if self.split.labels is None else self.split.labels.parsed(self.split.subset).places
        file, where = places.get(where or "", (self.split.name, where))
        self.problems.append(Problem(file, code, where, message, severity))

    def read(self) -> Document | None:
        """Read the split's content; return None if a list, an entry or an id is missing or has the wrong type."""
        if self.split.labels is not None:
            return self._read_labels(self.split.labels)
        try:
            document = read_json(self.split.annotations)
        except DataError as error:
            self.error("bad-json", None, str(error).removeprefix(f"{self.split.annotations}: "))
            return None
        for name in ("images", "annotations", "categories"):
            entries = document.get(name)
            if not isinstance(entries, list):
                text = f"expected a list named {name!r}; the COCO format has images, annotations and categories"
                self.error("missing-field", name, text)
                continue
            for position, entry in enumerate(entries):
                where = f"{name}[{position}]"
                if not isinstance(entry, dict):
                    self.error("wrong-type", where, f"expected an object, got {short_repr(entry)}; remove or repair it")
                elif not is_id(entry.get("id")):
                    self.error(
                        "missing-field", where, f"expected a whole number as id, got {short_repr(entry.get('id'))}"
                    )
                elif name != "annotations" and not -MAX_EXACT_ID <= entry["id"] <= MAX_EXACT_ID:
                    text = f"expected an id between -2^53 and 2^53, which evaluation reads exactly, got {entry['id']}"
                    self.error("id-too-large", where, f"{text}; renumber the {name}, here and in the annotations")
                elif name == "annotations" and not is_id(entry.get("image_id")):
                    got = f"{short_repr(entry.get('image_id'))}"
                    self.error("missing-field", where, f"expected a whole number as image_id, got {got}")
        return None if self.problems else self.split.select(document)

    def _read_labels(self, labels: LabelFiles) -> Document | None:
        try:
            parsed = labels.parsed(self.split.subset)
        except DataError as error:  # not even the images can be listed
            text = str(error).removeprefix(f"{self.split.annotations}: ")
            self.problems.append(Problem(self.split.name, "bad-label", None, text))
            return None
        self.problems += parsed.problems
        return self.split.select(parsed.document())

    def unique(self, noun: str, entries: Iterable[Entry]) -> dict[object, Entry]:
        """Map ids to entries; keep the first entry of a duplicate id and report an error."""
        by_id: dict[object, Entry] = {}
        for entry in entries:
            if entry["id"] in by_id:
                self.error("duplicate-id", f"{noun} {entry['id']}", f"this id is used twice; give every {noun} its own")
            by_id.setdefault(entry["id"], entry)
        return by_id


def no_images(split: Split) -> str:
    """Explain why a split without images cannot be used."""
    if split.part == "val":
        return (
            "no image is left for validation: the folder has no validation file, and this file has fewer than two "
            "images; add images (a tenth of them is kept for validation), or a validation file such as val.json"
        )
    return "the file lists no images; training needs at least one"


def check_categories(report: AnnotationReport, categories: list[Entry]) -> set[object]:
    """Check the categories and return their ids."""
    if not categories:
        report.error("unknown-category", None, "the file lists no categories; list every class with its id and name")
    names: dict[str, object] = {}
    by_id = report.unique("category", categories)
    for number, category in by_id.items():
        name = category.get("name")
        if not isinstance(name, str) or not name.strip() or not is_text(name):
            report.error("missing-field", f"category {number}", "has no name; add the class's name as text")
        elif names.setdefault(name, number) != number:
            text = f"has the same name {name!r} as category {names[name]}; reports cannot distinguish them"
            report.warning("duplicate-name", f"category {number}", text)
    return set(by_id)


def check_images(report: AnnotationReport, images: list[Entry]) -> dict[object, tuple[int, int] | None]:
    """Check the image entries; map image ids to (width, height), or to None where the file does not give them."""
    if not images:
        report.error("no-images", None, no_images(report.split))
    report.images = report.unique("image", images)
    files: dict[str, object] = {}
    sizes: dict[object, tuple[int, int] | None] = {}
    for number, image in report.images.items():
        where = f"image {number}"
        width, height = image.get("width"), image.get("height")
        sizes[number] = None
        if not (type(width) is int and type(height) is int and width > 0 and height > 0):
            text = (
                f"expected width and height as whole numbers above 0, got {short_repr(width)} and {short_repr(height)}"
            )
            report.error("missing-field", where, f"{text}; write the size of the image file")
        elif width * height > MAX_PIXELS:
            text = f"expected an image of at most {MAX_PIXELS:,} pixels, got {short_repr(width)} x {short_repr(height)}"
            report.error("too-many-pixels", where, f"{text}; Pillow opens no larger one: cut it into tiles")
        else:
            sizes[number] = width, height
        try:
            name = file_name(image)
            path_inside(name)
        except DataError as error:
            code = "path-leaves-folder" if "leaves" in str(error) else "missing-field"
            report.error(code, where, str(error).removeprefix(f"{where}: "))
            continue
        if files.setdefault(name, number) != number:
            report.warning("duplicate-file", where, f"has the same file as image {files[name]}: {name}")
    return sizes


def check_annotations(
    report: AnnotationReport,
    annotations: list[Entry],
    *,
    sizes: dict[object, tuple[int, int] | None],
    categories: set[object],
    masks: bool,
) -> None:
    """Check the image, category, box and mask of every annotation."""
    for number, entry in report.unique("annotation", annotations).items():
        where = f"annotation {number}"
        if entry["image_id"] not in sizes:
            text = f"belongs to image {entry['image_id']}, which is not listed; add the image or remove the annotation"
            report.error("unknown-image", where, text)
        category = entry.get("category_id")
        if type(category) is not int or category not in categories:
            text = f"has category {short_repr(category)}, which is not listed; add it to categories"
            report.error("unknown-category", where, text)
        if entry.get("iscrowd", 0) not in (0, 1):
            report.error("wrong-type", where, f"expected iscrowd 0 or 1, got {short_repr(entry['iscrowd'])}")
        if "area" in entry and not (is_finite(entry["area"]) and entry["area"] >= 0):
            text = f"expected a finite area of at least 0, got {short_repr(entry['area'])}; leave it out"
            report.error("not-a-number", where, text)
        size = sizes.get(entry["image_id"])
        trained_on = check_box(report, where, entry.get("bbox"), size) and not entry.get("iscrowd", 0)
        drawable = check_mask(report, where, entry.get("segmentation"), size, required=masks)
        # COCO's two objects with a box without area have no pixel either; training leaves them out.
        if masks and trained_on and drawable and size is not None:
            check_pixels(report, where, entry["segmentation"], size)


def check_box(report: AnnotationReport, where: str, box: object, size: tuple[int, int] | None) -> bool:
    """Check a box [x, y, width, height]; return whether training can use it."""
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(each, int | float) for each in box):
        report.error("bad-box", where, f"expected bbox as [x, y, width, height], got {short_repr(box)}")
        return False
    if not all(map(is_finite, box)):
        report.error("not-a-number", where, f"expected finite numbers in bbox, got {box}; remove the annotation")
        return False
    x, y, width, height = box
    if width < 0 or height < 0:
        text = f"bbox {box} has a negative width or height; bbox is [x, y, width, height], not two corners"
        report.error("bad-box", where, text)
        return False
    if width == 0 or height == 0:
        report.warning("box-without-area", where, f"bbox {box} has no area; training leaves it out")
        return False
    if size is None:
        return True
    gap = max(-x - width, -y - height, x - size[0], y - size[1])
    out = max(-x, -y, x + width - size[0], y + height - size[1])
    described = f"bbox {box} in an image of {size[0]} x {size[1]}"
    if gap >= TOLERANCE:
        text = f"{described} lies outside; bbox is [x, y, width, height] in pixels of the stored image"
        report.error("box-outside", where, text)
    elif gap >= 0:
        report.warning("box-without-area", where, f"{described} has no area inside; training leaves it out")
    elif out > TOLERANCE:
        report.warning("box-sticks-out", where, f"{described} sticks out by {out:g} pixels; training clips it")
    return bool(gap < 0)


def check_mask(
    report: AnnotationReport, where: str, mask: object, size: tuple[int, int] | None, *, required: bool
) -> bool:
    """Check a mask, given as polygons or as RLE; return whether it can be drawn."""
    if mask is None or mask == []:
        if required:
            report.error("no-mask", where, "has no segmentation; models with masks and copy-paste need polygons or RLE")
    elif isinstance(mask, list):
        return check_polygons(report, where, mask, size)
    elif isinstance(mask, dict):
        return check_rle(report, where, mask, size)
    else:
        report.error("bad-mask", where, f"expected segmentation as polygons or RLE, got {short_repr(mask)}")
    return False


def check_polygons(report: AnnotationReport, where: str, polygons: list[Any], size: tuple[int, int] | None) -> bool:
    """Check polygons, lists [x1, y1, x2, y2, ...] of at least three corners; return whether they can be drawn."""
    errors = report.errors
    corners: list[float] = []
    for position, polygon in enumerate(polygons):
        name = f"polygon {position}"
        if not isinstance(polygon, list) or not all(isinstance(each, int | float) for each in polygon):
            report.error(
                "bad-polygon", where, f"{name}: expected a list [x1, y1, x2, y2, ...], got {short_repr(polygon)}"
            )
        elif not all_finite(polygon):
            report.error("not-a-number", where, f"{name} contains NaN or infinity; draw it again")
        elif len(polygon) % 2:
            text = f"{name}: expected pairs of x and y, got {len(polygon)} numbers; draw it again"
            report.error("bad-polygon", where, text)
        elif len(polygon) < 6:
            text = f"{name} has {len(polygon) // 2} corners, fewer than 3; it is left out of the mask"
            report.warning("bad-polygon", where, text)
        else:
            corners += polygon
    if size is not None and corners:
        xs, ys = corners[::2], corners[1::2]
        if max(xs) <= 0 or max(ys) <= 0 or min(xs) >= size[0] or min(ys) >= size[1]:
            text = f"the mask lies outside the image of {size[0]} x {size[1]}; give pixels of the stored image"
            report.error("mask-outside", where, text)
        elif min(xs) < -size[0] or min(ys) < -size[1] or max(xs) > 2 * size[0] or max(ys) > 2 * size[1]:
            # The time to draw a polygon grows with its perimeter, including the part outside the image.
            text = f"the polygons exceed the image of {size[0]} x {size[1]} by more than its own size"
            report.error("bad-polygon", where, f"{text}; give pixels of the stored image")
    return report.errors == errors


def check_rle(report: AnnotationReport, where: str, mask: Entry, size: tuple[int, int] | None) -> bool:
    """Check an RLE and return whether it can be drawn.

    ``size`` in the RLE is [height, width]; ``counts`` are run lengths, column by column, or compressed.
    """
    errors = report.errors
    extent, counts = mask.get("size"), mask.get("counts")
    if not (isinstance(extent, list) and len(extent) == 2 and all(type(each) is int and each > 0 for each in extent)):
        report.error("bad-rle", where, f"expected the RLE's size as [height, width], got {short_repr(extent)}")
        return False
    if size is not None and extent != [size[1], size[0]]:
        text = f"the RLE is for {extent[1]} x {extent[0]}, the image is {size[0]} x {size[1]}; encode the mask again"
        report.error("rle-size", where, text)
        return False
    pixels = extent[0] * extent[1]
    if pixels > MAX_PIXELS:
        report.error(
            "bad-rle", where, f"the RLE is for {extent[1]} x {extent[0]}, larger than any image that Pillow reads"
        )
        return False
    advice = f"do not fill the {pixels} pixels of the mask; encode it again"
    if isinstance(counts, list):
        if not all(type(each) is int and each >= 0 for each in counts):
            report.error("bad-rle", where, "expected whole numbers of at least 0 as counts; encode the mask again")
        elif sum(counts) != pixels:
            report.error("rle-counts", where, f"the RLE's counts sum to {sum(counts)} and {advice}")
    elif isinstance(counts, str):
        try:
            rle_codec.decode({"size": extent, "counts": counts})
        except (RuntimeError, ValueError):
            report.error("rle-counts", where, f"the RLE's compressed counts {advice}")
    else:
        report.error("bad-rle", where, f"expected the RLE's counts as a list or a string, got {short_repr(counts)}")
    return report.errors == errors


def check_pixels(report: AnnotationReport, where: str, mask: list[list[float]] | Entry, size: tuple[int, int]) -> None:
    """Check that a valid mask covers at least one pixel of its image of ``size`` (width, height)."""
    if isinstance(mask, dict):
        counts = mask["counts"]
        area = 0.0
        covers_pixel = sum(counts[1::2]) > 0 if isinstance(counts, list) else bool(rle_codec.area(mask))
    else:
        polygons = usable_polygons(mask)
        area = max(map(polygon_area, polygons), default=0.0)
        covers_pixel = area >= LARGE_POLYGON or any(
            rle_codec.area(rle_codec.frPyObjects(polygons, size[1], size[0])) if polygons else ()
        )
    if covers_pixel:
        return
    if area > NO_AREA:
        text = f"the mask of {area:.2g} square pixels has no pixel, so it cannot be detected; draw it larger"
        report.warning("no-mask", where, f"{text} or remove the annotation")
    else:
        report.error("no-mask", where, "the mask has no pixel; draw it again or remove the annotation")


def all_finite(numbers: Sequence[float]) -> bool:
    """Return whether no number is NaN, infinite, or an int larger than any float."""
    try:
        return math.isfinite(sum(numbers)) or all(map(is_finite, numbers))  # the sum is faster
    except OverflowError:
        return False


def check_files(
    split: Split,
    images: list[Entry],
    *,
    pixels: bool,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Check the image files on ``workers`` threads (default: one per CPU core) and return their problems."""
    problems: list[Problem] = []
    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1)
    try:
        checked = pool.map(lambda image: check_file(split, image, pixels=pixels), images)
        for done, own in enumerate(checked, start=1):
            problems += own
            if progress is not None:
                progress(done, len(images))
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        raise DataError("check-data: too little memory for another thread; lower --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)  # so that Ctrl-C does not wait for the remaining images
    return problems


def check_file(split: Split, image: Entry, *, pixels: bool) -> list[Problem]:
    """Compare an image file with its entry and return the problems."""
    try:
        path = split.image_path(image)
    except DataError:
        return []  # already reported by check_images
    where = f"image {image['id']}"

    def problem(name: str, message: str, severity: Severity = "error") -> list[Problem]:
        return [Problem(str(path), name, where, message.removeprefix(f"{path}: "), severity)]

    try:
        with open_image(path) as opened:
            size, turned = opened.size, is_turned(opened)
        if pixels:
            read_image(path)
    except DataError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        return problem("image-missing" if missing else "image-unreadable", str(error))
    expected = image.get("width"), image.get("height")
    if size == expected:
        if turned:
            text = "EXIF asks to rotate or mirror the image, which is not applied: make sure that the boxes fit the "
            text += "stored pixels, or store the pixels upright and remove the EXIF orientation"
            return problem("image-turned", text, "warning")
        return []
    text = f"the file is {size[0]} x {size[1]}, its entry says {expected[0]} x {expected[1]}"
    if turned and size == expected[::-1]:
        text += "; EXIF asks to rotate it, which is not applied: store the pixels upright"
        return problem("image-size", f"{text} and remove the EXIF orientation")
    return problem("image-size", f"{text}; correct the entry and check that the boxes fit")


class Content(NamedTuple):
    """The classes of a split, and its number of images and usable objects."""

    split: Split
    classes: list[tuple[int, str]]
    images: int
    objects: int
    used: frozenset[int]  # category ids of the objects
    files: frozenset[str]  # image files

    @classmethod
    def of(cls, split: Split) -> Content:
        """Count the content of a split without errors."""
        document = split.read()
        sizes = {image["id"]: size_of(image) for image in document["images"]}
        objects = (entry for entry in document["annotations"] if not entry.get("iscrowd", 0))
        learnable = [
            entry["category_id"] for entry in objects if clipped(entry["bbox"], sizes[entry["image_id"]]) is not None
        ]
        files = frozenset(str(split.image_path(image)) for image in document["images"])
        return cls(split, classes(document), len(sizes), len(learnable), frozenset(learnable), files)


def check_pair(train: Content, val: Content) -> list[Problem]:
    """Check two splits without errors against each other: nothing to learn or evaluate, or different classes."""
    problems = []
    file = train.split.name
    if not train.objects:
        text = "no image has an object to learn; annotate objects (crowds and boxes without area do not count)"
        problems.append(Problem(file, "no-objects", None, text))
    if val.images and not val.objects:
        text = "no image has an object to find, so there will be no AP and no best.safetensors; annotate objects, or "
        text += "re-split the images with bucketrank split"
        problems.append(Problem(val.split.name, "no-objects", None, text, "warning"))
    if not val.images:
        problems.append(Problem(val.split.name, "no-images", None, no_images(val.split)))
    if train.classes != val.classes:
        missing, added = sorted({*train.classes} - {*val.classes})[:5], sorted({*val.classes} - {*train.classes})[:5]
        parts = [f"{word} {each}" for word, each in (("lacks", missing), ("adds", added)) if each]
        text = f"expected the categories of {file}, but this {' and '.join(parts) or 'has another order'}"
        text += "; list the same ids and names in both"
        problems.append(Problem(val.split.name, "other-classes", None, text))
    unseen = [name for number, name in val.classes if number in val.used - train.used]
    if unseen and train.objects:
        text = f"these classes have objects here, but none in {file}: {', '.join(unseen[:5])}"
        text += f"{', ...' if len(unseen) > 5 else ''}; their AP will be 0; re-split the images with bucketrank split"
        problems.append(Problem(val.split.name, "unseen-classes", None, text, "warning"))
    unused = [name for number, name in train.classes if number not in train.used | val.used]
    if unused and train.objects:
        text = f"{counted(len(unused), 'class', plural='classes')} without any object: {', '.join(unused[:5])}"
        text += f"{', ...' if len(unused) > 5 else ''}; check the class numbers of the labels"
        problems.append(Problem(file, "unused-classes", None, text, "warning"))
    shared = len(train.files & val.files)
    if shared:
        text = f"{counted(shared, 'image is', plural='images are')} also in {file}, so AP will be too high; use other "
        text += "images for validation, or re-split the images with bucketrank split"
        problems.append(Problem(val.split.name, "shared-images", None, text, "warning"))
    return problems
