"""The transformers example runs, with the smallest possible settings."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

from transformers import RTDetrImageProcessor, Trainer

from bucketrank.integrations.transformers.adapter import LossFunction
from examples import transformers_rt_detr as example

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # The Trainer asks for pinned memory on every machine.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


@pytest.fixture
def trained_losses(monkeypatch, tmp_path):
    """Record the class of the loss of each trained model; the Trainer writes to a temporary folder."""
    classes = []

    class RecordingTrainer(Trainer):  # type: ignore[misc]
        def train(self):
            classes.append(type(self.model.loss_function))
            return super().train()

    monkeypatch.setattr(example, "Trainer", RecordingTrainer)
    monkeypatch.chdir(tmp_path)
    return classes


def test_on_drawn_shapes(trained_losses, printed_losses):
    example.main(steps=2, count=6, size=64)
    assert printed_losses() == ["own", "ranking"]
    assert [loss is LossFunction for loss in trained_losses] == [False, True]


def test_on_a_folder_with_an_image_without_objects(coco_folder, trained_losses, printed_losses):
    example.main(str(coco_folder), steps=1, size=64)
    assert printed_losses() == ["own", "ranking"]
    assert [loss is LossFunction for loss in trained_losses] == [False, True]


def test_shapes_are_drawn_inside_their_boxes():
    dataset = example.draw_shapes(3, 64, seed=0)
    processor = RTDetrImageProcessor(size={"height": 64, "width": 64})
    inputs = example.collate([dataset.imgs[0]], dataset, processor, "")
    pixels, target = inputs["pixel_values"][0], inputs["labels"][0]
    assert pixels.shape == (3, 64, 64)
    x, y, w, h = (64 * target["boxes"][-1]).tolist()  # drawn last, so nothing hides it
    assert pixels[:, int(y), int(x)].min() >= 120 / 255  # the background stays below 90
    assert w == dataset.imgToAnns[0][-1]["bbox"][2]
    assert h == dataset.imgToAnns[0][-1]["bbox"][3]


def test_the_example_is_short():
    assert len(Path(example.__file__).read_text().splitlines()) <= 60
