"""YOLO: a text file beside each image, with sizes as shares of the image's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from bucketrank.data.annotations import inside, is_text
from bucketrank.data.convert.writer import Writer, Written, read_text
from bucketrank.data.pictures import SUFFIXES
from bucketrank.data.problems import DataError

MOST_CLASSES = 100_000  # that are named by their numbers
SLACK = 0.01  # by which a share may lie outside [0, 1], from rounding


def convert_yolo(source: Path, folder: Path, *, copy: bool = False) -> list[Written]:
    """Images and labels of ``source``, as its ``data.yaml`` names them, as a folder in COCO's format.

    Without a yaml file images/train and images/val are taken, or images alone; classes are then numbered, or named by
    a classes.txt. The labels of images/a/b.jpg are in labels/a/b.txt; an image without that file is one without
    objects. A line is a class and either x, y, width and height of the box, by its centre, or the corners of a polygon,
    whose box is the least around it. The classes, numbered from 0, get ids from 1.
    """
    if not source.is_dir():
        raise DataError(f"{source}: there is no such folder; give the folder to convert")
    settings = read_yaml(source)
    splits = {name: images for name in ("train", "val", "test") if (images := images_of(source, settings, name))}
    if not splits:
        splits = {"annotations": list_images(source / "images")}
    if not any(splits.values()):
        raise DataError(
            f"{source}: no images found; looked for train and val in data.yaml, images/train, images/val and images"
        )
    lines = {path: read_labels(source, path) for images in splits.values() for path in images}
    names = class_names(source, settings, highest=max((line[0] for each in lines.values() for line in each), default=0))
    categories = {number + 1: name for number, name in names.items()}
    writer = Writer(source, folder, categories=categories, copy=copy)
    written = []
    for split, images in splits.items():
        for path in images:
            image_id, width, height = writer.add_image(path)
            for number, shares in lines[path]:
                if number not in names:
                    raise DataError(
                        f"{labels_of(source, path)}: class {number} has no name among the {len(names)} of data.yaml; "
                        "add it or correct the label"
                    )
                if len(shares) == 4:
                    writer.add_object(image_id, number + 1, box=box_of(shares, width, height))
                else:
                    polygon = [share * (height if odd else width) for share, odd in _alternating(shares)]
                    xs, ys = polygon[::2], polygon[1::2]
                    box = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
                    area = polygon_area(xs, ys)
                    writer.add_object(image_id, number + 1, box=box, area=area, segmentation=[polygon])
        written.append(writer.write(split))
    return written


def read_yaml(source: Path) -> dict[str, Any]:
    """data.yaml, or the only yaml file of the folder."""
    found = sorted([*source.glob("*.yaml"), *source.glob("*.yml")])
    path = source / "data.yaml" if (source / "data.yaml") in found else found[0] if len(found) == 1 else None
    if path is None:
        return {}
    try:
        settings = yaml.safe_load(read_text(path))
    except DataError:
        raise
    # The other exceptions are those of values that are not what their tag or look says, like 2001-99-99.
    except (yaml.YAMLError, AttributeError, LookupError, RecursionError, ValueError) as error:
        raise DataError(f"{path}: not YAML ({error}); correct it") from error
    if not isinstance(settings, dict):
        # Not what it holds: a few lines of YAML may stand for gigabytes.
        raise DataError(f"{path}: expected names, train and val, got a {type(settings).__name__}; correct it")
    return settings


def images_of(source: Path, settings: dict[str, Any], name: str) -> list[Path]:
    """The images of a split: a folder, a list of folders, or a text file with a path a line."""
    stated = settings.get(name, f"images/{name}" if not settings else None)
    paths = [stated] if isinstance(stated, str) else stated or []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise DataError(f"{source}: data.yaml gives no path for {name}; write a folder, or a list of folders")
    found: list[Path] = []
    for each in paths:
        path = within(source, settings, each)
        if path.suffix == ".txt" and path.is_file():
            names = read_text(path).split("\n")
            found += [within(source, settings, line.strip()) for line in names if line.strip()]
        else:
            found += list_images(path)
    if settings and stated and not found:
        raise DataError(f"{source}: data.yaml gives {stated!r} for {name}, where no images are; correct the path")
    return found


def within(source: Path, settings: dict[str, Any], stated: str) -> Path:
    """A stated path below the source, also below its ``path``; nothing outside is read.

    Exports of Roboflow say ../train/images for the train/images beside the yaml file: leading dots are dropped.
    """
    while stated.startswith(("./", "../")):
        stated = stated.partition("/")[2]
    below = source / inside(stated)
    root = settings.get("path")
    if not below.exists() and isinstance(root, str) and not Path(root).is_absolute():
        return source / inside(f"{root}/{stated}")
    return below


def list_images(folder: Path) -> list[Path]:
    """The image files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def labels_of(source: Path, image: Path) -> Path:
    """The text file of an image: the last folder named images is exchanged for labels."""
    parts = list(image.relative_to(source).with_suffix(".txt").parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return source.joinpath(*parts)


def read_labels(source: Path, image: Path) -> list[tuple[int, list[float]]]:
    """Class and shares of every line."""
    path = labels_of(source, image)
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        try:
            label, shares = int(words[0]), [float(word) for word in words[1:]]
        except ValueError as error:
            raise DataError(f"{path}: line {number}: expected numbers, got {line!r:.60}; correct the line") from error
        if len(shares) != 4 and (len(shares) < 6 or len(shares) % 2):
            raise DataError(
                f"{path}: line {number}: expected a class and 4 numbers, or at least 3 pairs of x and y, got "
                f"{len(shares)} numbers; correct the line"
            )
        if label < 0 or not all(math.isfinite(each) and -SLACK <= each <= 1 + SLACK for each in shares):
            raise DataError(
                f"{path}: line {number}: expected a class from 0 and shares of the image's size from 0 to 1, got "
                f"{line!r:.60}; divide pixels by the width and height"
            )
        found.append((label, shares))
    return found


def class_names(source: Path, settings: dict[str, Any], *, highest: int) -> dict[int, str]:
    """The classes by number: from data.yaml, from classes.txt, or numbers up to the highest label."""
    names = settings.get("names")
    if names is None and (source / "classes.txt").is_file():
        lines = read_text(source / "classes.txt").split("\n")
        names = [line.strip() for line in lines if line.strip()]
    if names is None:
        if highest >= MOST_CLASSES:
            raise DataError(f"{source}: the labels go up to class {highest}; name the classes in data.yaml")
        return {number: str(number) for number in range(highest + 1)}
    named = dict(enumerate(names)) if isinstance(names, list) else names
    if not isinstance(named, dict) or not all(
        type(number) is int and number >= 0 and isinstance(name, str | int | float) and is_text(str(name))
        for number, name in named.items()
    ):
        raise DataError(f"{source}: expected names in data.yaml as a list, or by numbers from 0; correct it")
    return {number: str(name) for number, name in named.items()}


def box_of(shares: list[float], width: int, height: int) -> list[float]:
    """x, y, width and height in pixels, from shares and by the centre."""
    x, y, w, h = shares
    return [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]


def polygon_area(xs: list[float], ys: list[float]) -> float:
    """Of a polygon that does not cross itself."""
    pairs = zip(xs, ys, xs[1:] + xs[:1], ys[1:] + ys[:1], strict=True)
    return abs(sum(x1 * y2 - x2 * y1 for x1, y1, x2, y2 in pairs)) / 2


def _alternating(shares: list[float]) -> list[tuple[float, bool]]:
    return [(share, bool(position % 2)) for position, share in enumerate(shares)]
