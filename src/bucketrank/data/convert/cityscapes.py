"""Cityscapes' fine annotations."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bucketrank.data.convert.writer import Writer, Written, encoded
from bucketrank.data.pictures import read_numbers
from bucketrank.data.problems import DataError

# The eight classes with instances that are evaluated, by Cityscapes' own numbers (29 caravan and 30 trailer are not).
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
INSTANCE = 1000  # a pixel of instance n of class c is c * 1000 + n; one of a group of c is c alone
ANNOTATIONS, IMAGES = "_gtFine_instanceIds.png", "_leftImg8bit.png"


def convert_cityscapes(source: Path, folder: Path, *, copy: bool = False) -> list[Written]:
    """``gtFine`` and ``leftImg8bit`` of ``source`` as a folder in COCO's format, with train.json and val.json.

    Masks come from the pictures of instance numbers, so that they are exact and end where something is in front.
    A group of objects that were not told apart becomes a crowd. The test images have no public annotations and are
    left out.
    """
    writer = Writer(source, folder, categories=CATEGORIES, copy=copy)
    written = []
    for split in ("train", "val"):
        numbered = sorted((source / "gtFine" / split).glob(f"*/*{ANNOTATIONS}"))
        if not numbered:
            continue
        for path in numbered:
            city, stem = path.parent.name, path.name.removesuffix(ANNOTATIONS)
            image_id, width, height = writer.add_image(source / "leftImg8bit" / split / city / f"{stem}{IMAGES}")
            numbers = read_numbers(path)
            if numbers.shape != (height, width):
                raise DataError(
                    f"{path}: expected one number for each of {width} x {height} pixels, got an array of shape "
                    f"{numbers.shape}; unpack gtFine again"
                )
            for number in np.unique(numbers):
                crowd = bool(number < INSTANCE)
                category = int(number if crowd else number // INSTANCE)
                if category in CATEGORIES:
                    mask, box, area = encoded(numbers == number)
                    writer.add_object(image_id, category, box=box, area=area, crowd=crowd, segmentation=mask)
        written.append(writer.write(split))
    if not written:
        raise DataError(
            f"{source}: no annotations found; looked for gtFine/train/*/*{ANNOTATIONS} and the same below val. "
            "Unpack gtFine_trainvaltest.zip and leftImg8bit_trainvaltest.zip side by side"
        )
    return written
