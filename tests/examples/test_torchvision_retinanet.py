"""The torchvision example, with settings so small that it only shows that it runs."""

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.models.detection import RetinaNet

from bucketrank.integrations.torchvision import use_ranking_loss
from examples import torchvision_retinanet as example

LINE = re.compile(r"(own|ranking) loss: AP (\d\.\d{3}), AP50 (\d\.\d{3})")


@pytest.fixture
def calls(monkeypatch):
    """The models that were given the ranking loss."""
    models: list[RetinaNet] = []

    def noted(model):
        models.append(model)
        return use_ranking_loss(model)

    monkeypatch.setattr(example, "use_ranking_loss", noted)
    return models


def printed(capsys) -> list[str]:
    found = LINE.findall(capsys.readouterr().out)
    assert all(0 <= float(ap) <= float(ap50) <= 1 for _, ap, ap50 in found)
    return [loss for loss, _, _ in found]


def test_on_drawn_shapes(calls, capsys):
    example.main(steps=2, batch=2, count=4, size=64)
    assert printed(capsys) == ["own", "ranking"]
    assert len(calls) == 1


def test_on_a_folder_with_an_image_without_objects(tmp_path, calls, capsys):
    (tmp_path / "images").mkdir()
    for name in "ab":
        Image.new("L", (80, 64), 90).save(tmp_path / "images" / f"{name}.png")
    truth = {
        "images": [{"id": 7, "file_name": "a.png"}, {"id": 9, "file_name": "b.png"}],
        "categories": [{"id": 3, "name": "thing"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 3, "bbox": [5, 5, 20, 25], "area": 500, "iscrowd": 0},
            {"id": 2, "image_id": 7, "category_id": 3, "bbox": [0, 0, 50, 50], "area": 2500, "iscrowd": 1},
        ],
    }
    for split in ("train", "val"):
        (tmp_path / f"{split}.json").write_text(json.dumps(truth))
    example.main(str(tmp_path), steps=2, batch=2, size=64)
    assert printed(capsys) == ["own", "ranking"]
    assert len(calls) == 1


def test_shapes_are_where_the_truth_says():
    torch.manual_seed(0)
    truth = example.draw_shapes(3, 64)
    image, target = example.sample(truth, 0, "")
    assert image.shape == (3, 64, 64)
    assert target["boxes"].shape == (3, 4)
    last = target["boxes"][-1].int().tolist()  # drawn last, hidden by none
    x, y = (last[0] + last[2]) // 2, (last[1] + last[3]) // 2
    assert image[:, y, x].min() >= 0.5  # the background stays below 0.4
    assert image[:, last[1], x].min() >= 0.5


def test_it_is_short():
    assert len(Path(example.__file__).read_text().splitlines()) <= 60
