"""The torchvision example runs, with the smallest possible settings."""

from pathlib import Path

import pytest
import torch
from torchvision.models.detection import RetinaNet

from bucketrank.integrations.torchvision import use_ranking_loss
from examples import torchvision_retinanet as example

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def ranking_models(monkeypatch):
    """Record the models that get the ranking loss."""
    models: list[RetinaNet] = []

    def recorded(model):
        models.append(model)
        return use_ranking_loss(model)

    monkeypatch.setattr(example, "use_ranking_loss", recorded)
    return models


def test_on_drawn_shapes(ranking_models, printed_losses):
    example.main(steps=2, batch=2, count=4, size=64)
    assert printed_losses() == ["own", "ranking"]
    assert len(ranking_models) == 1


def test_on_a_folder_with_an_image_without_objects(coco_folder, ranking_models, printed_losses):
    example.main(str(coco_folder), steps=2, batch=2, size=64)
    assert printed_losses() == ["own", "ranking"]
    assert len(ranking_models) == 1


def test_shapes_are_drawn_inside_their_boxes():
    torch.manual_seed(0)
    dataset = example.draw_shapes(3, 64)
    image, target = example.sample(dataset, 0, "")
    assert image.shape == (3, 64, 64)
    assert target["boxes"].shape == (3, 4)
    left, top, right, bottom = target["boxes"][-1].int().tolist()  # drawn last, so nothing hides it
    x, y = (left + right) // 2, (top + bottom) // 2
    assert image[:, y, x].min() >= 0.5  # the background stays below 0.4
    assert image[:, top, x].min() >= 0.5


def test_the_example_is_short():
    assert len(Path(example.__file__).read_text().splitlines()) <= 60
