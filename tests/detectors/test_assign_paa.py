"""The mixture and PAA: examples by hand, edge cases, and the reference written from the paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from bucketrank.detectors.assignment import IGNORED, NEGATIVE, assign_paa
from bucketrank.detectors.assignment import paa as mixture
from bucketrank.detectors.assignment.paa import fit_mixtures

from . import assignment_oracle


def fit(*rows):
    """Return (weight, mean, variance) of both components of each row; rows may differ in length."""
    width = max(len(row) for row in rows)
    samples = torch.full((len(rows), width), 123.0, dtype=torch.float64)  # absent entries must not matter
    present = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        samples[number, : len(row)] = torch.tensor(row, dtype=torch.float64)
        present[number, : len(row)] = True
    return torch.stack(fit_mixtures(samples, present)).permute(2, 1, 0)  # (rows, component, 3)


def random_losses(generator, count):
    """Return losses in two clusters of random centre and width, like those of good and bad candidates."""
    cluster = torch.rand(count, generator=generator) < 0.4
    centre, width = torch.rand(2, generator=generator) * 2, torch.rand(2, generator=generator) * 0.8 + 0.05
    noise = torch.randn(count, generator=generator)
    return torch.where(cluster, centre[0] + width[0] * noise, centre[0] + 1 + centre[1] + width[1] * noise).double()


def assign(candidates, losses, **settings):
    settings = {"per_level": [len(candidates)]} | settings
    return assign_paa(torch.tensor(candidates), torch.tensor(losses), **settings).tolist()


class TestMixture:
    def test_two_clusters_far_apart(self):
        # Every sample has its whole share in one component: means, variances (plus 1e-5) and weights of the clusters.
        ((low, high),) = fit([0.0, 1.0, 2.0, 1000.0, 1004.0]).tolist()
        assert low == pytest.approx([3 / 5, 1, 2 / 3 + 1e-5])
        assert high == pytest.approx([2 / 5, 1002, 4 + 1e-5])

    def test_one_step_by_hand(self, monkeypatch):
        # Of 0 and 1 at the start: the densities of the two components at 0 are as 1 to exp(-1/2).
        share = 1 / (1 + math.exp(-0.5))
        monkeypatch.setattr(mixture, "MAX_ITERATIONS", 1)
        ((low, high),) = fit([0.0, 1.0]).tolist()
        assert low == pytest.approx([0.5, 1 - share, share * (1 - share) + 1e-5])
        assert high == pytest.approx([0.5, share, share * (1 - share) + 1e-5])

    def test_equal_samples(self):
        ((low, high),) = fit([3.0] * 5).tolist()
        assert low == high == pytest.approx([0.5, 3, 1e-5])

    def test_empty_and_non_finite_rows_leave_the_others_alone(self):
        good = [0.0, 1.0, 2.0, 1000.0, 1004.0]
        torch.testing.assert_close(fit([], good, [math.nan, 1.0], [math.inf, 1.0])[1:2], fit(good))

    @pytest.mark.parametrize("seed", range(30))
    def test_against_plain_python(self, seed):
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(2, 46, (8,), generator=generator).tolist()
        rows = [random_losses(generator, count).tolist() for count in counts]
        expected = torch.tensor([assignment_oracle.mixture(row) for row in rows], dtype=torch.float64)
        torch.testing.assert_close(fit(*rows), expected, rtol=1e-7, atol=1e-9)

    def test_rows_are_independent(self):
        generator = torch.Generator().manual_seed(0)
        rows = [random_losses(generator, count).add(200 * count).tolist() for count in (2, 9, 30, 45)]
        torch.testing.assert_close(fit(*rows), torch.cat([fit(row) for row in rows]))


class TestByHand:
    # Component 0 has 0.4, 0.5, 0.7 with their mean at 0.53; the highest density is at 0.5.
    LOSSES = (0.7, 0.5, 0.4, 3.2, 3.1)

    def test_up_to_the_peak_of_the_lower_component(self):
        assert assign([0] * 5, self.LOSSES) == [NEGATIVE, 0, 0, NEGATIVE, NEGATIVE]

    def test_ignored_stays_negative_stays(self):
        candidates = [0, 0, 0, 0, 0, NEGATIVE, IGNORED]
        expected = [NEGATIVE, 0, 0, NEGATIVE, NEGATIVE, NEGATIVE, IGNORED]
        assert assign(candidates, [*self.LOSSES, 0.0, 0.0]) == expected

    def test_each_object_by_itself(self):
        candidates = [2, 0] * 5
        losses = [loss for pair in zip(self.LOSSES, reversed(self.LOSSES), strict=True) for loss in pair]
        result = assign(candidates, losses)
        assert result[0::2] == [NEGATIVE, 2, 2, NEGATIVE, NEGATIVE]
        assert result[1::2] == [NEGATIVE, NEGATIVE, 0, 0, NEGATIVE]

    def test_two_in_the_lower_component_are_mirrored_so_the_first(self):
        assert assign([0] * 4, [0.51, 0.43, 3.2, 3.1]) == [NEGATIVE, 0, NEGATIVE, NEGATIVE]
        for seed in range(50):
            low, gap = torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist()
            assert assign([0] * 3, [low, low + 0.3 * gap, low + 9]) == [0, NEGATIVE, NEGATIVE]

    def test_topk_of_each_level(self):
        # Level by level the lowest two are kept: 0.4 and 0.5, then 0.7 and 3.1.
        candidates, losses = [0] * 6, [0.5, 0.6, 0.4, 3.2, 0.7, 3.1]
        expected = assign([0, -1, 0, -1, 0, 0], losses)
        assert assign(candidates, losses, per_level=[3, 3], topk=2) == expected
        assert expected == [0, NEGATIVE, 0, NEGATIVE, NEGATIVE, NEGATIVE]

    def test_of_equal_losses_the_first(self):
        assert assign([0] * 5, [1.0] * 5) == [0, *[NEGATIVE] * 4]
        # Beyond topk, too: of four equal ones two are kept.
        assert assign([0] * 5, [0.5, 0.5, 0.5, 0.5, 9.0], per_level=[4, 1], topk=2) == [0, *[NEGATIVE] * 4]


class TestEdges:
    def test_no_candidates(self):
        assert assign([NEGATIVE, IGNORED, NEGATIVE], [0.0, 1.0, 2.0]) == [NEGATIVE, IGNORED, NEGATIVE]

    def test_no_anchors(self):
        result = assign_paa(torch.zeros(0, dtype=torch.int64), torch.zeros(0), per_level=[0, 0])
        assert result.shape == (0,)

    def test_one_candidate_is_too_few(self):
        assert assign([0, 1, 1], [0.1, 0.1, 5.0]) == [NEGATIVE, 1, NEGATIVE]
        # Two on one level, of which one is kept.
        assert assign([0, 0], [0.1, 5.0], topk=1) == [NEGATIVE, NEGATIVE]
        assert assign([0, 0], [0.1, 5.0], topk=1, per_level=[1, 1]) == [0, NEGATIVE]

    def test_more_objects_than_anchors(self):
        assert assign([70, 70, 3], [0.1, 5.0, 1.0]) == [70, NEGATIVE, NEGATIVE]

    def test_topk_larger_than_a_level(self):
        losses = TestByHand.LOSSES
        assert assign([0] * 5, losses, topk=10**9) == assign([0] * 5, losses, topk=5)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_losses_that_are_not_finite(self, bad):
        losses = [*TestByHand.LOSSES, *TestByHand.LOSSES, bad]
        result = assign([0] * 5 + [1] * 6, losses)
        assert result == [NEGATIVE, 0, 0, NEGATIVE, NEGATIVE] + [NEGATIVE] * 6
        # The highest of a level: not kept, so it does no harm.
        assert assign([0] * 6, [*TestByHand.LOSSES, bad], topk=5) == [NEGATIVE, 0, 0, NEGATIVE, NEGATIVE, NEGATIVE]

    def test_the_candidates_are_not_written_to(self):
        candidates = torch.tensor([0] * 5)
        losses = torch.tensor(TestByHand.LOSSES, requires_grad=True)
        assert assign_paa(candidates, losses, per_level=[5]).tolist() == [NEGATIVE, 0, 0, NEGATIVE, NEGATIVE]
        assert candidates.tolist() == [0] * 5


class TestAgainstTheOracle:
    @pytest.mark.parametrize("seed", range(40))
    def test_random_losses(self, seed):
        generator = torch.Generator().manual_seed(seed)
        per_level = [40, 20, 5]
        candidates = torch.randint(-2, 4, (65,), generator=generator)
        losses = random_losses(generator, 65)
        topk = (1, 3, 9, 100)[seed % 4]
        expected = assignment_oracle.paa(candidates.tolist(), losses.tolist(), per_level, topk)
        result = assign_paa(candidates, losses, per_level=per_level, topk=topk)
        assert result.tolist() == expected

    @given(
        st.lists(st.tuples(st.integers(-2, 3), st.integers(0, 40)), min_size=1, max_size=25),
        st.integers(1, 5),
        st.integers(0, 25),
    )
    def test_with_many_equal_losses(self, anchors, topk, cut):
        candidates, losses = [owner for owner, _ in anchors], [tenths / 10 for _, tenths in anchors]
        cut = min(cut, len(anchors))
        per_level = [cut, len(anchors) - cut]
        try:
            expected = assignment_oracle.paa(candidates, losses, per_level, topk)
        except assignment_oracle.TooCloseError:
            assume(False)
        result = assign_paa(
            torch.tensor(candidates), torch.tensor(losses, dtype=torch.float64), per_level=per_level, topk=topk
        )
        assert result.tolist() == expected


class TestBatch:
    def test_images_are_independent(self):
        generator = torch.Generator().manual_seed(0)
        candidates = torch.randint(-2, 4, (3, 65), generator=generator)
        candidates[1].clamp_(max=NEGATIVE)  # an image without candidates
        losses = torch.stack([random_losses(generator, 65) for _ in candidates])
        losses[2, 7] = math.nan
        settings: dict[str, Any] = {"per_level": [40, 20, 5], "topk": 5}
        pairs = zip(candidates, losses, strict=True)
        expected = [assign_paa(own, own_losses, **settings).tolist() for own, own_losses in pairs]
        for objects in (None, 4, 9):
            assert assign_paa(candidates, losses, objects=objects, **settings).tolist() == expected

    def test_no_objects(self):
        candidates = torch.tensor([[NEGATIVE, IGNORED]])
        assert assign_paa(candidates, torch.zeros(1, 2), per_level=[2], objects=0).tolist() == candidates.tolist()


class TestBadArguments:
    def test_shapes_and_types(self):
        with pytest.raises(
            ValueError, match=r"assign_paa: expected losses of shape \(2,\) like candidates, got \(3,\)"
        ):
            assign([0, 0], [1.0, 2.0, 3.0])
        with pytest.raises(ValueError, match="assign_paa: expected candidates to be an assignment, int64 of shape"):
            assign_paa(torch.zeros(2), torch.zeros(2), per_level=[2])

    def test_levels_and_topk(self):
        with pytest.raises(
            ValueError, match=r"assign_paa: expected per_level to add up to the 2 anchors, got \[1, 2\] = 3"
        ):
            assign([0, 0], [1.0, 2.0], per_level=[1, 2])
        with pytest.raises(ValueError, match="assign_paa: expected topk of at least 1, got -1"):
            assign([0, 0], [1.0, 2.0], topk=-1)
