"""Queries from the positives of the auxiliary heads."""

import pytest
import torch

from bucketrank.detectors.assignment import IGNORED, NEGATIVE
from bucketrank.detectors.co_detr.auxiliary import PADDING, AuxiliaryQueries, Candidates, draw


def matches(positives, negatives, ignored=0):
    return torch.tensor([0] * positives + [NEGATIVE] * negatives + [IGNORED] * ignored)


@pytest.mark.parametrize(
    ("positives", "count"),
    [((0, 0), 9), ((4, 7), 9), ((12, 3), 12), ((50, 3), 20)],
    ids=["no object", "few", "the largest number of positives", "more than the limit"],
)
def test_every_image_gets_as_many_queries_as_the_one_with_most_positives(positives, count):
    every_match = [matches(number, 40, ignored=5) for number in positives]
    for match, number, rows in zip(every_match, positives, draw(every_match, limit=20), strict=True):
        assert len(rows) == len(rows.unique()) == count
        assert (match[rows] >= 0).sum() == min(number, count)
        assert (match[rows] == IGNORED).sum() == 0


def test_positives_and_negatives_are_drawn_at_random():
    torch.manual_seed(0)
    every_match = [matches(100, 100)]
    first, second = (set(draw(every_match, limit=20)[0].tolist()) for _ in range(2))
    assert first != second
    few = [matches(0, 100)]
    assert set(draw(few, limit=20)[0].tolist()) != set(draw(few, limit=20)[0].tolist())


def test_missing_candidates_become_padding():
    first, second = draw([matches(12, 0), matches(2, 3, ignored=50)], limit=300)
    assert sorted(first.tolist()) == list(range(12))
    assert sorted(second[:5].tolist()) == list(range(5))
    assert second[5:].tolist() == [PADDING] * 7


def test_queries_start_from_the_candidates():
    torch.manual_seed(0)
    module = AuxiliaryQueries(32, limit=300, marks=32)
    boxes = torch.tensor([[10.0, 20, 30, 30], [-40, 0, 200, 60], [0, 0, 10, 10]])
    features = torch.randn(3, 32, requires_grad=True)
    match = torch.tensor([1, 0, IGNORED])
    queries, known = module(Candidates([boxes], [features], [match]), [(40, 80)])
    # Two positives, no negatives: seven of nine queries are padding.
    assert known[0].tolist() == [1, 0] + [IGNORED] * 7
    torch.testing.assert_close(queries.boxes[0, 0], torch.tensor([20 / 80, 25 / 40, 20 / 80, 10 / 40]))
    # The second box extends beyond the image and is centred on its right border: it is clamped.
    torch.testing.assert_close(queries.boxes[0, 1], torch.tensor([1 - 1e-5, 0.75, 1 - 1e-5, 1 - 1e-5]))
    assert not queries.boxes.requires_grad

    positions, content = module.encoding(queries.boxes)
    torch.testing.assert_close(queries.positions, positions + module.head)
    expected = content[0, :2] + module.norm(module.project(features[:2]))
    torch.testing.assert_close(queries.content[0, :2], expected)
    queries.content[0, 0].sum().backward()
    assert features.grad is not None
    assert features.grad[1:].abs().sum() == 0  # only its own query trains the features of a candidate
    assert features.grad[0].isfinite().all()
