"""Assignment by IoU thresholds: pairs exactly on each threshold, ties, and the reference in plain Python."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.models.detection._utils import Matcher
from torchvision.ops import box_iou

from bucketrank.detectors.assignment import IGNORED, NEGATIVE, assign_max_iou

from . import assignment_oracle
from .integer_boxes import integer_boxes, tensor

SQUARE = [0, 0, 4, 4]
HALF, QUARTER, EIGHTH, NONE = [0, 0, 4, 2], [0, 0, 2, 2], [0, 0, 2, 1], [8, 8, 9, 9]  # IoUs with SQUARE


def assign(candidates, objects, **settings):
    settings = {"positive": 0.5, "negative": 0.25} | settings
    return assign_max_iou(tensor(candidates), tensor(objects), **settings).tolist()


class TestThresholds:
    def test_on_them(self):
        # At the positive threshold: positive. At the negative one: not negative, so ignored.
        assert assign([SQUARE, HALF, QUARTER, EIGHTH, NONE], [SQUARE]) == [0, 0, IGNORED, NEGATIVE, NEGATIVE]

    def test_next_to_them(self):
        above, below = 0.5 + 2**-20, 0.5 - 2**-20
        assert assign([HALF], [SQUARE], positive=above) == [IGNORED]
        assert assign([HALF], [SQUARE], positive=above, negative=above) == [NEGATIVE]
        assert assign([HALF], [SQUARE], positive=below, negative=below) == [0]

    def test_no_band_between(self):
        assert assign([HALF, QUARTER], [SQUARE], positive=0.5, negative=0.5) == [0, NEGATIVE]

    def test_seven_tenths_in_float32(self):
        # 7 of 10: the nearest float32 to 0.7, below 0.7 itself. It counts as 0.7.
        assert assign([[0, 0, 7, 1]], [[0, 0, 10, 1]], positive=0.7, negative=0.3) == [0]

    def test_zero_is_a_threshold_too(self):
        assert assign([NONE], [SQUARE], positive=0.0, negative=0.0) == [0]


class TestTies:
    def test_the_first_of_equal_objects(self):
        assert assign([SQUARE], [NONE, SQUARE, SQUARE]) == [1]

    def test_the_best_object(self):
        assert assign([SQUARE], [QUARTER, SQUARE, HALF]) == [1]


class TestLowQuality:
    def test_on_its_threshold(self):
        assert assign([QUARTER, EIGHTH], [SQUARE], low_quality=0.25) == [0, NEGATIVE]
        assert assign([QUARTER, EIGHTH], [SQUARE], low_quality=0.25 + 2**-20) == [IGNORED, NEGATIVE]

    def test_all_that_tie(self):
        # Two quarters of the square; the eighth is not the best.
        assert assign([QUARTER, [2, 2, 4, 4], EIGHTH], [SQUARE], low_quality=0.0) == [0, 0, NEGATIVE]

    def test_it_overwrites_and_the_later_object_has_it(self):
        # The candidate is half of the first object and a quarter of the second, whose best it is.
        first, second = [0, 0, 4, 4], [0, 0, 4, 8]
        assert assign([HALF], [first, second]) == [0]
        assert assign([HALF], [first, second], low_quality=0.0) == [1]
        assert assign([HALF], [second, first], low_quality=0.0) == [1]
        assert assign([HALF], [first, second], low_quality=0.3) == [0]

    def test_an_object_apart_from_all_claims_nothing(self):
        # All candidates tie for its best IoU, 0.
        assert assign([SQUARE, HALF], [NONE], low_quality=0.0) == [NEGATIVE, NEGATIVE]


class TestEdges:
    def test_no_objects(self):
        assert assign([SQUARE, HALF], []) == [NEGATIVE, NEGATIVE]
        assert assign([SQUARE, HALF], [], low_quality=0.0, valid=torch.tensor([True, False])) == [NEGATIVE, IGNORED]

    def test_no_candidates(self):
        result = assign_max_iou(tensor([]), tensor([SQUARE]), positive=0.5, negative=0.5, low_quality=0.0)
        assert result.shape == (0,)
        assert result.dtype == torch.int64

    def test_more_objects_than_candidates(self):
        assert assign([SQUARE], [NONE, HALF, SQUARE, QUARTER]) == [2]

    def test_not_valid(self):
        valid = torch.tensor([False, True, True])
        assert assign([SQUARE, QUARTER, EIGHTH], [SQUARE], valid=valid) == [IGNORED, IGNORED, NEGATIVE]
        # The best is not valid: the object claims the second best.
        assert assign([SQUARE, QUARTER, EIGHTH], [SQUARE], valid=valid, low_quality=0.0) == [IGNORED, 0, NEGATIVE]
        none = torch.tensor([False, False, False])
        assert assign([SQUARE, QUARTER, EIGHTH], [SQUARE], valid=none, low_quality=0.0) == [IGNORED] * 3

    def test_boxes_without_area(self):
        assert assign([[1, 1, 1, 1], SQUARE], [[1, 1, 1, 1], SQUARE], low_quality=0.0) == [NEGATIVE, 1]

    def test_half_precision_is_widened(self):
        candidates = tensor([[0, 0, 1000, 1000], [0, 0, 1000, 500]]).half()  # areas beyond float16
        assert assign_max_iou(candidates, candidates[:1], positive=0.5, negative=0.3).tolist() == [0, 0]

    def test_the_result_needs_no_gradient(self):
        candidates = tensor([SQUARE]).requires_grad_()
        assert assign_max_iou(candidates, tensor([SQUARE]), positive=0.5, negative=0.3).tolist() == [0]


class TestAgainstOthers:
    @given(
        integer_boxes(most=12),
        integer_boxes(most=6),
        st.sampled_from([(0.5, 0.5), (0.5, 0.25), (0.75, 0.125)]),
        st.sampled_from([None, 0.0, 0.25, 0.5]),
        st.randoms(use_true_random=False),
    )
    def test_against_the_oracle(self, candidates, objects, thresholds, low_quality, random):
        valid = [random.random() < 0.8 for _ in candidates]
        positive, negative = thresholds
        result = assign_max_iou(
            tensor(candidates),
            tensor(objects),
            positive=positive,
            negative=negative,
            low_quality=low_quality,
            valid=torch.tensor(valid, dtype=torch.bool),
        )
        assert result.tolist() == assignment_oracle.max_iou(candidates, objects, positive, negative, low_quality, valid)

    @pytest.mark.parametrize("low_quality", [None, 0.25])
    @pytest.mark.parametrize("block", [1, 50, 117])
    def test_block_by_block(self, block, low_quality, monkeypatch):
        numbers = torch.randint(0, 9, (56, 4), generator=torch.Generator().manual_seed(0))
        boxes = torch.cat([numbers[:, :2], numbers[:, :2] + numbers[:, 2:] + 1], 1).float()
        objects = boxes[39:].repeat(2, 1)  # each again in a later block
        whole = assign_max_iou(boxes[:39], objects, positive=0.5, negative=0.25, low_quality=low_quality)
        monkeypatch.setattr(import_module("bucketrank.detectors.assignment.max_iou"), "BLOCK", block)
        parts = assign_max_iou(boxes[:39], objects, positive=0.5, negative=0.25, low_quality=low_quality)
        assert torch.equal(parts, whole)
        assert (whole >= 0).any()

    def test_torchvisions_matcher(self):
        corner, size = torch.rand(2, 500, 2, generator=torch.Generator().manual_seed(0))
        boxes = torch.cat([corner, corner + size / 3], 1) * 100
        candidates, objects = boxes[:480], boxes[480:]
        theirs = Matcher(0.5, 0.3, allow_low_quality_matches=False)(box_iou(objects, candidates))
        ours = assign_max_iou(candidates, objects, positive=0.5, negative=0.3)
        assert torch.equal(ours, theirs)
        assert {NEGATIVE, IGNORED, 0} <= set(ours.tolist())


class TestBadArguments:
    def test_shapes_and_types(self):
        good = tensor([SQUARE])
        with pytest.raises(ValueError, match=r"assign_max_iou: expected objects of shape \(n, 4\), got \(4,\)"):
            assign_max_iou(good, good[0], positive=0.5, negative=0.5)
        with pytest.raises(
            TypeError, match=r"assign_max_iou: expected candidates to be a tensor of floats, got torch\.int64"
        ):
            assign_max_iou(good.long(), good, positive=0.5, negative=0.5)
        with pytest.raises(
            ValueError, match=r"assign_max_iou: expected valid of shape \(1,\), one for each anchor, got \(2,\)"
        ):
            assign_max_iou(good, good, positive=0.5, negative=0.5, valid=torch.ones(2, dtype=torch.bool))
        with pytest.raises(TypeError, match=r"assign_max_iou: expected valid of dtype torch\.bool, got torch\.float32"):
            assign_max_iou(good, good, positive=0.5, negative=0.5, valid=torch.ones(1))

    @pytest.mark.parametrize(("positive", "negative"), [(0.3, 0.7), (1.1, 0.5), (0.5, -0.1), (float("nan"), 0.5)])
    def test_thresholds(self, positive, negative):
        with pytest.raises(ValueError, match="assign_max_iou: expected 0 <= negative <= positive <= 1, got negative"):
            assign([SQUARE], [SQUARE], positive=positive, negative=negative)

    def test_low_quality(self):
        with pytest.raises(ValueError, match="assign_max_iou: expected low_quality to be None or from 0 to 1, got 2"):
            assign([SQUARE], [SQUARE], low_quality=2)
