"""Pascal VOC data sets, which have one XML file per image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from bucketrank.data.annotations import LabelFiles, Parsed, path_inside
from bucketrank.data.images import SUFFIXES
from bucketrank.data.labels import DocumentBuilder, file_problem, read_text, require_inside
from bucketrank.data.problems import Problem
from bucketrank.errors import DataError

# fmt: off
CLASSES = [
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car",
    "cat", "chair", "cow", "diningtable", "dog", "horse", "motorbike",
    "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
]
# fmt: on
IMAGES = ("JPEGImages", "images")  # names of the image folder next to Annotations
LINE = "line"  # attribute of an object: its line in the file


class Members(NamedTuple):
    """The images of a subset: XML files and images lie in two folders under the same names."""

    xml: Path
    images: Path
    names: list[str]  # paths without suffix

    def file(self, name: str) -> Path:
        """Return the XML file of an image."""
        return self.xml / f"{name}.xml"


@dataclass(frozen=True)
class VocLabels(LabelFiles):
    """The images and XML files of a VOC folder, or of a Roboflow export with XML files next to the images.

    ``Annotations`` holds the XML files, ``JPEGImages`` (or ``images``) the images, and ``ImageSets/Main`` lists the
    subsets. If train.txt is missing, trainval.txt without the images of val.txt replaces it, and test.txt becomes val
    if val.txt is missing too.
    Without these lists, all images are one set. VOC counts pixels from 1 and includes the last: a box from xmin to xmax
    covers [xmin - 1, xmax].

    Objects marked difficult become crowds: training leaves them out, and detecting them counts neither as right nor as
    wrong. The classes are the twenty of VOC if no other occurs and ``Annotations`` exists; otherwise they are all
    occurring classes in alphabetical order.
    """

    @property
    def source(self) -> Path:
        return self.folder

    def subsets(self) -> list[str]:
        return list(self.members())

    def members(self) -> dict[str, Members]:
        """List the images of each subset."""
        if not (self.folder / "Annotations").is_dir():
            return self._beside_images()
        images = next((self.folder / name for name in IMAGES if (self.folder / name).is_dir()), self.folder / IMAGES[0])
        sets = self.folder / "ImageSets" / "Main"
        listed = {name: self._listed(sets / f"{name}.txt") for name in ("train", "val", "trainval", "test")}
        if not listed["train"]:
            held_out = set(listed["val"])
            listed["train"] = [name for name in listed["trainval"] if name not in held_out]
            if not listed["val"]:
                listed["val"], listed["test"] = listed["test"], []
        chosen = {name: listed[name] for name in ("train", "val", "test") if listed[name]}
        if not chosen:
            chosen = {"annotations": sorted(path.stem for path in (self.folder / "Annotations").glob("*.xml"))}
        if not any(chosen.values()):
            raise DataError(
                f"{self.folder}: no *.xml in Annotations; give the folder that contains Annotations and JPEGImages"
            )
        return {name: Members(self.folder / "Annotations", images, names) for name, names in chosen.items()}

    def _beside_images(self) -> dict[str, Members]:
        places = {"train": ("train",), "val": ("valid", "val"), "test": ("test",), "annotations": (".",)}
        members = {
            subset: Members(self.folder / name, self.folder / name, stems)
            for subset, names in places.items()
            for name in names
            if (stems := sorted(path.stem for path in (self.folder / name).glob("*.xml")))
        }
        if not members:
            raise DataError(
                f"{self.folder}: has no folder Annotations, and no *.xml in train, valid or itself; give the folder "
                "that contains Annotations and JPEGImages, such as VOCdevkit/VOC2012"
            )
        return members if len(members) == 1 else {name: each for name, each in members.items() if name != "annotations"}

    def parse(self, subset: str) -> Parsed:
        problems: list[Problem] = []
        members = self.members()
        trees: dict[str, Element] = {}
        occurring: set[str] = set()
        for other, each in members.items():
            for name in each.names:
                path = each.file(name)
                try:
                    if not self.follow_links:
                        require_inside(path, self.folder)
                    tree = parse_xml(path)
                except DataError as error:
                    if other == subset:
                        problems.append(file_problem(path, "bad-label", error))
                    continue
                occurring |= {
                    text.strip() for each in tree.iter("object") if (text := each.findtext("name") or "").strip()
                }
                if other == subset:
                    trees[name] = tree
        known = occurring <= set(CLASSES) and (self.folder / "Annotations").is_dir()
        ids = {name: number for number, name in enumerate(CLASSES if known else sorted(occurring), start=1)}
        categories = {number: name for name, number in ids.items()}
        builder = DocumentBuilder(self.folder, categories=categories, follow_links=self.follow_links)
        for name, tree in trees.items():
            problems += _add(builder, members[subset], name, tree, ids)
        return builder.parsed(problems)

    def _listed(self, path: Path) -> list[str]:
        """Read one image name per line; raise DataError if one leaves the folder.

        The name is the first word, because a flag may follow, or the whole line if an image has this name.
        """
        if not path.is_file():
            return []
        text = read_text(path, source=self.folder, follow_links=self.follow_links)
        lines = filter(None, map(str.strip, text.splitlines()))
        return [str(path_inside(line if self._has_xml(line) else line.split()[0])) for line in lines]

    def _has_xml(self, name: str) -> bool:
        return (self.folder / "Annotations" / f"{path_inside(name)}.xml").is_file()


def _add(builder: DocumentBuilder, members: Members, name: str, tree: Element, ids: Mapping[str, int]) -> list[Problem]:
    """Add an image and its objects; return the problems of its XML file."""
    xml, size = members.file(name), stated_size(tree)
    try:
        path = image_of(members, name, tree)
    except DataError as error:
        return [file_problem(xml, "bad-label", error)]
    try:
        image_id, width, height = builder.add_image(path, upright=size is None)
    except DataError as error:
        return [file_problem(path, "image-unreadable", error)]
    if size not in (None, (width, height)):
        text = f"expected the size of {path.name}, {width} x {height}, got {size[0]} x {size[1]}, so "
        text += "the boxes may not fit; give the image that was annotated, or correct or remove <size>"
        return [Problem(str(xml), "image-size", None, text)]
    problems = []
    for element in tree.iter("object"):
        line = int(element.get(LINE, 0))
        try:
            category, box = ids[class_of(element)], read_box(element)
            crowd = element.findtext("difficult", "0").strip() == "1"
            builder.add_object(image_id, category, box=box, crowd=crowd, place=(xml, line))
        except DataError as error:
            problems.append(Problem(str(xml), "bad-label", f"line {line}", str(error)))
    return problems


def is_voc(folder: Path) -> bool:
    """Return whether a folder looks like VOC: XML files in Annotations, or next to the images of each subset."""
    places = ("Annotations", "train", "valid", "val", "test", ".")
    return any(next((folder / name).glob("*.xml"), None) is not None for name in places)


def image_of(members: Members, name: str, tree: Element) -> Path:
    """Find an image: the file that the XML names, or else one with the same stem as the XML file.

    Annotation tools may write a path on the annotator's machine. A path that leaves the folder is never opened.
    """
    others = (members.images / f"{name}{suffix}" for suffix in sorted(SUFFIXES))
    other = next((other for other in others if other.is_file()), None)
    try:
        path = members.images / path_inside(tree.findtext("filename", "").strip() or f"{name}.jpg")
    except DataError as error:
        if other is None:
            raise DataError(f"filename: {error}") from error
        return other
    return other if other is not None and not path.is_file() else path


def stated_size(tree: Element) -> tuple[int, int] | None:
    """Read the width and height from the XML file; None if they are missing or 0."""
    try:
        width, height = (int(tree.findtext(f"size/{side}", "0")) for side in ("width", "height"))
    except ValueError:
        return None
    return (width, height) if width > 0 and height > 0 else None


def class_of(element: Element) -> str:
    """Read an object's class."""
    try:
        name = _text(element, "name")
    except DataError:
        name = ""
    if not name:
        raise DataError("an object has no name; add it, or remove the object")
    return name


