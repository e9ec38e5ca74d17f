"""The backbone: its maps, and which of its parameters and statistics are trained."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bucketrank.detectors.backbone import Backbone, build_backbone
from bucketrank.settings import BackboneSettings

from .backbone_checks import assert_identical, norms_in_training, random_images, random_sum, trainable, with_gradient

pytestmark = pytest.mark.usefixtures("one_thread")

CHANNELS = {
    "resnet18": [64, 128, 256, 512],
    "resnet50": [256, 512, 1024, 2048],
    "swin_tiny": [96, 192, 384, 768],
    "tf_efficientnet_lite0": [24, 40, 112, 320],
}
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
every_model = pytest.mark.parametrize("name", CHANNELS)


@pytest.mark.sampled(4)
@every_model
def test_four_maps_at_any_size(name):
    backbone = build_backbone(BackboneSettings(name)).eval()
    assert backbone.channels == CHANNELS[name]
    assert backbone.strides == [4, 8, 16, 32]
    assert (backbone.mean, backbone.std) == (((0.5,) * 3, (0.5,) * 3) if "lite" in name else IMAGENET)
    for height, width in [(97, 131), (64, 96), (32, 32)]:
        with torch.no_grad():
            maps = backbone(random_images(height, width, 2))
        cells = [(-(-height // stride), -(-width // stride)) for stride in backbone.strides]
        expected = [(2, channels, *size) for channels, size in zip(CHANNELS[name], cells, strict=True)]
        assert [tuple(m.shape) for m in maps] == expected


@pytest.mark.sampled(4)
@every_model
def test_without_weights_every_parameter_is_trained(name):
    backbone = build_backbone(BackboneSettings(name))
    assert backbone.training
    random_sum(backbone(random_images(count=2))).backward()
    assert with_gradient(backbone) == trainable(backbone)
    unused = {"body.swin.layernorm.weight", "body.swin.layernorm.bias"} if name == "swin_tiny" else set()
    assert {name for name, _ in backbone.named_parameters()} - trainable(backbone) == unused
    norms = {name for name, part in backbone.named_modules() if isinstance(part, _BatchNorm)}
    assert norms_in_training(backbone) == norms


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stages", [0, 1, 2, 3, 4])
def test_the_stem_is_frozen_with_the_first_stage(stages):
    backbone = build_backbone(BackboneSettings("resnet18", frozen_stages=stages, batch_norm="trained"))
    parts = ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4"]
    frozen = parts[: stages + 2] if stages else []
    expected = {name for name, _ in backbone.named_parameters() if name.split(".")[1] not in frozen}
    backbone.requires_grad_(True)
    for _ in range(2):
        backbone.eval().train()
        assert trainable(backbone) == expected
        assert {name.split(".")[1] for name in norms_in_training(backbone)} == set(parts) - {*frozen, "conv1"}
    if stages < 4:
        random_sum(backbone(random_images(count=2))).backward()
    assert with_gradient(backbone) == expected


@pytest.mark.slow
def test_frozen_stages_of_swin_have_no_drop_path():
    backbone = build_backbone(BackboneSettings("swin_tiny", frozen_stages=2))
    stages = [any(n.startswith(f"body.swin.encoder.layers.{i}.blocks.") for n in trainable(backbone)) for i in range(4)]
    assert stages == [False, False, True, True]
    assert "body.swin.encoder.layers.1.downsample.reduction.weight" in trainable(backbone)
    first, second = backbone(random_images()), backbone(random_images())
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, True, False, False]


def test_frozen_batch_norm_keeps_its_statistics_and_trains_its_affine():
    backbone = build_backbone(BackboneSettings("resnet18", batch_norm="frozen"))
    before = {name: value.clone() for name, value in backbone.named_buffers()}
    assert backbone.training
    assert norms_in_training(backbone) == set()
    random_sum(backbone(random_images(count=2))).backward()
    assert_identical(list(before.values()), [value for _, value in backbone.named_buffers()])
    norm = backbone.get_submodule("body.layer3.0.bn1")
    assert norm.weight.grad is not None
    assert norm.weight.requires_grad


def test_trained_batch_norm_learns_its_statistics():
    backbone = build_backbone(BackboneSettings("resnet18", batch_norm="trained"))
    before = backbone.get_buffer("body.bn1.running_mean").clone()
    backbone(random_images(count=2))
    assert not torch.equal(before, backbone.get_buffer("body.bn1.running_mean"))


def test_a_backbone_is_built_without_gradients_as_with_them():
    with torch.no_grad():
        backbone = build_backbone(BackboneSettings("resnet18", frozen_stages=1))
    assert backbone.frozen == build_backbone(BackboneSettings("resnet18", frozen_stages=1)).frozen


def test_maps_of_another_layout_are_refused():
    class ChannelsLast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(3, 7, stride, stride) for stride in (4, 8, 16, 32))

        def forward(self, images: Tensor) -> list[Tensor]:
            return [layer(images).permute(0, 2, 3, 1) for layer in self.layers]

    with pytest.raises(
        ValueError, match=r"Backbone: expected maps \(C, H, W\) of \[\(7, 8, 16\), .*got \[\(8, 16, 7\)"
    ):
        Backbone(ChannelsLast(), maps=[0, 1, 2, 3], channels=[7] * 4)
