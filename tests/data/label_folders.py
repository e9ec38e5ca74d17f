"""The same drawn images in every layout that is read directly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bucketrank.data import write_shapes
from bucketrank.data.shapes import CLASSES
from tests.data.other_formats import voc_object, write_text

Content = dict[str, list[tuple[str, dict[str, Any], list[dict[str, Any]]]]]  # split: file name, image, annotations
ROBOFLOW = {"train": "train", "val": "valid"}


def drawn(folder: Path, *, train: int = 4, val: int = 2) -> Content:
    """Draw images of 64 x 64 with their annotations in COCO format."""
    write_shapes(folder, train=train, val=val, size=64)
    content: Content = {}
    for split in ("train", "val"):
        document = json.loads((folder / f"{split}.json").read_text(encoding="utf-8"))
        content[split] = [
            (image["file_name"], image, [each for each in document["annotations"] if each["image_id"] == image["id"]])
            for image in document["images"]
        ]
    return content


def yolo_line(entry: dict[str, Any], *, polygon: bool = False) -> str:
    """Write an object as a line, as a box or as the four corners of its box."""
    x, y, w, h = (side / 64 for side in entry["bbox"])
    values = [x, y, x + w, y, x + w, y + h, x, y + h] if polygon else [x + w / 2, y + h / 2, w, h]
    return " ".join([str(entry["category_id"] - 1), *map(repr, values)])


def voc_text(entries: list[dict[str, Any]]) -> str:
    """Write the objects as XML, with pixels counted from 1."""
    text = "<annotation><size><width>64</width><height>64</height></size>\n"
    for entry in entries:
        x, y, w, h = entry["bbox"]
        text += voc_object(CLASSES[entry["category_id"] - 1], x + 1, y + 1, x + w, y + h) + "\n"
    return f"{text}</annotation>"


def write_yolo(
    drawings: Path, folder: Path, content: Content, *, places: dict[str, str], polygon: bool = False
) -> None:
    """Write images and labels to the given image folders."""
    for split, place in places.items():
        for name, _, entries in content[split]:
            path = folder / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(drawings / "images" / name, path)
            lines = [yolo_line(entry, polygon=polygon) for entry in entries]
            write_text(folder / place.replace("images", "labels") / f"{path.stem}.txt", "\n".join(lines))


def ultralytics(drawings: Path, folder: Path, content: Content, *, polygon: bool = False) -> None:
    """Write images/train, labels/train and a data.yaml with path, splits and names by number."""
    write_yolo(drawings, folder, content, places={"train": "images/train", "val": "images/val"}, polygon=polygon)
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(CLASSES))
    write_text(folder / "data.yaml", f"path: .\ntrain: images/train\nval: images/val\nnames:\n{names}")


def segments(drawings: Path, folder: Path, content: Content) -> None:
    """Write YOLO labels as polygons."""
    ultralytics(drawings, folder, content, polygon=True)


def listed(drawings: Path, folder: Path, content: Content) -> None:
    """Write YOLO with the images of each split in a text file."""
    write_yolo(drawings, folder, content, places={"train": "images", "val": "images"})
    for split in content:
        write_text(folder / f"{split}.txt", "".join(f"./images/{name}\n" for name, _, _ in content[split]))
    write_text(folder / "data.yaml", f"train: train.txt\nval: val.txt\nnames: [{', '.join(CLASSES)}]\n")


def roboflow_yolo(drawings: Path, folder: Path, content: Content) -> None:
    """Write Roboflow's YOLO export."""
    write_yolo(drawings, folder, content, places={"train": "train/images", "val": "valid/images"})
    paths = "train: ../train/images\nval: ../valid/images\ntest: ../test/images\n"
    write_yolo(drawings, folder, {"test": content["val"]}, places={"test": "test/images"})
    write_text(folder / "data.yaml", f"{paths}\nnc: 4\nnames: ['circle', 'square', 'triangle', 'star']\n")


def roboflow_coco(drawings: Path, folder: Path, content: Content) -> None:
    """Write Roboflow's COCO export."""
    for split, place in ROBOFLOW.items():
        (folder / place).mkdir(parents=True)
        shutil.copyfile(drawings / f"{split}.json", folder / place / "_annotations.coco.json")
        for name, _, _ in content[split]:
            shutil.copyfile(drawings / "images" / name, folder / place / name)


def roboflow_voc(drawings: Path, folder: Path, content: Content) -> None:
    """Write Roboflow's VOC export, with the XML files next to the images."""
    for split, place in ROBOFLOW.items():
        for name, _, entries in content[split]:
            write_text(folder / place / f"{Path(name).stem}.xml", voc_text(entries))
            shutil.copyfile(drawings / "images" / name, folder / place / name)


def voc(drawings: Path, folder: Path, content: Content) -> None:
    """Write Pascal VOC."""
    (folder / "JPEGImages").mkdir(parents=True)
    for split in content:
        for name, _, entries in content[split]:
            write_text(folder / f"Annotations/{Path(name).stem}.xml", voc_text(entries))
            shutil.copyfile(drawings / "images" / name, folder / "JPEGImages" / name)
        write_text(folder / f"ImageSets/Main/{split}.txt", "".join(f"{Path(n).stem}\n" for n, _, _ in content[split]))


WRITERS: dict[str, Callable[[Path, Path, Content], None]] = {
    writer.__name__: writer
    for writer in (ultralytics, segments, listed, roboflow_yolo, roboflow_coco, roboflow_voc, voc)
}


def label_folder(name: str, place: Path) -> tuple[Path, Content]:
    """Write a data set in one of the layouts of WRITERS; return its folder and what it contains."""
    content = drawn(place / "drawn")
    WRITERS[name](place / "drawn", place / name, content)
    return place / name, content
