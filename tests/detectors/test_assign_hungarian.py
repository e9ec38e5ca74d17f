"""Hungarian assignment: costs by hand, the optimum by enumeration, and errors."""

import itertools
import math
from typing import Any

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from benchmarks.launches import count_launches
from bucketrank.detectors.assignment import IGNORED, NEGATIVE, assign_hungarian
from bucketrank.detectors.assignment.hungarian import CostWeights, ImageQueries, matching_costs

SIZE = (40, 80)  # height, width
DEFAULTS = CostWeights(classification=2, l1=5, giou=2, alpha=0.25, gamma=2)


def case(queries, objects, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def boxes(count):
        corner = torch.rand(count, 2, generator=generator) * 30
        return torch.cat([corner, corner + 2 + torch.rand(count, 2, generator=generator) * 30], 1)

    return {
        "boxes": boxes(queries),
        "objects": boxes(objects),
        "logits": torch.randn(queries, classes, generator=generator),
        "labels": torch.randint(0, classes, (objects,), generator=generator),
        "image_size": SIZE,
    }


def match_one(**arguments):
    """Assign the objects of a single image."""
    (assigned,) = assign_hungarian([ImageQueries(**arguments)], DEFAULTS)
    return assigned.assignment


def costs_of(*, weights, **arguments):
    height, width = arguments["image_size"]
    scale = torch.tensor([width, height, width, height], dtype=torch.float32)
    return matching_costs(ImageQueries(**arguments), scale, weights)


def test_costs_by_hand():
    """Logit 0: probability 1/2; focal 0.25 * 0.25 * ln 2 as a positive, 0.75 * 0.25 * ln 2 as a negative."""
    arguments: dict[str, Any] = {
        "boxes": torch.tensor([[0.0, 0, 8, 4]]),
        "objects": torch.tensor([[0.0, 0, 16, 4], [8.0, 0, 16, 4]]),
        "logits": torch.tensor([[9.0, 0.0]]),
        "labels": torch.tensor([1, 1]),
        "image_size": SIZE,
    }
    focal = 0.25 * (0.25 - 0.75) * math.log(2)
    # Centre and size in units of 80 x 40: (4, 2, 8, 4), (8, 2, 16, 4) and (12, 2, 8, 4) pixels.
    first = 3 * focal + 7 * (4 + 8) / 80 - 11 * 0.5  # IoU 1/2; nothing around both that neither covers
    second = 3 * focal + 7 * 8 / 80 - 11 * 0.0  # side by side
    costs = costs_of(**arguments, weights=CostWeights(classification=3, l1=7, giou=11, alpha=0.25, gamma=2))
    torch.testing.assert_close(costs, torch.tensor([[first, second]]))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("queries", "objects"), [(6, 3), (3, 3), (3, 5)])
def test_no_other_assignment_costs_less(queries, objects, seed):
    arguments = case(queries, objects, seed=seed)
    costs = costs_of(**arguments, weights=DEFAULTS)
    match = match_one(**arguments)
    rows = torch.where(match >= 0)[0]
    assert len(rows) == min(queries, objects)
    assert len(match[rows].unique()) == len(rows)
    assert (match[match < 0] == NEGATIVE).all()
    # Every way to give the fewer of the two distinct ones of the more.
    more = costs if queries >= objects else costs.T
    best = min(
        sum(more[row, column].item() for column, row in enumerate(rows))
        for rows in itertools.permutations(range(len(more)), more.shape[1])
    )
    assert costs[rows, match[rows]].sum().item() == pytest.approx(best, abs=1e-5)


def test_only_valid_queries_take_part():
    arguments = case(6, 2)
    free = match_one(**arguments)
    valid = free < 0  # all but those that were matched
    match = match_one(**arguments, valid=valid)
    assert (match[~valid] == IGNORED).all()
    assert sorted(match[match >= 0].tolist()) == [0, 1]


def test_nothing_to_match():
    assert (match_one(**case(4, 0)) == NEGATIVE).all()
    assert match_one(**case(0, 2)).shape == (0,)
    nobody = torch.zeros(4, dtype=torch.bool)
    assert (match_one(**case(4, 2), valid=nobody) == IGNORED).all()


