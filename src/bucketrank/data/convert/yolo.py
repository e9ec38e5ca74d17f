"""Convert YOLO, which has one text file per image with coordinates relative to the image size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import yaml

from bucketrank.data.annotations import is_text, is_yaml, path_inside, polygon_area
from bucketrank.data.convert.writer import Writer, Written, read_text
from bucketrank.data.images import SUFFIXES
from bucketrank.errors import DataError

SPLITS = ("train", "val", "test")
MAX_UNNAMED_CLASSES = 100_000  # classes named by their numbers because the data set gives no names
SLACK = 0.01  # allowed distance of a relative coordinate from [0, 1], due to rounding


class TextLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Loader that reads every plain value as text and resolves only ``<<``, which merges mappings."""

    yaml_implicit_resolvers: ClassVar = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}


def convert_yolo(source: Path, folder: Path, *, copy: bool = False) -> list[Written]:
    """Convert the images and labels that ``data.yaml`` in ``source`` names to a folder in COCO format.

    ``source`` is the folder, or the yaml file in it. Without a yaml file, the images come from images/train and
    images/val, or else from images, and the class names from classes.txt, or else they are numbers. The labels of
    images/a/b.jpg are in labels/a/b.txt; an image
    without that file has no objects. Each line has a class and either a box (x and y of its centre, width, height) or
    the corners of a polygon, from which the box is computed. Classes are numbered from 0 and get category ids from 1.
    """
    file = source if is_yaml(source) else None
    source = source if file is None else file.parent
    if not source.is_dir():
        raise DataError(f"{source}: the folder does not exist; give the folder to convert")
    settings = read_yaml(source, file)
    splits = {name: images for name in SPLITS if (images := images_of(source, settings, name))}
    if not splits:
        splits = {"annotations": list_images(source / "images")}
    if not any(splits.values()):
        raise DataError(
            f"{source}: no images found; looked for train and val in data.yaml, images/train, images/val and images"
        )
    lines = {path: read_labels(source, path) for images in splits.values() for path in images}
    names = class_names(source, settings, highest=max((line[0] for each in lines.values() for line in each), default=0))
    categories = {number + 1: name for number, name in names.items()}
    written = []
    with Writer(source, folder, categories=categories, copy=copy) as writer:
        for split, images in splits.items():
            for path in images:
                image_id, width, height = writer.add_image(path, upright=True)
                for number, values in lines[path]:
                    if number not in names:
                        raise DataError(
                            f"{labels_of(source, path)}: class {number} has no name among the {len(names)} of data.yaml"
                            "; add it or correct the label"
                        )
                    if len(values) == 4:
                        writer.add_object(image_id, number + 1, box=box_in_pixels(values, width, height))
                    else:
                        xs, ys = [x * width for x in values[::2]], [y * height for y in values[1::2]]
                        polygon = [coordinate for corner in zip(xs, ys, strict=True) for coordinate in corner]
                        box = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
                        area = polygon_area(polygon)
                        writer.add_object(image_id, number + 1, box=box, area=area, segmentation=[polygon])
            written.append(writer.write(split))
    return written


def read_yaml(source: Path, file: Path | None = None) -> dict[str, Any]:
    """Read ``file``, or else data.yaml, or the only yaml file in the folder; return an empty dict if none exists.

    Roboflow and older files call the validation images ``valid``; the result always has ``val``. Everything in
    ``names`` is text, as written: YAML rules would turn the class names yes and no into booleans, and 007 into 7.
    """
    candidates = sorted([*source.glob("*.yaml"), *source.glob("*.yml")])
    if file is not None:
        path = file
    elif source / "data.yaml" in candidates:
        path = source / "data.yaml"
    elif len(candidates) == 1:
        path = candidates[0]
    elif candidates:
        names = ", ".join(path.name for path in candidates[:5])
        raise DataError(f"{source}: expected data.yaml or a single yaml file, got {names}; rename one to data.yaml")
    else:
        return {}
    try:
        text = read_text(path, source=source)
        settings = yaml.safe_load(text)
        if isinstance(settings, dict) and settings.get("names") is not None:
            settings["names"] = yaml.load(text, Loader=TextLoader)["names"]  # noqa: S506 (a SafeLoader)
    except DataError:
        raise
    # PyYAML raises the other exceptions for values that do not fit their type, such as the date 2001-99-99.
    except (yaml.YAMLError, AttributeError, LookupError, RecursionError, ValueError) as error:
        raise DataError(f"{path}: not YAML ({error}); correct it") from error
    if not isinstance(settings, dict):
        # The content is not shown: a few lines of YAML may expand to gigabytes.
        raise DataError(f"{path}: expected names, train and val, got a {type(settings).__name__}; correct it")
    return {"val": settings["valid"], **settings} if "valid" in settings else settings


