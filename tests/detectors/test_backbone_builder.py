"""From settings to a backbone: checkpointing, and settings that cannot be met."""

import pytest
import timm
import torch
from torch import Tensor

from bucketrank.detectors.backbone import build_backbone, stride_positions
from bucketrank.settings import BackboneSettings

from .backbone_checks import random_images, random_sum, randomise_constants, trainable, with_gradient

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["resnet18", "swin_tiny"])
@pytest.mark.parametrize("frozen_stages", [0, 1])
def test_checkpointing_changes_no_gradient(name, frozen_stages):
    gradients: list[list[Tensor]] = []
    stored: list[int] = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        settings = BackboneSettings(name, frozen_stages=frozen_stages, batch_norm="frozen", checkpointing=checkpointing)
        backbone = randomise_constants(build_backbone(settings))
        torch.manual_seed(3)  # drop path
        kept: list[Tensor] = []

        def keep(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = random_sum(backbone(random_images(32, 64)))
        stored.append(sum(tensor.numel() for tensor in kept if not tensor.is_leaf))
        loss.backward()
        assert with_gradient(backbone) == trainable(backbone)
        gradients.append([p.grad for p in backbone.parameters() if p.grad is not None])
    assert stored[1] < 0.7 * stored[0]
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_checkpointing_that_timm_does_not_support_is_refused(monkeypatch):
    monkeypatch.delattr(timm.models._features.FeatureDictNet, "set_grad_checkpointing")
    with pytest.raises(ValueError, match=r"backbone\.checkpointing: expected false for 'resnet18'"):
        build_backbone(BackboneSettings("resnet18", checkpointing=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "resnet5o"}, r"name: expected a timm model, .*, got 'resnet5o'; the nearest names are .*resnet50"),
        ({"name": "swin_tinny"}, r"name: .*, got 'swin_tinny'; the nearest names are swin_tiny"),
        ({"name": "?"}, r"name: .*, got '\?'; see timm.list_models"),
        ({"batch_norm": "x"}, "batch_norm: expected one of auto, frozen, trained, got 'x'"),
        ({"frozen_stages": 5}, "frozen_stages: expected 0 to 4 or null, got 5"),
        ({"deformable_groups": -1}, "deformable_groups: expected at least 0, got -1"),
        ({"name": "swin_tiny", "deformable_groups": 4}, "deformable_groups: expected 0 for swin_tiny, got 4"),
        ({"weights": ""}, "weights: expected null, pretrained or a path, got ''"),
    ],
)
def test_invalid_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=rf"^backbone\.{message}"):
        BackboneSettings(**settings).check_name()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "resnet50_mlp", "weights": "pretrained"},
            "weights: expected null or a file for resnet50_mlp, for which timm has no weights, got pretrained",
        ),
        (
            {"name": "swin_tiny_patch4_window7_224"},
            "name: expected a model for images of any size, got .* for 224 x 224; for Swin use swin_tiny",
        ),
        (
            {"name": "regnety_002", "deformable_groups": 4},
            "deformable_groups: expected 0 for a backbone that is not one of timm's ResNets, got 4",
        ),
        (
            {"name": "resnet18", "deformable_groups": 3},
            "deformable_groups: expected a divisor of 64, .*layer2.*, got 3",
        ),
    ],
)
def test_settings_that_the_model_does_not_support_are_refused(settings, message):
    with pytest.raises(ValueError, match=rf"^backbone\.{message}"):
        build_backbone(BackboneSettings(**settings))


def test_a_model_without_the_four_strides_is_refused():
    with pytest.raises(
        ValueError, match=r"maps at strides \[4, 8, 16, 32\], got 'vit' with \[16, 16\] and without \[4, 8, 32\]"
    ):
        stride_positions("vit", [16, 16])
    assert stride_positions("two maps at 8", [2, 4, 8, 8, 16, 32]) == [1, 3, 4, 5]
