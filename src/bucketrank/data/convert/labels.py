"""Convert YOLO and Pascal VOC to a folder in COCO format; training also reads both directly."""

from __future__ import annotations

from pathlib import Path

from bucketrank.data.annotations import LabelFiles
from bucketrank.data.convert.writer import Writer, Written
from bucketrank.data.voc import VocLabels
from bucketrank.data.yolo import YoloLabels


def convert_yolo(source: Path, folder: Path, *, copy: bool = False) -> list[Written]:
    """Convert a YOLO folder, or the data.yaml in it (see YoloLabels), to one annotation file per subset."""
    return _convert(YoloLabels.open(source, follow_links=False), folder, copy=copy)


def convert_voc(source: Path, folder: Path, *, copy: bool = False) -> list[Written]:
    """Convert a VOC folder (see VocLabels) to one annotation file per list in ImageSets/Main."""
    return _convert(VocLabels(source, follow_links=False), folder, copy=copy)


def _convert(labels: LabelFiles, folder: Path, *, copy: bool) -> list[Written]:
    documents = {subset: labels.read(subset) for subset in labels.subsets()}
    names = {each["id"]: each["name"] for document in documents.values() for each in document["categories"]}
    with Writer(labels.folder, folder, categories=names, copy=copy) as writer:
        return [writer.write_document(subset, document) for subset, document in documents.items()]
