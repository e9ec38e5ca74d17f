"""Checks of a data set before training: the annotation file, the image files, and a pair of splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from bucketrank.data.annotation_checks import (
    AnnotationReport,
    check_annotations,
    check_categories,
    check_images,
    no_images,
)
from bucketrank.data.annotations import Split, classes, clipped, size_of
from bucketrank.data.image_checks import check_files
from bucketrank.data.problems import Problem, raise_errors

Depth = Literal["annotations", "headers", "pixels"]

FEW_IMAGES = 5000  # up to this number all images are decoded before training; of more, only the headers are read


def check(
    split: Split,
    *,
    masks: bool = False,
    depth: Depth | None = "pixels",
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Return the problems of a split, in the order of the file.

    An error stops training; a warning says how training deals with the problem. ``masks`` requires a mask for every
    object. ``depth`` says how much of the image files is read: "annotations" nothing, "headers" the sizes, "pixels"
    everything. None means "pixels" for up to 5000 images and "headers" for more. ``progress(done, total)`` is called
    after each image.

    Args:
        split: annotation file and image folder.
        masks: require a mask for every object.
        depth: how much of the image files is read: annotations, headers or pixels.
        workers: threads that read images; by default one per CPU core.
        progress: function that is called after each image with the number of images done and their total.
    """
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
    """Raise one DataError with the first 20 errors that ``check`` returns, if there are any.

    Args:
        split: annotation file and image folder.
        masks: require a mask for every object.
        depth: how much of the image files is read, as in ``check``.
    """
    raise_errors(check(split, masks=masks, depth=depth))


class Content(NamedTuple):
    """The classes of a split, how many images and objects it has to learn from, and the ids of the classes of these."""

    split: Split
    classes: list[tuple[int, str]]
    images: int
    objects: int
    used: frozenset[int]

    @classmethod
    def of(cls, split: Split) -> Content:
        """Return the content of a split without errors."""
        document = split.read()
        sizes = {image["id"]: size_of(image) for image in document["images"]}
        objects = (entry for entry in document["annotations"] if not entry.get("iscrowd", 0))
        learnable = [
            entry["category_id"] for entry in objects if clipped(entry["bbox"], sizes[entry["image_id"]]) is not None
        ]
        return cls(split, classes(document), len(sizes), len(learnable), frozenset(learnable))


def check_pair(train: Content, val: Content) -> list[Problem]:
    """Return the problems of two splits without errors: nothing to learn or evaluate, or different classes."""
    problems = []
    file = str(train.split.annotations)
    if not train.objects:
        text = "no image has an object to learn; annotate objects (crowds and boxes without area do not count)"
        problems.append(Problem(file, "no-objects", None, text))
    if val.images and not val.objects:
        text = "no image has an object to find, so there will be no AP and no best.safetensors; annotate objects, or "
        text += "divide the images anew with bucketrank split"
        problems.append(Problem(str(val.split.annotations), "no-objects", None, text, "warning"))
    if not val.images:
        problems.append(Problem(str(val.split.annotations), "no-images", None, no_images(val.split)))
    if train.classes != val.classes:
        text = f"expected the categories of {file}, got others: {sorted({*train.classes} ^ {*val.classes})[:5]}"
        text += "; list the same ids and names in both"
        problems.append(Problem(str(val.split.annotations), "other-classes", None, text))
    unseen = [name for number, name in val.classes if number in val.used - train.used]
    if unseen and train.objects:
        text = f"these classes have objects here, but none in {file}: {', '.join(unseen[:5])}"
        text += (
            f"{', ...' if len(unseen) > 5 else ''}; their AP will be 0; divide the images anew with bucketrank split"
        )
        problems.append(Problem(str(val.split.annotations), "unseen-classes", None, text, "warning"))
    return problems
