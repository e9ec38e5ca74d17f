"""Convert Cityscapes, YOLO and Pascal VOC to a folder in COCO format; training also reads YOLO and VOC directly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from faster_coco_eval.core import mask as rle_codec

from bucketrank.data.annotations import LabelFiles
from bucketrank.data.convert.writer import Writer, Written
from bucketrank.data.images import read_stored_values
from bucketrank.data.labels import encode_mask, require_inside
from bucketrank.data.voc import VocLabels
from bucketrank.data.yolo import YoloLabels
from bucketrank.errors import DataError

# The eight evaluated classes with instances; the keys are Cityscapes ids (29 caravan and 30 trailer are not evaluated).
CATEGORIES = {
    24: "person",
    25: "rider",
    26: "car",
    27: "truck",
    28: "bus",
    31: "train",
    32: "motorcycle",
    33: "bicycle",
}
INSTANCE = 1000  # pixel value of instance n of class c: c * 1000 + n; pixel value of a group: c
ANNOTATIONS, IMAGES = "_gtFine_instanceIds.png", "_leftImg8bit.png"


def convert_cityscapes(source: Path, folder: Path, *, copy: bool = False) -> list[Written]:
    """Convert ``gtFine`` and ``leftImg8bit`` of ``source`` to a folder in COCO format, with train.json and val.json.

    Masks come from the instance id images, so they are exact and exclude occluded parts. A group of objects that were
    not annotated separately becomes a crowd. The test images are left out: they have no public annotations.
    """
    written = []
    with Writer(source, folder, categories=CATEGORIES, copy=copy) as writer:
        for split in ("train", "val"):
            instance_files = sorted((source / "gtFine" / split).glob(f"*/*{ANNOTATIONS}"))
            if not instance_files:
                continue
            for path in instance_files:
                city, stem = path.parent.name, path.name.removesuffix(ANNOTATIONS)
                image_id, width, height = writer.add_image(source / "leftImg8bit" / split / city / f"{stem}{IMAGES}")
                require_inside(path, source)
                instances = read_stored_values(path)
                if instances.shape != (height, width):
                    raise DataError(
                        f"{path}: expected one number for each of {width} x {height} pixels, got an array of shape "
                        f"{instances.shape}; unpack gtFine again"
                    )
                for instance in np.unique(instances):
                    crowd = bool(instance < INSTANCE)
                    category = int(instance if crowd else instance // INSTANCE)
                    if category in CATEGORIES:
                        mask = encode_mask(instances == instance)
                        box, area = rle_codec.toBbox(mask).tolist(), int(rle_codec.area(mask))
                        writer.add_object(image_id, category, box=box, area=area, crowd=crowd, segmentation=mask)
            written.append(writer.write(split))
        if not written:
            raise DataError(
                f"{source}: no annotations found; looked for gtFine/train/*/*{ANNOTATIONS} and the same in val. "
                "Unpack gtFine_trainvaltest.zip and leftImg8bit_trainvaltest.zip side by side"
            )
    return written


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
