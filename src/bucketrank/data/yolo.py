"""YOLO data sets: data.yaml, and one text file per image with coordinates relative to the image size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import yaml

from bucketrank.data.annotations import LabelFiles, Parsed, is_text, is_yaml, path_inside, polygon_area
from bucketrank.data.images import SUFFIXES
from bucketrank.data.labels import DocumentBuilder, file_problem, read_text
from bucketrank.data.problems import Problem, Severity
from bucketrank.errors import DataError

SPLITS = {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}  # names of their folders
MAX_UNNAMED_CLASSES = 100_000  # classes named by their numbers because the data set gives no names
SLACK = 0.01  # allowed distance of a relative coordinate from [0, 1], due to rounding

Line = tuple[int, int, list[float]]  # line number, class and relative coordinates


class TextLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Loader that reads every plain value as text and resolves only ``<<``, which merges mappings."""

    yaml_implicit_resolvers: ClassVar = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}


@dataclass(frozen=True)
class YoloLabels(LabelFiles):
    """The images and labels that ``data.yaml`` names.

    Without a yaml file, the images come from images/train and images/val, from train/images and valid/images, or else
    from images, and the class names from classes.txt, or else they are numbers. The labels of images/a/b.jpg are in
    labels/a/b.txt; an image without that file has no objects. Each line has a class and either a box (x and y of its
    centre, width, height) or the corners of a polygon, from which the box is computed. Classes are numbered from 0 and
    get category ids from 1.
    """

    file: Path | None = None  # the yaml file, if there is one

    @classmethod
    def open(cls, source: Path, *, follow_links: bool = True) -> YoloLabels:
        """Open a folder, or the yaml file in it; its ``path`` may name another folder if the yaml file is given.

        >>> YoloLabels.open(Path("nowhere"))
        Traceback (most recent call last):
        bucketrank.errors.DataError: nowhere: the folder does not exist; give the data set folder
        """
        stated = source if is_yaml(source) else None
        folder = source if stated is None else stated.parent
        if not folder.is_dir():
            raise DataError(f"{folder}: the folder does not exist; give the data set folder")
        file = find_yaml(folder) if stated is None else stated
        opened = cls(folder, follow_links, file)
        root = opened.settings.get("path")
        if stated is None or not isinstance(root, str) or "\0" in root or not (folder / root).is_dir():
            return opened
        try:
            opened.subsets()
        except DataError:
            return cls((folder / root).resolve(), follow_links, file)
        return opened

    @property
    def source(self) -> Path:
        return self.file or self.folder

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The content of the yaml file; an empty dict without one."""
        return {} if self.file is None else read_yaml(self.file, follow_links=self.follow_links)

    def subsets(self) -> list[str]:
        named = [name for name in SPLITS if (self.images(name) if name != "test" else self._test_images())]
        if named:
            return named
        if not list_images(self.folder / "images"):
            raise DataError(
                f"{self.source}: no images found; looked for train and val in data.yaml, images/train, images/val, "
                "train/images, valid/images and images"
            )
        return ["annotations"]

    def images(self, subset: str) -> list[Path]:
        """List the images of a subset."""
        if subset == "annotations":
            return list_images(self.folder / "images")
        if not any(name in self.settings for name in SPLITS):
            places = [folder for alias in SPLITS[subset] for folder in (f"images/{alias}", f"{alias}/images")]
            return list_images(next((path for each in places if (path := self.folder / each).is_dir()), None))
        stated = self.settings.get(subset)
        paths = [stated] if isinstance(stated, str) else stated or []
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise DataError(f"{self.source}: gives no path for {subset}; write a folder, or a list of folders")
        images = []
        for path in map(self.within, paths):
            if path.suffix == ".txt" and path.is_file():
                names = read_text(path, source=self.folder, follow_links=self.follow_links).split("\n")
                images += [self.within(line.strip()) for line in names if line.strip()]
            else:
                images += list_images(path)
        if stated and not images:
            raise DataError(
                f"{self.source}: gives {stated!r} for {subset}, which has no images; correct the path, which is "
                f"relative to {self.folder} or to path in the file, and must lie in one of them"
            )
        return images

    def _test_images(self) -> list[Path]:
        """List the test images; none if their folder is missing, because Roboflow names one even where it has none."""
        try:
            return self.images("test")
        except DataError:
            return []

    def within(self, stated: str) -> Path:
        """Resolve a path from data.yaml below the folder or below its ``path``; raise DataError if it is outside.

        A leading ``../`` is dropped: Roboflow exports write ../train/images for train/images next to the yaml file.
        """
        if "\0" not in stated and Path(stated).is_relative_to(self.folder.absolute()):
            stated = Path(stated).relative_to(self.folder.absolute()).as_posix()
        while stated.startswith(("./", "../")):
            stated = stated.partition("/")[2]
        below = self.folder / path_inside(stated)
        root = self.settings.get("path")
        if not below.exists() and isinstance(root, str):
            try:
                other = self.folder / path_inside(f"{root}/{stated}")
            except DataError:  # a folder of another machine
                return below
            return other if other.exists() else below
        return below

    def parse(self, subset: str) -> Parsed:
        problems: list[Problem] = []
        names = self.class_names()
        builder = DocumentBuilder(
            self.folder,
            categories={number + 1: name for number, name in names.items()},
            follow_links=self.follow_links,
        )
        paths = self.images(subset)
        problems += self.misplaced_labels(subset, paths)
        for path in paths:
            file = labels_of(self.folder, path)
            lines, wrong = self.read_labels(file)
            problems += wrong
            try:
                image_id, width, height = builder.add_image(path, upright=True)
            except DataError as error:
                problems.append(file_problem(path, "image-unreadable", error))
                continue
            for number, label, values in lines:
                if label not in names:
                    text = f"class {label} has no name among the {len(names)} of {self.source.name}"
                    text += "; add it or correct the label"
                    problems.append(Problem(str(file), "unknown-category", f"line {number}", text))
                    continue
                box, polygon = in_pixels(values, width, height)
                builder.add_object(
                    image_id,
                    label + 1,
                    box=box,
                    area=None if polygon is None else polygon_area(polygon),
                    segmentation=None if polygon is None else [polygon],
                    place=(file, number),
                )
        return builder.parsed(problems)

    def misplaced_labels(self, subset: str, images: list[Path]) -> list[Problem]:
        """List the label files without an image; a problem too if no image has a label file."""
        files = {labels_of(self.folder, path) for path in images}
        folders = {file.parent for file in files}
        found = {file for folder in folders if folder.is_dir() for file in folder.glob("*.txt")}
        problems = []
        if images and not found & files:
            text = f"there is no label file for any of the {len(images):,} images; the labels of "
            text += f"{images[0].relative_to(self.folder)} belong here; move the files, or rename their folder"
            severity: Severity = "error" if subset in ("train", "annotations") else "warning"
            problems.append(Problem(str(labels_of(self.folder, images[0])), "no-labels", None, text, severity))
        others = (path for each in self.subsets() if each != subset for path in self.images(each))
        lonely = found - files - {labels_of(self.folder, path) for path in others}
        text = f"no image has this name; add one that ends in {', '.join(sorted(SUFFIXES))}, or remove the labels"
        names = sorted(file for file in lonely if file.name not in ("classes.txt", "README.txt"))
        return problems + [Problem(str(file), "no-image", None, text, "warning") for file in names]

    def read_labels(self, path: Path) -> tuple[list[Line], list[Problem]]:
        """Read the lines of a label file, and list what is wrong with the others."""
        lines: list[Line] = []
        problems: list[Problem] = []
        try:
            exists = path.is_file()
            text = read_text(path, source=self.folder, follow_links=self.follow_links) if exists else ""
        except DataError as error:
            return [], [file_problem(path, "bad-label", error)]
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    lines.append((number, *parse_line(line, keypoints=self.keypoint_numbers)))
                except DataError as error:
                    problems.append(Problem(str(path), "bad-label", f"line {number}", str(error)))
        return lines, problems

    @cached_property
    def keypoint_numbers(self) -> int:
        """The count of numbers after each box: those of the keypoints of a pose data set (``kpt_shape``), else 0."""
        shape = self.settings.get("kpt_shape")
        if shape is None:
            return 0
        if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(each, int) for each in shape):
            raise DataError(f"{self.source}: expected kpt_shape as [keypoints, 2 or 3], got {shape!r}; correct it")
        return math.prod(shape)

    def class_names(self) -> dict[int, str]:
        """Read the class names from data.yaml or classes.txt; without names, number the classes of all labels."""
        names = self.settings.get("names")
        if names is None and (self.folder / "classes.txt").is_file():
            text = read_text(self.folder / "classes.txt", source=self.folder, follow_links=self.follow_links)
            names = [line.strip() for line in text.rstrip().split("\n")]
            if "" in names:
                listed = self.folder / "classes.txt"
                raise DataError(f"{listed}: expected a name in every line, got an empty one; correct it")
        if names is None:
            files = (labels_of(self.folder, path) for subset in self.subsets() for path in self.images(subset))
            highest = max((label for file in files for _, label, _ in self.read_labels(file)[0]), default=0)
            if highest >= MAX_UNNAMED_CLASSES:
                raise DataError(f"{self.source}: the labels go up to class {highest}; name the classes in data.yaml")
            return {number: str(number) for number in range(highest + 1)}
        try:
            named = dict(enumerate(names)) if isinstance(names, list) else {int(key): names[key] for key in names}
        except (TypeError, ValueError):
            named = None
        if named is None or not all(number >= 0 and name and is_text(name) for number, name in named.items()):
            raise DataError(f"{self.source}: expected names in data.yaml as a list, or by numbers from 0; correct it")
        count = self.settings.get("nc")
        if isinstance(count, int) and count != len(named):
            raise DataError(
                f"{self.source}: expected nc to be the number of names, {len(named)}, got {count}; correct it"
            )
        return named


def is_yolo(folder: Path, file: Path | None = None) -> bool:
    """Return whether a folder looks like YOLO: a yaml file with names or splits, or folders of images and labels."""
    try:
        file = file or find_yaml(folder)
        settings = {} if file is None else read_yaml(file, follow_links=True)
    except DataError:
        settings = {}
    labels = ("labels", "labels/*", *(f"{name}/labels" for names in SPLITS.values() for name in names))
    return bool({"names", *SPLITS} & {*settings}) or any(
        (folder / "images").is_dir() or path.with_name("images").is_dir()
        for pattern in labels
        for path in folder.glob(pattern)
        if next(path.glob("*.txt"), None) is not None
    )


def find_yaml(folder: Path) -> Path | None:
    """Find data.yaml, or the only yaml file of a folder; None if it has none."""
    candidates = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    if folder / "data.yaml" in candidates:
        return folder / "data.yaml"
    if len(candidates) > 1:
        names = ", ".join(path.name for path in candidates[:5])
        raise DataError(f"{folder}: expected data.yaml or a single yaml file, got {names}; rename one to data.yaml")
    return candidates[0] if candidates else None


def read_yaml(path: Path, *, follow_links: bool) -> dict[str, Any]:
    """Read a yaml file.

    Roboflow and older files call the validation images ``valid``; the result always has ``val``. Everything in
    ``names`` is text, as written: YAML rules would turn the class names yes and no into booleans, and 007 into 7.
    """
    try:
        text = read_text(path, source=path.parent, follow_links=follow_links)
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
        got = "an empty file" if settings is None else f"a {type(settings).__name__}"
        raise DataError(f"{path}: expected names, train and val, got {got}; correct it")
    return {"val": settings["valid"], **settings} if "valid" in settings else settings


def list_images(folder: Path | None) -> list[Path]:
    """List the image files below a folder."""
    return [] if folder is None else sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def labels_of(source: Path, image: Path) -> Path:
    """Return an image's text file: the last folder named images is replaced by labels."""
    parts = list(image.relative_to(source).with_suffix(".txt").parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return source.joinpath(*parts)


def parse_line(line: str, *, keypoints: int = 0) -> tuple[int, list[float]]:
    """Parse a class with the relative coordinates of a box or a polygon; drop as many numbers of keypoints.

    >>> parse_line("1 0.5 0.5 0.2 0.4")
    (1, [0.5, 0.5, 0.2, 0.4])
    """
    words = line.split()
    try:
        first, *values = map(float, words)
    except ValueError as error:
        raise DataError(f"expected numbers, got {line!r:.60}; correct the line") from error
    if not first.is_integer() or first < 0:  # some tools write 0.0
        raise DataError(f"expected a class number from 0, got {words[0]!r:.20}; correct the line")
    if keypoints and len(values) != 4:
        if len(values) != 4 + keypoints:
            raise DataError(
                f"expected a class, 4 numbers and {keypoints} of keypoints (kpt_shape), got {len(values)} numbers; "
                "correct the line or kpt_shape"
            )
        values = values[:4]
    if len(values) == 5:
        raise DataError("expected a class and 4 numbers, got 5 numbers; remove the last one if it is a confidence")
    if len(values) != 4 and (len(values) < 6 or len(values) % 2):
        raise DataError(
            f"expected a class and 4 numbers, or at least 3 pairs of x and y, got {len(values)} numbers; correct the "
            "line"
        )
    if not all(math.isfinite(each) and -SLACK <= each <= 1 + SLACK for each in values):
        raise DataError(f"expected coordinates from 0 to 1, got {line!r:.60}; divide pixels by the width and height")
    if len(values) == 4 and min(values[2:]) < 0:
        raise DataError(f"expected a width and a height of at least 0, got {line!r:.60}; correct the line")
    return int(first), values


def in_pixels(values: list[float], width: int, height: int) -> tuple[list[float], list[float] | None]:
    """Convert the coordinates of a line to pixels: the box (x, y, width, height), and the polygon if it is one.

    >>> in_pixels([0.5, 0.5, 0.5, 0.2], 40, 30)
    ([10.0, 12.0, 20.0, 6.0], None)
    """
    if len(values) == 4:
        x, y, w, h = values
        return [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height], None
    xs, ys = [x * width for x in values[::2]], [y * height for y in values[1::2]]
    polygon = [coordinate for corner in zip(xs, ys, strict=True) for coordinate in corner]
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)], polygon
