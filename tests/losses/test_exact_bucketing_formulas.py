"""The formulas of docs/exact-bucketing.md, as written there, against sums over all pairs and against the library."""

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray

from bucketrank import rank_sort_loss

Array = NDArray[np.float64]


def assert_close(actual: ArrayLike, expected: ArrayLike) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-11, atol=1e-12)


def step(x: Array) -> Array:
    """H in units of 2 delta."""
    return np.clip(x + 0.5, 0, 1)


def ramp(x: Array) -> Array:
    return np.maximum(x, 0)


class Example:
    """Positives, negatives and their edges, in units of 2 delta; every other example has ties and equal labels."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        positives, negatives = random.integers(1, 9), random.integers(0, 40)
        self.positives, self.negatives = random.normal(0, 1.5, positives), random.normal(-0.5, 1.5, negatives)
        self.labels = random.uniform(0.05, 1, positives)
        if seed % 2:
            self.positives, self.negatives = np.round(4 * self.positives) / 4, np.round(4 * self.negatives) / 4
            self.labels = np.round(self.labels, 1).clip(0.1)
        self.lower, self.upper = self.positives - 0.5, self.positives + 0.5
        self.edges = np.sort(np.concatenate([self.lower, self.upper]))
        self.widths = np.diff(self.edges)
        # Bucket k is [e_k, e_k+1), counted from 1; 0 is the discarded region.
        self.buckets = np.searchsorted(self.edges, self.negatives, side="right")
        self.above_negatives = step(self.negatives - self.positives[:, None])  # H(s_j - s_i), one row per positive i
        self.above_positives = step(self.positives - self.positives[:, None])
        self.false_positives = self.above_negatives.sum(1)
        self.rank = self.above_positives.sum(1) + self.false_positives

    def members(self, number: int) -> Array:
        members: Array = self.negatives[self.buckets == number]
        return members


@pytest.fixture(params=range(40))
def example(request) -> Example:
    return Example(request.param)


def test_the_step_is_the_difference_of_two_ramps(example):
    s = np.linspace(-4, 4, 101)[:, None]
    assert_close(step(s - example.positives), ramp(s - example.lower) - ramp(s - example.upper))


def test_proposition_1(example):
    edges = example.edges
    members = [example.members(number) for number in range(1, len(edges) + 1)]
    sizes = np.array([len(part) for part in members])
    offsets = np.array([(part - edge).sum() for part, edge in zip(members, edges, strict=True)])
    sums = np.zeros(len(edges))
    sums[-1] = offsets[-1]
    for k in reversed(range(len(edges) - 1)):
        sums[k] = sums[k + 1] + offsets[k] + example.widths[k] * sizes[k + 1 :].sum()
    at_lower, at_upper = np.searchsorted(edges, example.lower), np.searchsorted(edges, example.upper)
    assert_close(sums[at_lower] - sums[at_upper], example.false_positives)


def test_proposition_2(example):
    weights = 1 / (len(example.positives) * example.rank)
    slopes = np.array([weights[example.lower <= e].sum() - weights[example.upper <= e].sum() for e in example.edges])
    values = np.concatenate([[0], (slopes[:-1] * example.widths).cumsum()])
    lines = np.array(
        [
            0 if k == 0 else values[k - 1] + slopes[k - 1] * (s - example.edges[k - 1])
            for k, s in zip(example.buckets, example.negatives, strict=True)
        ]
    )
    assert_close(lines, weights @ example.above_negatives)


def sorting(example: Example) -> tuple[Array, Array, Array]:
    """Return e(i), f(i) and the gradient of the sorting term, by the page's formulas."""
    above, errors = example.above_positives, 1 - example.labels
    worse = example.labels < example.labels[:, None]
    total, of_worse = above.sum(1), (above * worse).sum(1)
    mean_worse = (above * worse) @ errors / np.where(of_worse > 0, of_worse, 1)
    mean_others = (above * ~worse) @ errors / (above * ~worse).sum(1)
    f = np.where(of_worse > 0, (mean_worse - mean_others) / total, 0)
    pushed = (f[:, None] * above * worse).sum(0)
    return of_worse * f, f, (pushed - of_worse * f) / len(f)


def test_sorting_error_and_its_gradient_by_pairs(example):
    above, labels = example.above_positives, example.labels
    worse = labels < labels[:, None]
    error = above @ (1 - labels) / above.sum(1) - (above * ~worse) @ (1 - labels) / (above * ~worse).sum(1)
    formula, f, gradient = sorting(example)
    assert_close(formula, error)
    assert (f >= 0).all()
    of_worse = (above * worse).sum(1)
    pairs = error[:, None] * above * worse / np.where(of_worse > 0, of_worse, 1)[:, None]
    assert_close(gradient, (pairs.sum(0) - pairs.sum(1)) / len(labels))
    assert_close(gradient.sum(), 0)
    # The mirrored list: "below and better" is "above and worse" of -s and -u.
    mirrored = step(-example.positives - -example.positives[:, None]) * (-labels < -labels[:, None])
    assert_close(mirrored @ f, (f[:, None] * above * worse).sum(0))


@pytest.mark.parametrize("method", ["exact", "pairwise"])
def test_the_library_computes_these_formulas(example, method):
    logits = torch.tensor(np.concatenate([example.positives, example.negatives]), requires_grad=True)
    targets = torch.tensor(np.concatenate([example.labels, np.zeros_like(example.negatives)]))
    terms = rank_sort_loss(logits, targets, delta=0.5, method=method)
    positives = len(example.positives)
    error, _, gradient = sorting(example)
    assert_close(terms.sorting.item(), error.mean())
    assert_close(terms.ranking.item(), (example.false_positives / example.rank).mean())
    (at_logits,) = torch.autograd.grad(terms.sorting, logits, retain_graph=True)
    assert_close(at_logits, np.concatenate([gradient, np.zeros_like(example.negatives)]))
    (at_logits,) = torch.autograd.grad(terms.ranking, logits)
    assert_close(at_logits[:positives], -example.false_positives / example.rank / positives)
    assert_close(at_logits[positives:], (1 / (positives * example.rank)) @ example.above_negatives)
