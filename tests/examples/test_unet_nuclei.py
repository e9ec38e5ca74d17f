"""The U-Net example runs, with the smallest possible settings."""

import json

import pytest
import torch
from PIL import Image

pytest.importorskip("faster_coco_eval")

from examples import unet_nuclei as example

pytestmark = pytest.mark.usefixtures("one_thread")


def check(output: str) -> None:
    lines = [line.split(" loss: ") for line in output.splitlines()]
    assert [name for name, _ in lines] == ["BCE", "AP"]
    for _, values in lines:
        for value in values.split(", "):
            assert 0 <= float(value.split()[1]) <= 1


def test_on_drawn_discs(capsys):
    example.main(steps=2, count=4, size=32)
    check(capsys.readouterr().out)


def test_on_a_folder_with_masks(tmp_path, capsys):
    (tmp_path / "images").mkdir()
    Image.new("L", (40, 24), 90).save(tmp_path / "images" / "a.png")
    square = {"segmentation": [[4, 4, 14, 4, 14, 14, 4, 14]], "bbox": [4, 4, 10, 10], "area": 100, "iscrowd": 0}
    content = {
        "images": [{"id": 7, "file_name": "a.png", "width": 40, "height": 24}],
        "categories": [{"id": 1, "name": "nucleus"}],
        "annotations": [square | {"id": 1, "image_id": 7, "category_id": 1}],
    }
    for split in ("train", "val"):
        (tmp_path / f"{split}.json").write_text(json.dumps(content))
    ((image, mask),) = example.read_folder(str(tmp_path), "train", 32)
    assert image.shape == (1, 32, 32)
    assert mask.sum() == 100
    example.main(str(tmp_path), steps=1, size=32)
    check(capsys.readouterr().out)


def test_measures():
    masks = torch.tensor([[True, False, True, False]])
    # Precision 1/1 and 2/3 at the two hits; the first three entries have an IoU of 2/3.
    ap, iou = example.measure(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), masks)
    torch.testing.assert_close(torch.stack([ap, iou]), torch.tensor([5 / 6, 2 / 3]).double())
