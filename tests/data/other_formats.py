"""Small folders in the formats of Cityscapes, Pascal VOC and YOLO."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.small_folders import write_image

OBJECT = """<object><name>{name}</name>{difficult}
<bndbox><xmin>{0}</xmin><ymin>{1}</ymin><xmax>{2}</xmax><ymax>{3}</ymax></bndbox></object>"""


def write_text(path: Path, text: str) -> None:
    """Write a text file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def cityscapes_folder(folder: Path) -> Path:
    """Write one training and one validation image with the same instances."""
    numbers = np.full((30, 40), 7, dtype=np.uint16)  # road
    numbers[2:12, 3:9] = 26001  # a car
    numbers[4:6, 5:20] = 24000  # a person in front of it
    numbers[20:28, 0:30] = 24  # people that were not annotated separately
    numbers[15:17, 0:5] = 29001  # a caravan: not evaluated
    numbers[15:17, 10:15] = 1  # ego vehicle
    for split, city in (("train", "aachen"), ("val", "ulm")):
        stem = f"{city}_000000_000019"
        write_image(folder / f"leftImg8bit/{split}/{city}/{stem}_leftImg8bit.png")
        path = folder / f"gtFine/{split}/{city}/{stem}_gtFine_instanceIds.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(numbers).save(path)
    return folder


def voc_folder(folder: Path, **objects: str) -> Path:
    """Write one image and one XML file for each name, with these objects."""
    for name, text in objects.items():
        write_image(folder / f"JPEGImages/{name}.jpg")
        write_text(
            folder / f"Annotations/{name}.xml",
            f"<annotation><filename>{name}.jpg</filename>{text}</annotation>",
        )
    return folder


def voc_object(name: str, *box: int, difficult: str = "") -> str:
    """Return the XML of an object with the box xmin, ymin, xmax, ymax."""
    return OBJECT.format(*box, name=name, difficult=difficult)


def yolo_folder(folder: Path, yaml: str | None = "train: images/train\nval: images/val\nnames: [cat, dog]\n") -> Path:
    """Write two training images, one of them without objects, one validation image, and data.yaml."""
    for split in ("train", "val"):
        write_image(folder / f"images/{split}/a.jpg")
    write_image(folder / "images/train/empty.jpg")
    write_text(folder / "labels/train/a.txt", "1 0.5 0.5 0.5 0.2\n\n0 0.25 0.1 0.5 0.1 0.5 0.5\n")
    write_text(folder / "labels/val/a.txt", "0 0.5 0.5 1 1\n")
    if yaml is not None:
        write_text(folder / "data.yaml", yaml)
    return folder
