"""Queries from what the auxiliary heads found positive."""

import pytest
import torch

from bucketrank.detectors.co_detr.queries import NOBODY, AuxiliaryQueries, Candidates, draw
from bucketrank.ops.assignment import IGNORED, NEGATIVE


def matches(positives, negatives, ignored=0):
    return torch.tensor([0] * positives + [NEGATIVE] * negatives + [IGNORED] * ignored)


@pytest.mark.parametrize(
    ("positives", "count"),
    [((0, 0), 9), ((4, 7), 9), ((12, 3), 12), ((50, 3), 20)],
    ids=["no object", "few", "the most of an image", "more than allowed"],
)
def test_every_image_gets_as_many_as_the_one_with_most_positives(positives, count):
    given = [matches(number, 40, ignored=5) for number in positives]
    for match, number, rows in zip(given, positives, draw(given, most=20), strict=True):
        assert len(rows) == len(rows.unique()) == count
        assert (match[rows] >= 0).sum() == min(number, count)
        assert (match[rows] == IGNORED).sum() == 0


def test_positives_and_negatives_are_drawn_by_chance():
    torch.manual_seed(0)
    given = [matches(100, 100)]
    first, second = (set(draw(given, most=20)[0].tolist()) for _ in range(2))
    assert first != second
    few = [matches(0, 100)]
    assert set(draw(few, most=20)[0].tolist()) != set(draw(few, most=20)[0].tolist())


def test_where_candidates_do_not_suffice_nobody_is_asked():
    first, second = draw([matches(12, 0), matches(2, 3, ignored=50)], most=300)
    assert sorted(first.tolist()) == list(range(12))
    assert sorted(second[:5].tolist()) == list(range(5))
    assert second[5:].tolist() == [NOBODY] * 7


def test_queries_start_from_the_candidates():
    torch.manual_seed(0)
    module = AuxiliaryQueries(32, most=300)
    boxes = torch.tensor([[10.0, 20, 30, 30], [-40, 0, 200, 60], [0, 0, 10, 10]])
    features = torch.randn(3, 32, requires_grad=True)
    match = torch.tensor([1, 0, IGNORED])
    queries, known = module(Candidates([boxes], [features], [match]), [(40, 80)])
    # Two positives, no negatives: seven of nine are nobody's.
    assert known[0].tolist() == [1, 0] + [IGNORED] * 7
    torch.testing.assert_close(queries.boxes[0, 0], torch.tensor([20 / 80, 25 / 40, 20 / 80, 10 / 40]))
    # The second reaches out of the image, its centre is at its right rim: inside, by a little.
    torch.testing.assert_close(queries.boxes[0, 1], torch.tensor([1 - 1e-5, 0.75, 1 - 1e-5, 1 - 1e-5]))
    assert not queries.boxes.requires_grad

    positions, content = module.encoding(queries.boxes)
    torch.testing.assert_close(queries.positions, positions + module.head)
    wanted = content[0, :2] + module.norm(module.project(features[:2]))
    torch.testing.assert_close(queries.content[0, :2], wanted)
    queries.content[0, 0].sum().backward()
    assert features.grad is not None
    assert features.grad[1:].abs().sum() == 0  # what the encoder says of a candidate is taught by its own query
    assert features.grad[0].isfinite().all()
