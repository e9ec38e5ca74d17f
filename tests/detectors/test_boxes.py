"""IoU, centre and centerness of boxes, and the box coder that the detectors use."""

from __future__ import annotations

import math

import pytest
import torch
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import box_iou, generalized_box_iou_loss

from bucketrank.boxes import centerness, centres, giou_loss, paired_iou
from bucketrank.detectors import box_coder


def boxes(count, *, seed):
    numbers = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed))
    corner, size = numbers.mul(100).split(2, 1)
    return torch.cat([corner, corner + size + 1], 1)


class TestPairedIoU:
    def test_by_hand(self):
        square = torch.tensor([0.0, 0, 4, 4])
        others = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 2], [2, 2, 4, 4], [2, 0, 6, 4], [4, 0, 8, 4], [9, 9, 10, 10]])
        assert paired_iou(square.expand(6, 4), others).tolist() == [1, 1 / 2, 1 / 4, pytest.approx(1 / 3), 0, 0]

    def test_all_pairs_by_broadcasting(self):
        first, second = boxes(30, seed=0), boxes(20, seed=1)
        torch.testing.assert_close(paired_iou(first, second[:, None]), box_iou(second, first))
        torch.testing.assert_close(paired_iou(first[:20], second), box_iou(first[:20], second).diagonal())

    def test_none(self):
        assert paired_iou(torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0,)

    def test_boxes_without_area(self):
        point, square = torch.tensor([[1.0, 1, 1, 1]]), torch.tensor([[0.0, 0, 2, 2]])
        assert paired_iou(point, point).item() == 0
        assert paired_iou(point, square).item() == 0

    def test_the_min_union(self):
        speck = torch.tensor([[0.0, 0, 2**-11, 2**-11]])  # an area of 2^-22, about 2.4e-7
        assert paired_iou(speck, speck).item() == pytest.approx(2**-22 / 1e-6)
        assert paired_iou(speck, speck, min_union=1e-12).item() == 1


def test_centres():
    assert centres(torch.tensor([[0.0, 2, 10, 4], [-1, -1, 1, 1]])).tolist() == [[5, 3], [0, 0]]
    assert centres(torch.zeros(2, 3, 4)).shape == (2, 3, 2)


class TestCenterness:
    @pytest.mark.parametrize(
        ("point", "expected"),
        [
            ((5, 5), 1),
            ((2, 5), math.sqrt(2 / 8)),
            ((2, 9), math.sqrt(2 / 8 * 1 / 9)),
            ((0, 5), 0),  # on the border
            ((-1, 5), 0),
            ((-1, -1), 0),  # outside in x and y: the product of two negative ratios must not count
        ],
    )
    def test_by_hand(self, point, expected):
        value = centerness(torch.tensor([point]).float(), torch.tensor([[0.0, 0, 10, 10]]))
        torch.testing.assert_close(value, torch.tensor([expected]).float())

    def test_an_object_without_extent(self):
        line = torch.tensor([[3.0, 0, 3, 10]])
        assert centerness(torch.tensor([[3.0, 5.0]]), line).tolist() == [0]


class TestCoder:
    """The properties of torchvision's coder, with the detectors' weights, on which the detectors rely."""

    coder = BoxCoder((10.0, 10.0, 5.0, 5.0))

    def test_by_hand(self):
        anchor, target = torch.tensor([[0.0, 0, 10, 20]]), torch.tensor([[6.0, 10, 16, 50]])
        # The centre moves by (6, 20) = (0.6, 1) of the anchor; as wide as before, twice as high.
        deltas = self.coder.encode_single(target, anchor)
        torch.testing.assert_close(deltas, torch.tensor([[6.0, 10.0, 0.0, 5 * math.log(2)]]))

    def test_round_trip(self):
        anchors, targets = boxes(200, seed=2), boxes(200, seed=3)
        decoded = self.coder.decode_single(self.coder.encode_single(targets, anchors), anchors)
        torch.testing.assert_close(decoded, targets, rtol=1e-5, atol=1e-4)

    def test_a_box_grows_to_62_5_times_its_anchor_and_no_more(self):
        anchor = torch.tensor([[0.0, 0, 16, 16]])
        limit = 5 * math.log(1000 / 16)
        for delta in (limit, limit + 1, 1e4):
            decoded = self.coder.decode_single(torch.tensor([[0.0, 0, delta, delta]]), anchor)
            torch.testing.assert_close(decoded, torch.tensor([[-492.0, -492, 508, 508]]))
        below = self.coder.decode_single(torch.tensor([[0.0, 0, limit - 1, 0]]), anchor)
        torch.testing.assert_close((below[0, 2] - below[0, 0]).item(), 1000 * math.exp(-1 / 5), rtol=1e-5, atol=0)


def value_and_gradient(function, inputs):
    leaf = inputs.clone().requires_grad_()
    value = function(leaf)
    weights = torch.rand(value.shape, generator=torch.Generator().manual_seed(9))
    return value.detach(), torch.autograd.grad(value, leaf, weights)[0]


def assert_same_bits(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class TestSameBitsAsTorchvision:
    @pytest.mark.parametrize("count", [0, 1, 50])
    def test_giou_loss(self, count):
        first, second = boxes(count, seed=2), boxes(count, seed=3)
        # Whole numbers: boxes that touch, where the gradients of a minimum and a maximum are shared.
        for mine, other in ((first, second), (first.div(10).round() * 10, second.div(10).round() * 10)):
            expected = value_and_gradient(lambda leaf, other=other: generalized_box_iou_loss(leaf, other), mine)
            assert_same_bits(value_and_gradient(lambda leaf, other=other: giou_loss(leaf, other), mine), expected)

    @pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (30.0, 30.0, 15.0, 15.0)])
    def test_box_coder(self, weights):
        anchors, objects = boxes(50, seed=4), boxes(50, seed=5)
        expected, coder = BoxCoder(weights), box_coder.BoxCoder(weights)
        deltas = torch.randn(50, 4, generator=torch.Generator().manual_seed(6)) * 4 * weights[2]  # some are clipped
        deltas = deltas.clamp(min=-0.99 * coder.bbox_xform_clip * weights[2])  # torchvision clips growth only
        assert_same_bits(coder.encode_single(objects, anchors), expected.encode_single(objects, anchors))
        assert_same_bits(
            value_and_gradient(lambda leaf: coder.decode_single(leaf, anchors), deltas),
            value_and_gradient(lambda leaf: expected.decode_single(leaf, anchors), deltas),
        )

    def test_box_coder_needs_pairs_of_weights(self):
        with pytest.raises(ValueError, match="BoxCoder: expected equal weights for x and y"):
            box_coder.BoxCoder((1.0, 2.0, 5.0, 5.0))