def test_autocast_and_half_precision_change_nothing():
    arguments = case(40, 8)
    half = arguments | {"logits": arguments["logits"].bfloat16()}
    expected = match_one(**half)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        costs = costs_of(**half, weights=DEFAULTS)
        assert costs.dtype == torch.float32
        assert (match_one(**half) == expected).all()
    widened = arguments | {"logits": half["logits"].float()}
    torch.testing.assert_close(costs, costs_of(**widened, weights=DEFAULTS), rtol=0, atol=0)


def test_extreme_logits_are_finite():
    arguments = case(4, 2) | {"logits": torch.tensor([[1e4] * 4, [-1e4] * 4, [100.0] * 4, [0.0] * 4])}
    assert costs_of(**arguments, weights=DEFAULTS).isfinite().all()


@pytest.mark.parametrize("part", ["logits", "boxes"])
def test_inputs_that_are_not_finite_are_named(part):
    arguments = case(4, 2)
    arguments[part][1:3] = torch.nan
    with pytest.raises(ValueError, match=rf"finite costs, got 4 of 8 .*{part} of 2 of 4.*diverged"):
        match_one(**arguments)


def test_an_infinite_logit_alone_has_a_finite_cost():
    arguments = case(4, 2)
    arguments["logits"][1], arguments["logits"][2] = torch.nan, torch.inf
    with pytest.raises(ValueError, match=r"finite costs, got 2 of 8 .*logits of 2 of 4.*diverged"):
        match_one(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boxes": torch.zeros(4, 5)}, r"boxes of shape \(n, 4\), got \(4, 5\)"),
        ({"logits": torch.zeros(3, 2)}, r"logits of shape \(4, classes\), got \(3, 2\)"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels as integers of shape \(2,\).*\(3,\)"),
        ({"labels": torch.zeros(2)}, "labels as integers.*float32"),
        ({"valid": torch.zeros(3, dtype=torch.bool)}, r"valid of shape \(4,\)"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        match_one(**(case(4, 2) | changes))


class TestBatch:
    """Several images and layers in one call."""

    def batch(self):
        cases = [case(*sizes, seed=seed) for seed, sizes in enumerate([(30, 4), (30, 0), (5, 9), (0, 2), (30, 7)])]
        masks = [torch.rand(len(each["boxes"]), generator=torch.Generator().manual_seed(0)) < 0.6 for each in cases]
        return [
            ImageQueries(**each, valid=None if number % 2 else mask)
            for number, (each, mask) in enumerate(zip(cases, masks, strict=True))
        ]

    def test_the_same_bits_as_image_by_image(self):
        batch = self.batch()
        for queries, assigned in zip(batch, assign_hungarian(batch, DEFAULTS), strict=True):
            # The rows that may be matched, their costs, and scipy's assignment of them, without a batch.
            count = len(queries.boxes)
            rows = torch.arange(count) if queries.valid is None else torch.where(queries.valid)[0]
            fields = queries._asdict() | {"boxes": queries.boxes[rows], "logits": queries.logits[rows]}
            del fields["valid"]
            own, owners = linear_sum_assignment(costs_of(**fields, weights=DEFAULTS).numpy())
            expected = torch.full((count,), IGNORED)
            expected[rows] = NEGATIVE
            expected[rows[own]] = torch.as_tensor(owners)
            assert torch.equal(assigned.assignment, expected)
            assert torch.equal(assigned.queries, torch.where(expected >= 0)[0])
            assert torch.equal(match_one(**queries._asdict()), expected)

    @pytest.mark.parametrize("repeats", [1, 4])
    def test_waits_do_not_depend_on_the_number_of_images(self, repeats):
        batch = self.batch() * repeats
        with count_launches() as counted:
            assign_hungarian(batch, DEFAULTS)
        assert counted.waiting["cpu"] == 2  # the mask of valid queries, and the costs
        with count_launches() as counted:
            assign_hungarian([queries._replace(valid=None) for queries in batch], DEFAULTS)
        assert counted.waiting["cpu"] == 1

    def test_an_empty_batch(self):
        assert assign_hungarian([], DEFAULTS) == []


def test_labels_of_one_byte_are_numbers_and_not_a_mask():
    arguments = case(4, 2, classes=2) | {"labels": torch.tensor([1, 1])}
    costs = costs_of(**arguments, weights=DEFAULTS)
    arguments["labels"] = torch.tensor([1, 1], dtype=torch.uint8)
    torch.testing.assert_close(costs_of(**arguments, weights=DEFAULTS), costs)