def read_box(element: Element) -> list[float]:
    """Read an object's box and convert it to x, y, width and height; VOC counts pixels from 1."""
    try:
        box = element.find("bndbox")
        left, top, right, bottom = (float(_text(box, side)) for side in ("xmin", "ymin", "xmax", "ymax"))
    except (DataError, ValueError) as error:
        raise DataError(f"an object's bndbox is incomplete ({error}); correct or remove the object") from error
    converted = [left - 1, top - 1, right - left + 1, bottom - top + 1]
    given = f"got {left}, {top}, {right}, {bottom}; correct or remove the object"
    if not all(map(math.isfinite, (*converted, converted[2] * converted[3]))):
        raise DataError(f"expected finite numbers in an object's bndbox, {given}")
    if min(converted[2:]) < 0:
        raise DataError(f"expected xmin <= xmax and ymin <= ymax in an object's bndbox, {given}")
    return converted


def parse_xml(path: Path) -> Element:
    """Parse an XML file and note the line of every object.

    A file with a DOCTYPE, which could define entities that expand without limit, raises DataError.
    """
    parser, tree = expat.ParserCreate(), TreeBuilder()

    def refuse(*_: object) -> None:
        raise DataError(f"{path}: has a DOCTYPE, which VOC files do not have; remove it")

    def start(name: str, attributes: dict[str, str]) -> None:
        tree.start(name, {LINE: str(parser.CurrentLineNumber)} if name == "object" else attributes)

    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = start
    parser.EndElementHandler = tree.end
    parser.CharacterDataHandler = tree.data
    try:
        parser.Parse(path.read_bytes(), True)  # noqa: FBT003
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: does not exist; add it, or remove its name from ImageSets") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a readable file") from error
    except expat.ExpatError as error:
        raise DataError(f"{path}: line {error.lineno}, column {error.offset}: not XML; write it again") from error
    except (LookupError, ValueError) as error:
        raise DataError(f"{path}: has an unsupported encoding ({error}); save it as UTF-8") from error
    return tree.close()


def _text(element: Element | None, name: str) -> str:
    text = None if element is None else element.findtext(name)
    if text is None:
        raise DataError(f"{name} is missing")
    return text.strip()
