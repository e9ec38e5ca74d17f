"""A small data set for the tests, without problems until a test breaks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bucketrank.data import Split


def write_image(path: Path, *, width: int = 40, height: int = 30, mode: str = "RGB", **saving: Any) -> Path:
    """Write an image file with a gradient."""
    path.parent.mkdir(parents=True, exist_ok=True)
    levels = np.add.outer(np.arange(height) * 3, np.arange(width) * 2).astype(np.uint8)
    Image.fromarray(levels).convert(mode).save(path, **saving)
    return path


def sound_document() -> dict[str, Any]:
    """Return two images of 40 x 30, one of them empty; three objects, one a crowd; category ids out of order."""
    rle = {"size": [30, 40], "counts": [0, 30, 1170]}  # the first column
    return {
        "images": [
            {"id": 11, "file_name": "a.png", "width": 40, "height": 30},
            {"id": 5, "file_name": "b.png", "width": 40, "height": 30},
        ],
        "categories": [{"id": 9, "name": "dog"}, {"id": 2, "name": "cat"}],
        "annotations": [
            {
                "id": 1,
                "image_id": 11,
                "category_id": 9,
                "bbox": [4, 5, 10, 20],
                "area": 200,
                "iscrowd": 0,
                "segmentation": [[4, 5, 14, 5, 14, 25, 4, 25]],
            },
            {"id": 2, "image_id": 11, "category_id": 2, "bbox": [20, 3, 8, 6], "segmentation": [[20, 3, 28, 3, 28, 9]]},
            {"id": 3, "image_id": 11, "category_id": 2, "bbox": [0, 0, 1, 30], "iscrowd": 1, "segmentation": rle},
        ],
    }


def write_split(folder: Path, document: Any, *, name: str = "train.json") -> Split:
    """Write the document, and a.png and b.png in images/."""
    for file in ("a.png", "b.png"):
        write_image(folder / "images" / file)
    (folder / name).write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return Split(folder / name, folder / "images")
