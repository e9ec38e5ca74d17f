"""ATSS: examples by hand, edge cases, and the reference written from the paper."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from bucketrank.detectors.anchors import Anchors, octave
from bucketrank.detectors.assignment import IGNORED, NEGATIVE, assign_atss

from . import assignment_oracle
from .integer_boxes import integer_boxes, pyramids, tensor

# Four squares of 4 in a row.
ROW = [[0, 0, 4, 4], [4, 0, 8, 4], [8, 0, 12, 4], [12, 0, 16, 4]]


def assign(anchors, objects, **settings):
    settings = {"per_level": [len(anchors)]} | settings
    return assign_one(tensor(anchors), tensor(objects), **settings).tolist()


def assign_one(anchors, objects, *, valid=None, **settings):
    """Assign the objects of a single image."""
    return assign_atss(anchors, [objects], valid=None if valid is None else valid[None], **settings)[0]


class TestByHand:
    def test_mean_and_deviation(self):
        objects = [[2, 0, 8, 3]]  # areas 16 and 18, shared 6 with the first square, 12 with the second
        overlaps = [6 / 28, 12 / 22, 0, 0]
        mean = sum(overlaps) / 4
        deviation = math.sqrt(sum((x - mean) ** 2 for x in overlaps) / 3)
        assert overlaps[0] < mean + deviation < overlaps[1]
        assert assign(ROW, objects) == [NEGATIVE, 0, NEGATIVE, NEGATIVE]

    def test_the_deviation_is_that_of_a_sample(self):
        # Overlaps 1, 1, 0, 0: mean 1/2, deviation 1/2 of the population, 0.577 of a sample. None reaches 1.077.
        twice = [ROW[0], ROW[0], ROW[2], ROW[3]]
        assert assign(twice, [ROW[0]]) == [NEGATIVE] * 4

    def test_equal_overlaps_all_reach_the_mean(self):
        assert assign([ROW[0]] * 7, [[0, 0, 4, 5]], topk=7) == [0] * 7

    def test_the_centre_must_be_inside_by_more_than_a_hundredth(self):
        # The anchor's centre is (2, 2). One object begins just far enough from it, one at 0.01, one on it.
        for left, expected in [(2 - 0.0101, 0), (2 - 0.0099, NEGATIVE), (2.0, NEGATIVE)]:
            assert assign_one(tensor([ROW[0]]), torch.tensor([[left, 0, 9, 4]]), per_level=[1]).tolist() == [expected]

    def test_exactly_a_hundredth_is_not_more(self):
        anchor = torch.tensor([[-1, -1, 1, 1]], dtype=torch.float64)
        objects = torch.tensor([[-0.01, -1, 3, 1]], dtype=torch.float64)
        assert assign_one(anchor, objects, per_level=[1]).tolist() == [NEGATIVE]

    def test_topk_of_each_level(self):
        # The two nearest of the row, and of a second level of one, far away and larger: with it, n is 3.
        anchors = [*ROW, [20, 20, 28, 28]]
        assert assign(anchors, [[3, 0, 8, 4]], per_level=[4, 1], topk=2) == [NEGATIVE, 0, *[NEGATIVE] * 3]
        # Only those two: overlaps 1/20 and 4/5 have a mean of 0.43 and a deviation of 0.53, which none reaches.
        assert assign(ROW, [[3, 0, 8, 4]], topk=2) == [NEGATIVE] * 4


class TestTies:
    def test_of_equal_distances_the_first(self):
        # The object's centre is between the second and third: both 2 away, then both 6 away.
        middle = [[5, 0, 11, 4]]
        assert assign(ROW, middle, topk=1) == [NEGATIVE, 0, NEGATIVE, NEGATIVE]
        assert assign(ROW[::-1], middle, topk=1) == [NEGATIVE, 0, NEGATIVE, NEGATIVE]

    def test_an_anchor_claimed_twice_goes_where_it_overlaps_most(self):
        worse, better = [0, 0, 4, 5], ROW[0]
        assert assign(ROW, [worse, better]) == [1, *[NEGATIVE] * 3]
        assert assign(ROW, [better, worse]) == [0, *[NEGATIVE] * 3]

    def test_of_equal_overlaps_the_first_object(self):
        assert assign(ROW, [[0, 0, 4, 5], [0, 0, 5, 4], [0, 0, 4, 5]]) == [0, *[NEGATIVE] * 3]


class TestEdges:
    def test_no_objects(self):
        assert assign(ROW, []) == [NEGATIVE] * 4
        assert assign(ROW, [], valid=torch.tensor([True, True, False, True])) == [NEGATIVE, NEGATIVE, IGNORED, NEGATIVE]

    def test_no_anchors(self):
        result = assign_one(tensor([]), tensor([ROW[0]]), per_level=[0, 0])
        assert result.shape == (0,)
        assert result.dtype == torch.int64

    def test_an_empty_level(self):
        assert assign(ROW, [ROW[1]], per_level=[0, 4, 0]) == [NEGATIVE, 0, NEGATIVE, NEGATIVE]

    def test_one_anchor(self):
        # No deviation of one: it reaches its own overlap.
        assert assign([ROW[0]], [[0, 0, 4, 9]]) == [0]

    def test_more_objects_than_anchors(self):
        assert assign(ROW[:1], [ROW[3], ROW[0], ROW[1], [0, 0, 3, 4]]) == [1]

    def test_topk_larger_than_a_level(self):
        assert assign(ROW, [ROW[1]], topk=1000) == assign(ROW, [ROW[1]], topk=4)

    def test_invalid_anchors_are_no_candidates(self):
        valid = torch.tensor([True, False, True, True])
        # Without the second the nearest are the first and third, at equal distance, then the fourth.
        assert assign(ROW, [ROW[1]], valid=valid) == [NEGATIVE, IGNORED, NEGATIVE, NEGATIVE]
        assert assign(ROW, [[3, 0, 9, 4]], topk=1, valid=valid)[1] == IGNORED
        # It leaves the mean: of 0, 0 and 1 only the last reaches 0.91.
        assert assign(ROW, [ROW[0]], topk=4, valid=valid) == [0, IGNORED, NEGATIVE, NEGATIVE]

    def test_none_valid(self):
        assert assign(ROW, [ROW[1]], valid=torch.zeros(4, dtype=torch.bool)) == [IGNORED] * 4

    def test_an_object_without_area(self):
        assert assign(ROW, [[2, 2, 2, 2]]) == [NEGATIVE] * 4


class TestAgainstTheOracle:
    @given(pyramids(), integer_boxes(most=5), st.integers(1, 12), st.randoms(use_true_random=False))
    def test_integer_boxes(self, pyramid, objects, topk, random):
        anchors, per_level = pyramid
        valid = [random.random() < 0.85 for _ in anchors]
        try:
            expected = assignment_oracle.atss(anchors, objects, per_level, topk, valid)
        except assignment_oracle.TooCloseError:
            assume(False)
        result = assign_one(
            tensor(anchors),
            tensor(objects),
            per_level=per_level,
            topk=topk,
            valid=torch.tensor(valid, dtype=torch.bool),
        )
        assert result.tolist() == expected

    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("seed", range(20))
    def test_on_a_pyramid(self, seed):
        """Compare a detector's anchors and random objects in float64."""
        strides = [8, 16, 32]
        generator = torch.Generator().manual_seed(seed)
        levels = Anchors(strides, scales=octave(4, 3))([torch.zeros(1, 1, 96 // s, 128 // s) for s in strides])
        anchors, per_level = torch.cat(levels).double(), [len(level) for level in levels]
        middle = torch.rand(4, 2, generator=generator).double() * torch.tensor([128, 96])
        half = torch.rand(4, 2, generator=generator).double() * 30 + 4
        objects = torch.cat([middle - half, middle + half], 1)
        result = assign_one(anchors, objects, per_level=per_level).tolist()
        expected = assignment_oracle.atss(
            [tuple(box) for box in anchors.tolist()],
            [tuple(box) for box in objects.tolist()],
            per_level,
            9,
            [True] * len(anchors),
        )
        assert result == expected
        assert max(result) >= 0


class TestBatch:
    def test_images_are_independent(self, monkeypatch):
        generator = torch.Generator().manual_seed(0)
        anchors = torch.rand(60, 4, generator=generator) * 40 + torch.tensor([0, 0, 40, 40])
        objects = [torch.rand(count, 4, generator=generator) * 40 + torch.tensor([0, 0, 40, 40]) for count in (3, 0, 5)]
        valid = torch.rand(3, 60, generator=generator) < 0.8
        settings: dict[str, Any] = {"per_level": [40, 0, 20], "topk": 7}
        pairs = zip(objects, valid, strict=True)
        expected = [assign_one(anchors, boxes, valid=valid_here, **settings).tolist() for boxes, valid_here in pairs]
        assert assign_atss(anchors, objects, valid=valid, **settings).tolist() == expected
        assert max(map(max, expected)) >= 0
        monkeypatch.setattr(sys.modules[assign_atss.__module__], "BLOCK", 2 * 60)  # two objects at once
        assert assign_atss(anchors, objects, valid=valid, **settings).tolist() == expected

    def test_no_objects(self):
        empty = [tensor([]), tensor([])]
        assert assign_atss(tensor(ROW), empty, per_level=[4]).tolist() == [[NEGATIVE] * 4] * 2


class TestBadArguments:
    def test_levels_that_do_not_add_up(self):
        with pytest.raises(
            ValueError, match=r"assign_atss: expected per_level to add up to the 4 anchors, got \[3\] = 3"
        ):
            assign(ROW, [ROW[0]], per_level=[3])

    def test_topk(self):
        with pytest.raises(ValueError, match="assign_atss: expected topk of at least 1, got 0"):
            assign(ROW, [ROW[0]], topk=0)

    def test_shapes(self):
        with pytest.raises(ValueError, match=r"assign_atss: expected anchors of shape \(n, 4\), got \(4, 5\)"):
            assign_one(torch.zeros(4, 5), tensor([]), per_level=[4])
        with pytest.raises(ValueError, match=r"assign_atss: expected valid of shape \(1, 4\)"):
            assign(ROW, [ROW[0]], valid=torch.ones(3, dtype=torch.bool))