def images_of(source: Path, settings: dict[str, Any], name: str) -> list[Path]:
    """List the images of a split, which data.yaml gives as a folder, a list of folders, or a text file with paths."""
    named = any(split in settings for split in SPLITS)
    stated = settings.get(name, None if named else f"images/{name}")
    paths = [stated] if isinstance(stated, str) else stated or []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise DataError(f"{source}: data.yaml gives no path for {name}; write a folder, or a list of folders")
    images: list[Path] = []
    for each in paths:
        path = within(source, settings, each)
        if path.suffix == ".txt" and path.is_file():
            names = read_text(path, source=source).split("\n")
            images += [within(source, settings, line.strip()) for line in names if line.strip()]
        else:
            images += list_images(path)
    if named and stated and not images:
        raise DataError(f"{source}: data.yaml gives {stated!r} for {name}, which has no images; correct the path")
    return images


def within(source: Path, settings: dict[str, Any], stated: str) -> Path:
    """Resolve a path from data.yaml below ``source`` or below its ``path`` setting; raise DataError if it is outside.

    A leading ``../`` is dropped: Roboflow exports write ../train/images for train/images next to the yaml file.
    """
    while stated.startswith(("./", "../")):
        stated = stated.partition("/")[2]
    below = source / path_inside(stated)
    root = settings.get("path")
    if not below.exists() and isinstance(root, str) and not Path(root).is_absolute():
        return source / path_inside(f"{root}/{stated}")
    return below


def list_images(folder: Path) -> list[Path]:
    """List the image files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def labels_of(source: Path, image: Path) -> Path:
    """Return an image's text file: the last folder named images is replaced by labels."""
    parts = list(image.relative_to(source).with_suffix(".txt").parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return source.joinpath(*parts)


def read_labels(source: Path, image: Path) -> list[tuple[int, list[float]]]:
    """Read the class and relative coordinates of every line."""
    path = labels_of(source, image)
    if not path.is_file():
        return []
    labels = []
    for number, line in enumerate(read_text(path, source=source).splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        try:
            label, values = int(words[0]), [float(word) for word in words[1:]]
        except ValueError as error:
            raise DataError(f"{path}: line {number}: expected numbers, got {line!r:.60}; correct the line") from error
        if len(values) != 4 and (len(values) < 6 or len(values) % 2):
            raise DataError(
                f"{path}: line {number}: expected a class and 4 numbers, or at least 3 pairs of x and y, got "
                f"{len(values)} numbers; correct the line"
            )
        if label < 0 or not all(math.isfinite(each) and -SLACK <= each <= 1 + SLACK for each in values):
            raise DataError(
                f"{path}: line {number}: expected a class from 0 and coordinates from 0 to 1, got "
                f"{line!r:.60}; divide pixels by the width and height"
            )
        labels.append((label, values))
    return labels


def class_names(source: Path, settings: dict[str, Any], *, highest: int) -> dict[int, str]:
    """Read the class names from data.yaml or classes.txt; without names, number the classes up to ``highest``."""
    names = settings.get("names")
    if names is None and (source / "classes.txt").is_file():
        lines = read_text(source / "classes.txt", source=source).split("\n")
        names = [line.strip() for line in lines if line.strip()]
    if names is None:
        if highest >= MAX_UNNAMED_CLASSES:
            raise DataError(f"{source}: the labels go up to class {highest}; name the classes in data.yaml")
        return {number: str(number) for number in range(highest + 1)}
    try:
        named = dict(enumerate(names)) if isinstance(names, list) else {int(key): names[key] for key in names}
    except (TypeError, ValueError):
        named = None
    if named is None or not all(number >= 0 and name and is_text(name) for number, name in named.items()):
        raise DataError(f"{source}: expected names in data.yaml as a list, or by numbers from 0; correct it")
    return named


def box_in_pixels(values: list[float], width: int, height: int) -> list[float]:
    """Convert a relative box, given by its centre, to x, y, width and height in pixels."""
    x, y, w, h = values
    return [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
