"""The paper's synthetic logits: statistics, seed, and the parts of them that estimates use."""

from __future__ import annotations

import pytest
import torch

from benchmarks.losses.contenders import SyntheticLogits, draw_logits
from benchmarks.losses.flops import Counts


@pytest.mark.parametrize(("size", "percent", "positives"), [(10_000, 0.1, 10), (10_000, 5.0, 500), (640, 0.01, 1)])
def test_percentage_of_positives(size: int, percent: float, positives: int) -> None:
    data = draw_logits(size, percent, seed=0)
    assert data.logits.shape == data.targets.shape == (size,)
    assert int((data.targets > 0).sum()) == positives
    assert int((data.targets == 0).sum()) == size - positives


def test_distributions_are_the_papers() -> None:
    data = draw_logits(200_000, 20.0, seed=1)
    positives, negatives = data.logits[data.targets > 0], data.logits[data.targets == 0]
    # Of 40,000 positives the mean is within 5 sigma, 5 / sqrt(40000) = 0.025.
    for sample, mean in ((positives, -1.0), (negatives, 1.0)):
        torch.testing.assert_close(sample.mean(), torch.tensor(mean), atol=0.025, rtol=0)
        torch.testing.assert_close(sample.std(), torch.tensor(1.0), atol=0.025, rtol=0)
    labels = data.targets[data.targets > 0]
    assert 0 < labels.min() < 0.01
    assert 0.99 < labels.max() <= 1
    torch.testing.assert_close(labels.mean(), torch.tensor(0.5), atol=0.01, rtol=0)


def test_positives_are_scattered() -> None:
    mean_position = (draw_logits(10_000, 5.0, seed=0).targets > 0).nonzero().double().mean()
    assert 4000 < mean_position < 6000


def test_seed_decides() -> None:
    first, again, other = draw_logits(1000, 1.0, seed=3), draw_logits(1000, 1.0, seed=3), draw_logits(1000, 1.0, seed=4)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first.logits, other.logits)


def test_a_percentage_of_100_is_refused() -> None:
    with pytest.raises(ValueError, match="percent 100"):
        draw_logits(10, 100, seed=0)


def test_counts_by_hand() -> None:
    #                          -3 is too low; 0 and 1 share a bucket; 5 is in the one above both positives
    logits = torch.tensor([-1.0, 4.0, -3.0, 0.0, 1.0, 5.0, 9.0])
    targets = torch.tensor([0.5, 0.7, 0.0, 0.0, 0.0, 0.0, -1.0])
    assert SyntheticLogits(logits, targets).counts(delta=1.0) == Counts(positives=2, negatives=4, relevant=3, buckets=2)


def test_thinning_keeps_the_lowest_positive_and_all_negatives() -> None:
    data = draw_logits(2000, 5.0, seed=0)
    thin = data.thinned(7)
    assert int((thin.targets > 0).sum()) == 7
    assert int((thin.targets < 0).sum()) == 93
    torch.testing.assert_close(thin.targets == 0, data.targets == 0)
    torch.testing.assert_close(thin.logits[thin.targets > 0].min(), data.logits[data.targets > 0].min())
    assert thin.counts(0.5).relevant == data.counts(0.5).relevant
    assert int((data.targets > 0).sum()) == 100, "the original must not change"
