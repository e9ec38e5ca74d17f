"""Deformable convolutions, alone and in a ResNet."""

import pytest
import torch
from torch import nn

from bucketrank.detectors.backbone import Backbone, DeformableConv2d, build_backbone
from bucketrank.settings import BackboneSettings

from .backbone_checks import (
    assert_identical,
    random_images,
    random_sum,
    randomise_constants,
    trainable,
    with_gradient,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def deformable_resnet18(**settings: object) -> Backbone:
    torch.manual_seed(0)
    backbone = build_backbone(BackboneSettings("resnet18", deformable_groups=4, **settings))  # type: ignore[arg-type]
    return randomise_constants(backbone)


def test_deformable_layer_starts_as_the_plain_one():
    torch.manual_seed(0)
    plain = nn.Conv2d(8, 6, 3, stride=2, padding=2, dilation=2, groups=2)
    layer = DeformableConv2d(plain, offset_groups=4)
    features = torch.randn(2, 8, 9, 12)
    torch.testing.assert_close(layer(features), plain(features))
    layer(features).square().sum().backward()
    gradient = layer.predictor.weight.grad
    assert gradient is not None
    offsets, logits = gradient.split([72, 36])
    assert offsets.flatten(1).any(1).all()
    assert logits.flatten(1).any(1).all()


def test_deformable_layer_samples_where_the_offsets_say():
    plain = nn.Conv2d(2, 1, 3, padding=1, bias=False)
    layer = DeformableConv2d(plain, offset_groups=2)
    predicted = layer.predictor.get_parameter("bias")
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:, :, 1, 1] = 1  # passes the middle of both channels
        bias = predicted[:36].view(2, 9, 2)  # group, cell, (y, x)
        bias[0, 4, 0] = 1  # the first channel is read one row below,
        bias[1, 4, 1] = 0.5  # the second half a column to the right
        predicted[36:].view(2, 9)[1, 4] = -30  # and then left out
    features = torch.rand(1, 2, 4, 5)
    below = nn.functional.pad(features[:, :1], (0, 0, 0, 1))[:, :, 1:]
    torch.testing.assert_close(layer(features), below)  # the mask of the first is 2 sigmoid(0) = 1
    with torch.no_grad():
        predicted[36:] = 0
    right = nn.functional.pad(features[:, 1:], (0, 1))[..., 1:]
    torch.testing.assert_close(layer(features), below + (features[:, 1:] + right) / 2)


@pytest.mark.slow
def test_deformable_network_starts_as_the_plain_one(resnet18_file):
    plain = build_backbone(BackboneSettings("resnet18", weights=str(resnet18_file)))
    deformable = build_backbone(BackboneSettings("resnet18", weights=str(resnet18_file), deformable_groups=4))
    for actual, expected in zip(deformable(random_images()), plain(random_images()), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "per_block"), [("resnet18", ["conv1", "conv2"]), ("resnet50", ["conv2"])])
def test_which_layers_are_deformable(name, per_block):
    backbone = build_backbone(BackboneSettings(name, deformable_groups=4))
    depths = {"resnet18": [2, 2, 2], "resnet50": [4, 6, 3]}[name]
    expected = [
        f"body.layer{stage}.{block}.{layer}"
        for stage, depth in zip([2, 3, 4], depths, strict=True)
        for block in range(depth)
        for layer in per_block
    ]
    layers = {name: part for name, part in backbone.named_modules() if isinstance(part, DeformableConv2d)}
    assert list(layers) == expected
    assert {layer.predictor.out_channels for layer in layers.values()} == {3 * 4 * 9}


def test_deformable_offsets_are_trained():
    backbone = deformable_resnet18(batch_norm="frozen")
    random_sum(backbone(random_images())).backward()
    predictors = {name: p for name, p in backbone.named_parameters() if ".predictor." in name}
    assert len(predictors) == 24
    assert [name for name, p in predictors.items() if p.grad is None or not p.grad.any()] == []
    assert with_gradient(backbone) == trainable(backbone)


@pytest.mark.slow
def test_deformable_state_round_trips():
    first, second = (
        deformable_resnet18().eval(),
        build_backbone(BackboneSettings("resnet18", deformable_groups=4)).eval(),
    )
    for part in first.modules():
        if isinstance(part, DeformableConv2d):
            nn.init.normal_(part.predictor.get_parameter("bias"), std=0.5)
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        assert_identical(second(random_images()), first(random_images()))


@pytest.mark.slow
def test_deformable_under_autocast():
    backbone = deformable_resnet18().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        half = backbone(random_images())
    with torch.no_grad():
        full = backbone(random_images())
    for actual, expected in zip(half, full, strict=True):
        assert (actual.float() - expected).norm() < 0.05 * expected.norm()
