"""Thin images: resizing keeps at least one pixel of each side, in training and in detection."""

import pytest
import torch
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from bucketrank.detectors.base import InputTransform
from bucketrank.settings import detectors

from .small_detectors import scene, small_detector

SIZES = [(2, 3000), (3000, 1)]  # height and width; at 160 pixels the short side would be 0.1 and 0.05 pixels


def thin_target(height, width):
    boxes = torch.tensor([[0.0, 0.0, width / 2, height / 2], [0.0, 0.0, width, height]])
    return {"boxes": boxes, "labels": torch.tensor([1, 2]), "masks": torch.ones(2, height, width, dtype=torch.uint8)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", detectors())
@pytest.mark.parametrize("size", SIZES)
def test_every_detector_takes_thin_images(name, size):
    height, width = size
    model = small_detector(name)
    images, targets = scene((3,))
    losses = model([torch.rand(3, height, width), *images], [thin_target(height, width), *targets])
    assert sum(losses.values()).isfinite()
    with torch.no_grad():
        (detections,) = model.eval()([torch.rand(3, height, width)])
    boxes = detections["boxes"]
    assert boxes.isfinite().all()
    assert boxes.min() >= 0
    assert (boxes.amax(0) <= torch.tensor([width, height, width, height]) + 1e-3).all()


def transforms(min_size=96, max_size=160):
    settings = {"min_size": min_size, "max_size": max_size, "image_mean": [0.5] * 3, "image_std": [0.2] * 3}
    return InputTransform(**settings).eval(), GeneralizedRCNNTransform(**settings).eval()


def test_boxes_and_masks_are_resized_with_a_thin_image():
    ours, _ = transforms()
    batch, (target,) = ours([torch.rand(3, 2, 3200)], [thin_target(2, 3200)])
    assert batch.image_sizes == [(1, 160)]
    torch.testing.assert_close(target["boxes"], torch.tensor([[0.0, 0, 80, 0.5], [0, 0, 160, 1]]))
    torch.testing.assert_close(target["masks"], torch.ones(2, 1, 160, dtype=torch.uint8))


@pytest.mark.parametrize("size", [(96, 120), (20, 3200), (160, 1), (1, 1), (701, 67)])
def test_other_images_are_resized_as_by_torchvision(size):
    ours, theirs = transforms()
    image = torch.rand(3, *size)
    mine, expected = ours([image])[0], theirs([image])[0]
    assert mine.image_sizes == expected.image_sizes
    torch.testing.assert_close(mine.tensors, expected.tensors, rtol=0, atol=0)


def test_a_fixed_size_holds_for_thin_images():
    settings = {"min_size": 96, "max_size": 96, "image_mean": [0.5] * 3, "image_std": [0.2] * 3}
    transform = InputTransform(**settings, fixed_size=(96, 96)).eval()
    images, _ = transform([torch.rand(3, 2000, 4)])
    assert images.tensors.shape[-2:] == (96, 96)
