"""``bucketrank convert cityscapes``, ``convert voc`` and ``convert yolo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bucketrank.arguments import require

Source = Annotated[Path, "folder to convert"]
Destination = Annotated[Path, "new folder, in COCO's format"]
Copy = Annotated[bool, "copy the images instead of linking to them"]


def convert_cityscapes(source: Source, destination: Destination, *, copy: Copy = False) -> None:
    """Convert Cityscapes (gtFine and leftImg8bit) to COCO's format: eight classes, boxes and masks."""
    _convert("convert_cityscapes", source, destination, copy=copy)


def convert_voc(source: Source, destination: Destination, *, copy: Copy = False) -> None:
    """Convert Pascal VOC (Annotations, JPEGImages, ImageSets) to COCO's format; difficult objects become crowds."""
    _convert("convert_voc", source, destination, copy=copy)


def convert_yolo(source: Source, destination: Destination, *, copy: Copy = False) -> None:
    """Convert YOLO (data.yaml, images, labels) to COCO's format: boxes and polygons."""
    _convert("convert_yolo", source, destination, copy=copy)


def _convert(name: str, source: Path, destination: Path, *, copy: bool) -> None:
    require("rich", "PIL", "faster_coco_eval", "yaml", extra="detect")
    from bucketrank.data import convert
    from bucketrank.data.summary import convert_folder

    convert_folder(getattr(convert, name), source, destination, copy=copy)
