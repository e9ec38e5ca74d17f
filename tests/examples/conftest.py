"""A data set in COCO format for the tests of the examples."""

import json

import pytest
from PIL import Image


@pytest.fixture
def coco_folder(tmp_path):
    """Write a folder of two grey images: the first has an object and a crowd, the second has no objects."""
    (tmp_path / "images").mkdir()
    for name in "ab":
        Image.new("L", (80, 64), 90).save(tmp_path / "images" / f"{name}.png")
    ground_truth = {
        "images": [{"id": 7, "file_name": "a.png"}, {"id": 9, "file_name": "b.png"}],
        "categories": [{"id": 3, "name": "thing"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 3, "bbox": [5, 5, 20, 25], "area": 500, "iscrowd": 0},
            {"id": 2, "image_id": 7, "category_id": 3, "bbox": [0, 0, 50, 50], "area": 2500, "iscrowd": 1},
        ],
    }
    for split in ("train", "val"):
        (tmp_path / f"{split}.json").write_text(json.dumps(ground_truth))
    return tmp_path


@pytest.fixture
def printed_losses(capsys):
    """Return a function that reads the printed lines: the names of the losses, in order, after a check of the APs."""

    def read() -> list[str]:
        losses = []
        for line in capsys.readouterr().out.splitlines():
            loss, separator, values = line.partition(" loss: ")
            if separator:
                (ap_name, ap), (ap50_name, ap50) = (value.split() for value in values.split(", "))
                assert (ap_name, ap50_name) == ("AP", "AP50")
                assert 0 <= float(ap) <= float(ap50) <= 1
                losses.append(loss)
        return losses

    return read
