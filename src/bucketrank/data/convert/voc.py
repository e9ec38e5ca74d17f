"""Convert Pascal VOC, which has one XML file per image."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from bucketrank.data.annotations import path_inside
from bucketrank.data.convert.writer import Writer, Written, read_text, require_inside
from bucketrank.data.images import SUFFIXES
from bucketrank.errors import DataError

# fmt: off
CLASSES = [
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car",
    "cat", "chair", "cow", "diningtable", "dog", "horse", "motorbike",
    "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
]
# fmt: on


def convert_voc(source: Path, folder: Path, *, copy: bool = False) -> list[Written]:
    """Convert ``Annotations``, ``JPEGImages`` and ``ImageSets/Main`` of ``source`` to a folder in COCO format.

    train.txt, val.txt and test.txt become one file each. If train.txt is missing, trainval.txt replaces it, and
    test.txt becomes val.json if val.txt is missing too. Without these lists, all images go into annotations.json. VOC
    counts pixels from 1 and includes the last: a box from xmin to xmax covers [xmin - 1, xmax].

    Objects marked difficult become crowds: training leaves them out, and detecting them counts neither as right nor as
    wrong. The classes are the twenty of VOC; if others occur, they are all occurring classes in alphabetical order.
    """
    names = image_names(source)
    trees = {name: read_xml(source / "Annotations" / f"{name}.xml", source) for each in names.values() for name in each}
    occurring = {class_of(each, name, source) for name, tree in trees.items() for each in tree.iter("object")}
    classes = CLASSES if occurring <= set(CLASSES) else sorted(occurring)
    ids = {name: number for number, name in enumerate(classes, start=1)}
    written = []
    with Writer(source, folder, categories={number: name for name, number in ids.items()}, copy=copy) as writer:
        for split, members in names.items():
            for name in members:
                xml, path = source / "Annotations" / f"{name}.xml", image_of(source, name, trees[name])
                size = stated_size(trees[name])
                image_id, width, height = writer.add_image(path, upright=size is None)
                if size not in (None, (width, height)):
                    raise DataError(
                        f"{xml}: expected the size of {path.name}, {width} x {height}, got {size[0]} x {size[1]}, so "
                        "the boxes may not fit; give the image that was annotated, or correct or remove <size>"
                    )
                for each in trees[name].iter("object"):
                    crowd = each.findtext("difficult", "0").strip() == "1"
                    category = ids[class_of(each, name, source)]
                    writer.add_object(image_id, category, box=read_box(each, xml), crowd=crowd)
            written.append(writer.write(split))
    return written


def image_names(source: Path) -> dict[str, list[str]]:
    """List the image names of each split, without suffix."""
    if not (source / "Annotations").is_dir():
        raise DataError(
            f"{source}: has no folder Annotations; give the folder that contains Annotations and JPEGImages, "
            "such as VOCdevkit/VOC2012"
        )
    sets = source / "ImageSets" / "Main"
    read = {name: _listed(sets / f"{name}.txt", source) for name in ("train", "val", "trainval", "test")}
    if not read["train"]:
        read["train"] = read["trainval"]
        if not read["val"]:
            read["val"], read["test"] = read["test"], []
    chosen = {name: read[name] for name in ("train", "val", "test") if read[name]}
    if chosen:
        return chosen
    names = sorted(path.stem for path in (source / "Annotations").glob("*.xml"))
    if not names:
        raise DataError(f"{source}: no *.xml in Annotations; give the folder that contains Annotations and JPEGImages")
    return {"annotations": names}


def image_of(source: Path, name: str, tree: Element) -> Path:
    """Find an image: the file that the XML names, or else one with the same stem as the XML file.

    Annotation tools may write a path on the annotator's machine. A path that leaves the folder is never opened.
    """
    folder = source / "JPEGImages"
    others = (folder / f"{name}{suffix}" for suffix in sorted(SUFFIXES))
    other = next((other for other in others if other.is_file()), None)
    try:
        path = folder / path_inside(tree.findtext("filename", "").strip() or f"{name}.jpg")
    except DataError as error:
        if other is None:
            raise DataError(f"{source / 'Annotations' / name}.xml: filename: {error}") from error
        return other
    return other if other is not None and not path.is_file() else path


def stated_size(tree: Element) -> tuple[int, int] | None:
    """Read the width and height from the XML file; None if they are missing or 0."""
    try:
        width, height = (int(tree.findtext(f"size/{side}", "0")) for side in ("width", "height"))
    except ValueError:
        return None
    return (width, height) if width > 0 and height > 0 else None


def class_of(element: Element, name: str, source: Path) -> str:
    """Read an object's class from the XML file of image ``name``."""
    try:
        return _text(element, "name")
    except DataError as error:
        path = source / "Annotations" / f"{name}.xml"
        raise DataError(f"{path}: an object has no name; add it, or remove the object") from error


def read_box(element: Element, path: Path) -> list[float]:
    """Read an object's box and convert it to x, y, width and height; VOC counts pixels from 1."""
    try:
        box = element.find("bndbox")
        left, top, right, bottom = (float(_text(box, side)) for side in ("xmin", "ymin", "xmax", "ymax"))
    except (DataError, ValueError) as error:
        raise DataError(f"{path}: an object's bndbox is incomplete ({error}); correct or remove the object") from error
    converted = [left - 1, top - 1, right - left + 1, bottom - top + 1]
    if not all(map(math.isfinite, (*converted, converted[2] * converted[3]))):
        raise DataError(
            f"{path}: expected finite numbers in an object's bndbox, got {left}, {top}, {right}, {bottom}; correct or "
            "remove the object"
        )
    return converted


def read_xml(path: Path, source: Path) -> Element:
    """Read an XML file; refuse one with a DOCTYPE, which could define entities that expand without limit."""
    require_inside(path, source)
    parser, tree = expat.ParserCreate(), TreeBuilder()

    def refuse(*_: object) -> None:
        raise DataError(f"{path}: has a DOCTYPE, which VOC files do not have; remove it")

    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = tree.start
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


def _listed(path: Path, source: Path) -> list[str]:
    """Read one image name per line; raise DataError if one leaves the folder.

    The name is the first word, because a flag may follow, or the whole line if an image has this name.
    """
    if not path.is_file():
        return []
    lines = filter(None, map(str.strip, read_text(path, source=source).splitlines()))
    return [str(path_inside(line if _is_image(line, source) else line.split()[0])) for line in lines]


def _is_image(name: str, source: Path) -> bool:
    return (source / "Annotations" / f"{path_inside(name)}.xml").is_file()
