"""Commands for data sets: ``bucketrank check-data``, ``bucketrank split`` and ``bucketrank convert``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from bucketrank.cli.arguments import require_min, say_next
from bucketrank.errors import UsageError
from bucketrank.settings.choices import LayoutName

Source = Annotated[Path, "folder to convert"]
Destination = Annotated[Path, "new folder, in COCO format"]
Copy = Annotated[bool, "copy the images instead of linking to them"]


def check_data(
    data: Annotated[Path, "folder of the data set (COCO, LVIS, YOLO, Pascal VOC, Roboflow), or its data.yaml"],
    *,
    layout: Annotated[LayoutName | None, "layout of the folder (default: the one that fits)"] = None,
    masks: Annotated[bool, "require a mask for every object"] = False,
    decode: Annotated[bool, "decode every image, not only its header"] = True,
    show: Annotated[int, "problems of each type to list"] = 10,
    workers: Annotated[int | None, "decoding threads (default: one per core)"] = None,
) -> int:
    """Check a whole data set and list every problem with its fix (exit status 1 if training would refuse the data)."""
    from bucketrank.data.summary import check_folder

    require_min("--workers", workers, 1)
    status = check_folder(data, layout=layout, masks=masks, decode=decode, show=show, workers=workers)
    if status == 0:
        say_next("train", "mask-rcnn-laptop" if masks else "atss-laptop", data)
    return status


def split(
    data: Annotated[Path, "folder of the data set, or its data.yaml; training and validation images are joined first"],
    destination: Annotated[Path, "new folder with train.json, val.json and images"],
    *,
    val: Annotated[float, "share of the images for validation"] = 0.2,
    seed: Annotated[int, "random seed"] = 0,
    layout: Annotated[LayoutName | None, "layout of the source, but not lvis (default: the one that fits)"] = None,
    copy: Copy = False,
) -> None:
    """Re-split a data set into training and validation images, stratified by class."""
    from bucketrank.data.split import resplit as write_new_split
    from bucketrank.data.summary import convert_folder

    if not 0 < val < 1:
        raise UsageError(f"--val: expected a share above 0 and below 1, got {val:g}")
    convert_folder(partial(write_new_split, val=val, seed=seed, layout=layout), data, destination, copy=copy)


def convert_cityscapes(source: Source, destination: Destination, *, copy: Copy = False) -> None:
    """Convert Cityscapes (gtFine and leftImg8bit) to COCO format: eight classes, boxes and masks."""
    from bucketrank.data.convert import convert_cityscapes
    from bucketrank.data.summary import convert_folder

    convert_folder(convert_cityscapes, source, destination, copy=copy)


def convert_voc(source: Source, destination: Destination, *, copy: Copy = False) -> None:
    """Convert Pascal VOC (Annotations, JPEGImages, ImageSets) to COCO format; difficult objects become crowds."""
    from bucketrank.data.convert import convert_voc
    from bucketrank.data.summary import convert_folder

    convert_folder(convert_voc, source, destination, copy=copy)


def convert_yolo(
    source: Annotated[Path, "folder to convert, or the data.yaml in it"],
    destination: Destination,
    *,
    copy: Copy = False,
) -> None:
    """Convert YOLO (data.yaml, images, labels) to COCO format: boxes and polygons."""
    from bucketrank.data.convert import convert_yolo
    from bucketrank.data.summary import convert_folder

    convert_folder(convert_yolo, source, destination, copy=copy)
