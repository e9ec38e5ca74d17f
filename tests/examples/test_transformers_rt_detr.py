"""The transformers example, with settings so small that it only shows that it runs."""

import json
import os
import re
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

import torch
from PIL import Image
from transformers import RTDetrImageProcessor, Trainer

from bucketrank.integrations.transformers.adapter import RankingLoss
from examples import transformers_rt_detr as example

LINE = re.compile(r"(own|ranking) loss: AP (-?\d\.\d{3}), AP50 (-?\d\.\d{3})")
# The Trainer asks for pinned memory wherever it runs.
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")


@pytest.fixture
def losses(monkeypatch, tmp_path):
    """The loss of every model that was trained; one thread, and the Trainer's folder out of the way."""
    used = []

    class Watched(Trainer):  # type: ignore[misc]
        def train(self):
            used.append(type(self.model.loss_function))
            return super().train()

    monkeypatch.setattr(example, "Trainer", Watched)
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield used
    torch.set_num_threads(before)


def printed(capsys) -> list[str]:
    return [loss for loss, _, _ in LINE.findall(capsys.readouterr().out)]


def test_on_drawn_shapes(losses, capsys):
    example.main(steps=2, count=6, size=64)
    assert printed(capsys) == ["own", "ranking"]
    assert [loss is RankingLoss for loss in losses] == [False, True]


def test_on_a_folder_with_an_image_without_objects(losses, capsys, tmp_path):
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
    example.main(str(tmp_path), steps=1, size=64)
    assert printed(capsys) == ["own", "ranking"]
    assert len(losses) == 2


def test_shapes_are_where_the_truth_says():
    truth = example.draw_shapes(3, 64, seed=0)
    processor = RTDetrImageProcessor(size={"height": 64, "width": 64})
    inputs = example.collate([truth.imgs[0]], truth, processor, "")
    pixels, target = inputs["pixel_values"][0], inputs["labels"][0]
    assert pixels.shape == (3, 64, 64)
    x, y, w, h = (64 * target["boxes"][-1]).tolist()  # drawn last, hidden by none
    assert pixels[:, int(y), int(x)].min() >= 120 / 255  # the background stays below 90
    assert w == truth.imgToAnns[0][-1]["bbox"][2]
    assert h == truth.imgToAnns[0][-1]["bbox"][3]


def test_it_is_short():
    assert len(Path(example.__file__).read_text().splitlines()) <= 60
