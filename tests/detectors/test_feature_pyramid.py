"""The feature pyramid."""

import pytest
import torch
from torch.nn import functional as F
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from bucketrank.detectors.layers import EXTRAS, FeaturePyramid

CHANNELS = [8, 16, 24, 32]


def maps_of(height: int, width: int) -> list[torch.Tensor]:
    """Return random maps C2 to C5 of an image; a border narrower than a cell counts as a cell."""
    torch.manual_seed(0)
    return [torch.randn(2, c, -(-height // s), -(-width // s)) for c, s in zip(CHANNELS, [4, 8, 16, 32], strict=True)]


@pytest.mark.parametrize("size", [(128, 192), (97, 131), (32, 32)])
@pytest.mark.parametrize("extra", EXTRAS)
def test_returns_five_maps_at_its_strides(extra, size):
    neck = FeaturePyramid(CHANNELS, 12, extra=extra)
    maps = neck(maps_of(*size))
    first_level = 2 if extra == "pool" else 3
    assert neck.strides == [2**level for level in range(first_level, first_level + 5)]
    expected = [(2, 12, -(-size[0] // stride), -(-size[1] // stride)) for stride in neck.strides]
    assert [tuple(m.shape) for m in maps] == expected
    assert neck.out_channels == 12


def test_pool_equals_torchvision():
    neck = FeaturePyramid(CHANNELS, 12, extra="pool")
    torchvision_pyramid = FeaturePyramidNetwork(CHANNELS, 12, extra_blocks=LastLevelMaxPool())
    torchvision_pyramid.load_state_dict(neck.pyramid.state_dict())
    features = maps_of(97, 131)
    for actual, expected in zip(neck(features), torchvision_pyramid(dict(enumerate(features))).values(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("extra", "width"), [("convs_on_output", 12), ("convs_on_input", 12), ("convs_on_input", 32)])
def test_convolutions_equal_torchvision_except_for_the_relu_before_p7(extra, width):
    neck = FeaturePyramid(CHANNELS, width, extra=extra)
    on_input = extra == "convs_on_input"
    torchvision_pyramid = FeaturePyramidNetwork(
        CHANNELS[1:], width, extra_blocks=LastLevelP6P7(32 if on_input else width, width)
    )
    torchvision_pyramid.extra_blocks.use_P5 = not on_input  # with a width of 32 torchvision would take P5 for C5
    torchvision_pyramid.load_state_dict(neck.pyramid.state_dict())
    features = maps_of(97, 131)
    actual = neck(features)
    expected = list(torchvision_pyramid(dict(enumerate(features[1:]))).values())
    for level in range(4):
        torch.testing.assert_close(actual[level], expected[level], rtol=0, atol=0)
    p7 = torchvision_pyramid.extra_blocks.p7
    torch.testing.assert_close(actual[4], p7(actual[3]))
    torch.testing.assert_close(expected[4], p7(F.relu(actual[3])))
    assert not torch.equal(actual[4], expected[4])


def test_convolutions_with_relu_equal_torchvision():
    neck = FeaturePyramid(CHANNELS, 12, extra="convs_on_output_relu")
    torchvision_pyramid = FeaturePyramidNetwork(CHANNELS[1:], 12, extra_blocks=LastLevelP6P7(12, 12))
    torchvision_pyramid.load_state_dict(neck.pyramid.state_dict())
    features = maps_of(97, 131)
    expected = torchvision_pyramid(dict(enumerate(features[1:]))).values()
    for actual, other in zip(neck(features), expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=0, atol=0)


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_parameter_gets_a_gradient(extra):
    neck = FeaturePyramid(CHANNELS, 12, extra=extra)
    torch.stack([m.square().sum() for m in neck(maps_of(64, 64))]).sum().backward()
    assert [name for name, p in neck.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_upsampling_is_nearest():
    neck = FeaturePyramid([1, 1, 1, 1], 1)
    for name, parameter in neck.named_parameters():  # laterals pass C5 alone, outputs pass their middle
        parameter.data.zero_()
        if name in {"pyramid.inner_blocks.3.0.weight"} | {f"pyramid.layer_blocks.{i}.0.weight" for i in range(4)}:
            parameter.data[0, 0, -1 if parameter.shape[-1] == 1 else 1, -1 if parameter.shape[-1] == 1 else 1] = 1
    c5 = torch.tensor([[1.0, 2.0]])[None, None]
    zeros = [torch.zeros(1, 1, 8 // s, 16 // s) for s in (1, 2, 4)]
    p4 = neck([*zeros, c5])[2]
    torch.testing.assert_close(p4, torch.tensor([[1.0, 1, 2, 2], [1, 1, 2, 2]])[None, None])


def test_errors_name_the_setting():
    with pytest.raises(ValueError, match=r"FeaturePyramid: expected extra to be one of pool, .*, got 'none'"):
        FeaturePyramid(CHANNELS, extra="none")
    with pytest.raises(ValueError, match=r"FeaturePyramid: expected channels of 4 maps .*got \[8\]"):
        FeaturePyramid([8])
    with pytest.raises(ValueError, match=r"FeaturePyramid: expected 4 maps .*got 3"):
        FeaturePyramid(CHANNELS)(maps_of(64, 64)[1:])
