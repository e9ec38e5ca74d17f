"""Recognise the layout of a data folder and find its splits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bucketrank.data.annotations import Split, Splits, is_yaml
from bucketrank.data.voc import VocLabels, is_voc
from bucketrank.data.yolo import YoloLabels, is_yolo, read_yaml
from bucketrank.errors import DataError


class CocoLayout(NamedTuple):
    """Annotation file and image folder of each split, relative to the data set folder."""

    train: tuple[str, str]
    val: tuple[str, str]
    test: tuple[str, str]

    def splits(self, folder: Path) -> dict[str, Split]:
        """Return the splits whose annotation file exists."""
        return {
            name: Split(folder / file, _images(folder, images))
            for name, (file, images) in self._asdict().items()
            if (folder / file).is_file()
        }


COCO_LAYOUTS = {
    "own": CocoLayout(("train.json", "images"), ("val.json", "images"), ("test.json", "images")),
    "coco": CocoLayout(
        ("annotations/instances_train2017.json", "train2017"),
        ("annotations/instances_val2017.json", "val2017"),
        ("annotations/instances_test2017.json", "test2017"),
    ),
    # LVIS splits COCO's images differently: the path in coco_url includes train2017 or val2017.
    "lvis": CocoLayout(
        ("annotations/lvis_v1_train.json", "."),
        ("annotations/lvis_v1_val.json", "."),
        ("annotations/lvis_v1_test.json", "."),
    ),
    "roboflow": CocoLayout(
        ("train/_annotations.coco.json", "train"),
        ("valid/_annotations.coco.json", "valid"),
        ("test/_annotations.coco.json", "test"),
    ),
}
# Every layout with the files that it is recognised by.
LAYOUTS = {
    **{name: f"{layout.train[0]}, {layout.val[0]}" for name, layout in COCO_LAYOUTS.items()},
    "yolo": "data.yaml with names, train and val; or labels/*.txt and images",
    "voc": "Annotations/*.xml; or train/*.xml, valid/*.xml next to the images",
}


def find_splits(folder: Path | str, *, layout: str | None = None, seed: int = 0) -> Splits:
    """Find the training and validation splits of ``folder``, or of the data.yaml in it, in one of the known layouts.

    | layout | annotations | images |
    |---|---|---|
    | own | train.json, val.json | images/ (or next to the files) |
    | coco | annotations/instances_train2017.json | train2017/, val2017/ |
    | lvis | annotations/lvis_v1_train.json | train2017/, val2017/, by ``coco_url`` |
    | roboflow | train/_annotations.coco.json | train/, valid/ |
    | yolo | data.yaml and labels/*.txt | images/, or the folders in data.yaml |
    | voc | Annotations/*.xml, ImageSets/Main | JPEGImages/; or next to the XML files |

    Without ``layout``, a name in this table, the folder must fit exactly one; DataError lists several. If only the
    validation split exists, ``train`` is None. If only the training split exists, or a single set such as one
    ``*.json`` with any other name, a tenth of its images, chosen by id and ``seed``, is kept for validation (see
    Split).
    """
    splits = _all_splits(Path(folder), layout, seed)
    if not {"train", "val"} & {*splits}:
        raise DataError(
            f"{folder}: expected images for training or validation, got only {', '.join(splits)}; name the folders "
            "or files train and val"
        )
    return Splits(splits.get("train"), splits.get("val"))


def find_split(folder: Path | str, name: str, *, layout: str | None = None, holdout: float | None = None) -> Split:
    """Find the split train, val or test of a folder; raise DataError if it does not exist or has no annotations.

    The training and validation splits are those of ``find_splits(folder).with_holdout(holdout)``.
    """
    splits = _all_splits(Path(folder), layout, seed=0)
    pair = Splits(splits.get("train"), splits.get("val")).with_holdout(holdout)
    splits |= {each: split for each, split in pair._asdict().items() if split is not None}
    chosen = splits.pop(name, None)
    # The images of a test split are often published without annotations.
    if chosen is not None and (name != "test" or chosen.is_annotated):
        return chosen
    got = "none" if chosen is None else "images without annotations"
    remedy = f"choose {' or '.join(splits)}" if splits else "annotate them"
    raise DataError(f"{folder}: expected a split {name!r} with annotations, got {got}; {remedy}")


def _all_splits(source: Path, layout: str | None, seed: int) -> dict[str, Split]:
    """Find the splits train, val and test of a folder; without val, train or a single set is divided."""
    folder = source.parent if is_yaml(source) else source
    if folder.is_file():
        raise DataError(f"{folder}: expected the data set folder or its data.yaml, got another file; give its folder")
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
    name = fitting[0] if fitting else None
    if name in ("yolo", "voc"):
        labels = YoloLabels.open(source) if name == "yolo" else VocLabels(folder)
        return _divided(
            {each: Split(labels.source, labels.folder, labels=labels, subset=each) for each in labels.subsets()}, seed
        )
    splits = {} if name is None else COCO_LAYOUTS[name].splits(folder)
    single = sorted(path for path in folder.glob("*.json") if path.is_file())
    is_named = bool({"train", "val"} & {*splits}) or single == [split.annotations for split in splits.values()]
    if len(single) == 1 and layout is None and not is_named:
        splits["annotations"] = Split(single[0], _images(folder, "images"))
    if splits:
        return _divided(splits, seed)
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
    by_layout = {name: layout.splits(folder) for name, layout in COCO_LAYOUTS.items()}
    fitting = [name for name, splits in by_layout.items() if {"train", "val"} & {*splits}]
    fitting += ["yolo"] * is_yolo(folder) + ["voc"] * is_voc(folder)
    return fitting or [name for name, splits in by_layout.items() if splits]  # only a test split


def _images(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).is_dir() else folder


def _divided(splits: dict[str, Split], seed: int) -> dict[str, Split]:
    """Divide the training images, or a single set, into training and validation images if there is no ``val``."""
    single = splits.get("train") or splits.pop("annotations", None)
    if "val" in splits or single is None:
        return splits
    return splits | {"train": replace(single, part="train", seed=seed), "val": replace(single, part="val", seed=seed)}


def _listed(layouts: list[str]) -> str:
    return "".join(f"\n  {name}: {LAYOUTS[name]}" for name in layouts)
