"""Recognise the layout of a data folder and find its training and validation splits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bucketrank.data.annotations import LabelFiles, Split, Splits, is_yaml
from bucketrank.data.voc import VocLabels, is_voc
from bucketrank.data.yolo import YoloLabels, is_yolo, read_yaml
from bucketrank.errors import DataError


class CocoLayout(NamedTuple):
    """Annotation file and image folder, relative to the data set folder, for training and for validation."""

    train: tuple[str, str]
    val: tuple[str, str]

    def splits(self, folder: Path) -> Splits:
        """Return the splits whose annotation file exists."""
        return Splits(_split(folder, *self.train), _split(folder, *self.val))

    def __str__(self) -> str:
        return f"{self.train[0]}, {self.val[0]}"


COCO_LAYOUTS = {
    "own": CocoLayout(("train.json", "images"), ("val.json", "images")),
    "coco": CocoLayout(
        ("annotations/instances_train2017.json", "train2017"), ("annotations/instances_val2017.json", "val2017")
    ),
    # LVIS splits COCO's images differently: the path in coco_url includes train2017 or val2017.
    "lvis": CocoLayout(("annotations/lvis_v1_train.json", "."), ("annotations/lvis_v1_val.json", ".")),
    "roboflow": CocoLayout(("train/_annotations.coco.json", "train"), ("valid/_annotations.coco.json", "valid")),
}
# Every layout with the files that it is recognised by.
LAYOUTS = {
    **{name: str(layout) for name, layout in COCO_LAYOUTS.items()},
    "yolo": "data.yaml with names, train and val; or labels/*.txt and images",
    "voc": "Annotations/*.xml; or train/*.xml, valid/*.xml next to the images",
}


def find_splits(folder: Path | str, *, layout: str | None = None, seed: int = 0) -> Splits:
    """Find the training and validation splits of a folder in one of the known layouts.

    | layout | annotations | images |
    |---|---|---|
    | own | train.json, val.json | images/ (or next to the files) |
    | coco | annotations/instances_train2017.json | train2017/, val2017/ |
    | lvis | annotations/lvis_v1_train.json | train2017/, val2017/, by ``coco_url`` |
    | roboflow | train/_annotations.coco.json | train/, valid/ |
    | yolo | data.yaml and labels/*.txt | images/, or the folders in data.yaml |
    | voc | Annotations/*.xml, ImageSets/Main | JPEGImages/; or next to the XML files |

    Without ``layout``, the folder must fit exactly one layout; DataError lists several. If only the validation split
    exists, ``train`` is None. If only the training split exists, or a single set such as one ``*.json`` with any other
    name, a tenth of its images, chosen by id and ``seed``, is kept for validation (see Split).

    Args:
        folder: data set folder, or the data.yaml in it.
        layout: own, coco, lvis, roboflow, yolo or voc; by default the one that fits.
        seed: seed that chooses the validation images if there is a single set.
    """
    source = Path(folder)
    folder = source.parent if is_yaml(source) else source
    if not folder.is_dir():
        raise DataError(f"{folder}: the folder does not exist; give the data set folder")
    if layout is not None and layout not in LAYOUTS:
        raise DataError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    fitting = [layout] if layout is not None else recognise(source)
    if len(fitting) > 1:
        raise DataError(
            f"{folder}: fits several layouts:{_listed(fitting)}\n"
            f"Choose one: --layout {fitting[0]}, or --data.layout {fitting[0]} to train"
        )
    for name in fitting:
        if name == "yolo":
            return _label_splits(YoloLabels.open(source), seed)
        if name == "voc":
            return _label_splits(VocLabels(folder), seed)
        train, val = COCO_LAYOUTS[name].splits(folder)
        if train is not None and val is None:
            return _split_in_two(train, seed)
        if val is not None:
            return Splits(train, val)
    single = sorted(path for path in folder.glob("*.json") if path.is_file())
    if len(single) == 1 and layout is None:
        return _split_in_two(Split(single[0], _images(folder, "images")), seed)
    if layout is None and (folder / "data.yaml").is_file():
        read_yaml(folder / "data.yaml", follow_links=True)  # raises if it is broken
    others = f"; it has {len(single)} other *.json: " + ", ".join(path.name for path in single[:5]) if single else ""
    anything = "\n  or a single *.json" if layout is None else ""
    raise DataError(
        f"{folder}: no annotations found{others}. Looked for:{_listed(fitting or list(LAYOUTS))}{anything}\n"
        "Rename the files, or convert them: bucketrank convert --help"
    )


def recognise(source: Path) -> list[str]:
    """List the layouts that a folder fits; a yaml file with names or splits is YOLO, whatever lies next to it."""
    if is_yaml(source) and is_yolo(source.parent, source):
        return ["yolo"]
    folder = source.parent if is_yaml(source) else source
    fitting = [name for name, layout in COCO_LAYOUTS.items() if any(layout.splits(folder))]
    return fitting + ["yolo"] * is_yolo(folder) + ["voc"] * is_voc(folder)


def _label_splits(labels: LabelFiles, seed: int) -> Splits:
    """Return the splits of a data set in another format than COCO."""
    subsets = labels.subsets()
    splits = {name: Split(labels.source, labels.folder, labels=labels, subset=name) for name in subsets}
    if "val" in splits:
        return Splits(splits.get("train"), splits["val"])
    single = splits.get("train") or splits.get("annotations")
    if single is None:
        raise DataError(
            f"{labels.source}: expected images for training or validation, got only {', '.join(subsets)}; name the "
            "folders train and val"
        )
    return _split_in_two(single, seed)


def _split(folder: Path, annotations: str, images: str) -> Split | None:
    path = folder / annotations
    return Split(path, _images(folder, images)) if path.is_file() else None


def _images(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).is_dir() else folder


def _split_in_two(split: Split, seed: int) -> Splits:
    return Splits(replace(split, part="train", seed=seed), replace(split, part="val", seed=seed))


def _listed(layouts: list[str]) -> str:
    return "".join(f"\n  {name}: {LAYOUTS[name]}" for name in layouts)
