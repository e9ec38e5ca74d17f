"""Search of a folder for the annotation files for training and validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bucketrank.data.annotations import Split
from bucketrank.data.problems import DataError


class Splits(NamedTuple):
    """The training and validation splits of a folder; at least one of them is not None."""

    train: Split | None  # None if only the validation file exists
    val: Split | None  # the validation images

    def with_holdout(self, share: float | None) -> Splits:
        """Return splits whose validation images are ``share`` of the training images; None changes nothing."""
        if share is None or self.train is None:
            return self
        return Splits(replace(self.train, tuning="train", share=share), replace(self.train, tuning="val", share=share))


class Layout(NamedTuple):
    """Annotation file and folder of images, relative to the data set's folder, for training and for validation."""

    train: tuple[str, str]
    val: tuple[str, str]


LAYOUTS = {
    "own": Layout(("train.json", "images"), ("val.json", "images")),
    "coco": Layout(
        ("annotations/instances_train2017.json", "train2017"), ("annotations/instances_val2017.json", "val2017")
    ),
    # LVIS splits COCO's images differently: the path in coco_url includes train2017 or val2017.
    "lvis": Layout(("annotations/lvis_v1_train.json", "."), ("annotations/lvis_v1_val.json", ".")),
    "roboflow": Layout(("train/_annotations.coco.json", "train"), ("valid/_annotations.coco.json", "valid")),
}


def find_splits(folder: Path | str, *, layout: str | None = None, seed: int = 0) -> Splits:
    """Return the splits of a folder in one of the known layouts.

    | layout | annotations | images |
    |---|---|---|
    | own | train.json, val.json | images/ (or next to the files) |
    | coco | annotations/instances_train2017.json | train2017/, val2017/ |
    | lvis | annotations/lvis_v1_train.json | train2017/, val2017/, by ``coco_url`` |
    | roboflow | train/_annotations.coco.json | train/, valid/ |

    Without ``layout``, the first layout with an existing annotation file is chosen. If only the validation file exists,
    ``train`` is None. If only the training file exists, or a single ``*.json`` of any other name, it is divided: a
    tenth of the images, chosen by id and ``seed``, is kept for validation (see Split).

    Args:
        folder: folder of the data set.
        layout: own, coco, lvis or roboflow; by default the first that fits.
        seed: seed of the division of a single file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: the folder does not exist; give the folder of the data set")
    if layout is not None and layout not in LAYOUTS:
        raise DataError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    chosen = LAYOUTS if layout is None else {layout: LAYOUTS[layout]}
    for each in chosen.values():
        train, val = _split(folder, *each.train), _split(folder, *each.val)
        if train is not None and val is None:
            return _divided(train, seed)
        if val is not None:
            return Splits(train, val)
    single = sorted(path for path in folder.glob("*.json") if path.is_file())
    if len(single) == 1 and layout is None:
        return _divided(Split(single[0], _images(folder, "images")), seed)
    expected = "".join(f"\n  {name}: {each.train[0]}, {each.val[0]}" for name, each in chosen.items())
    expected += "\n  or a single *.json" if layout is None else ""
    others = f"; it has {len(single)} other *.json: " + ", ".join(path.name for path in single[:5]) if single else ""
    raise DataError(
        f"{folder}: no annotations found{others}. Looked for:{expected}\n"
        "Rename the files, or convert them: bucketrank convert --help"
    )


def _split(folder: Path, annotations: str, images: str) -> Split | None:
    path = folder / annotations
    return Split(path, _images(folder, images)) if path.is_file() else None


def _images(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).is_dir() else folder


def _divided(split: Split, seed: int) -> Splits:
    return Splits(replace(split, part="train", seed=seed), replace(split, part="val", seed=seed))
