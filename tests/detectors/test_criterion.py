"""The criteria: the terms of each loss for the same logits, boxes and assignment."""

import math

import pytest
import torch
import torch.nn.functional as F
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

from bucketrank import alrp_loss, ap_loss, dr_loss, rank_sort_loss
from bucketrank.detectors.assignment import IGNORED, NEGATIVE
from bucketrank.detectors.criterion import Assigned, HeadRecipe, build_criterion
from bucketrank.settings import loss_settings
from bucketrank.settings.loss_specs import BUILT_IN_LOSSES

# Rows: a positive of class 1, a negative, an ignored row, a positive of class 0 whose box misses its object.
LABELS = torch.tensor([1, NEGATIVE, IGNORED, 0])
LOGITS = torch.tensor([[0.2, 1.0], [0.5, -0.3], [9.0, 9.0], [-0.4, 0.1]])
BOXES = torch.tensor([[0.0, 0, 4, 4], [0, 0, 2, 2]])
OBJECTS = torch.tensor([[0.0, 0, 4, 2], [3, 3, 5, 5]])  # IoU 1/2 and 0
IOUS = torch.tensor([0.5, 1e-6])
CONFIDENCES = torch.tensor([1.0, 0.1]).sigmoid()


def example(**changes):
    parts = {
        "logits": LOGITS.clone().requires_grad_(),
        "labels": LABELS,
        "image_index": torch.tensor([0, 0, 1, 1]),
        "boxes": BOXES.clone().requires_grad_(),
        "objects": OBJECTS,
        "box_deltas": torch.tensor([[0.1, 0, 0, 0], [0, 0.5, 0, -2.0]], requires_grad=True),
        "target_deltas": torch.zeros(2, 4),
    }
    return Assigned(**(parts | changes))


def criterion(name, recipe=None, **settings):
    return build_criterion(loss_settings(name, **settings), recipe or HeadRecipe())


def targets(values):
    return torch.tensor([[0, values[0]], [0, 0], [-1, -1], [values[1], 0]])


def test_targets_have_the_format_of_the_losses():
    torch.testing.assert_close(example().targets(IOUS), targets(IOUS))
    torch.testing.assert_close(example().targets(1.0), targets([1.0, 1.0]))


def test_rs_ranks_by_iou_and_balances_the_boxes():
    """A positive of IoU 0 stays a positive; GIoU is weighted by the highest class score of its row."""
    terms = criterion("rs")(example())
    ranking, sorting = rank_sort_loss(LOGITS, targets(IOUS))
    torch.testing.assert_close(terms["rank"], ranking)
    torch.testing.assert_close(terms["sort"], sorting)
    torch.testing.assert_close(terms["box"], ranking + sorting)

    assigned = example()
    criterion("rs")(assigned)["box"].backward()
    expected_boxes = BOXES.clone().requires_grad_()
    box = (generalized_box_iou_loss(expected_boxes, OBJECTS) * CONFIDENCES).sum() / CONFIDENCES.sum()
    (box * ((ranking + sorting) / box).detach()).backward()
    torch.testing.assert_close(assigned.boxes.grad, expected_boxes.grad)
    assert assigned.logits.grad is None  # neither confidences nor IoU targets carry a gradient to the logits


def test_the_weight_of_a_head_scales_all_its_terms():
    plain = criterion("rs")(example())
    light = criterion("rs", HeadRecipe(ranking_weight=0.2))(example())
    torch.testing.assert_close(light, {name: 0.2 * term for name, term in plain.items()})


@pytest.mark.parametrize("method", ["exact", "bucketed", "pairwise"])
@pytest.mark.parametrize("interpolate", [False, True])
def test_ap(method, interpolate):
    terms = criterion("ap", HeadRecipe(ranking_box_weight=2.0), method=method, interpolate=interpolate)(example())
    expected = ap_loss(LOGITS, targets([1.0, 1.0]), method=method, interpolate=interpolate)
    torch.testing.assert_close(terms["rank"], expected)
    box = (generalized_box_iou_loss(BOXES, OBJECTS) * CONFIDENCES).sum() / CONFIDENCES.sum()
    torch.testing.assert_close(terms["box"], 2 * box)


def test_dr():
    terms = criterion("dr")(example())
    torch.testing.assert_close(terms["rank"], dr_loss(LOGITS, targets([1.0, 1.0])))
    assert criterion("dr", HeadRecipe(prior=0.01)).initial_score == 0.5


def test_alrp_measures_boxes_against_the_min_iou_of_a_positive():
    errors = generalized_box_iou_loss(BOXES, OBJECTS)
    for min_iou, scale in ((0.5, 1.0), (0.7, 1 / 0.6)):
        terms = criterion("alrp", HeadRecipe(min_iou=min_iou))(example())
        # The errors belong to logits[targets > 0], here in the order of the rows.
        expected = alrp_loss(LOGITS, targets([1.0, 1.0]), errors * scale)
        torch.testing.assert_close(terms["rank"], expected.classification)
        torch.testing.assert_close(terms["box"], 50 * expected.localisation)


def test_alrp_updates_the_box_weight_after_each_period():
    loss = criterion("alrp", balance_period=2)
    first = loss(example())
    classification, localisation = first["rank"].detach(), first["box"].detach() / 50
    second = loss(example(logits=LOGITS * 2))
    means = torch.stack([classification + second["rank"], localisation + second["box"] / 50])
    third = loss(example())
    torch.testing.assert_close(third["box"], localisation * (means.sum() / means[1]).detach())
    assert loss.seen == 1
    loss.eval()(example())
    assert loss.seen == 1  # evaluation does not count


def test_a_step_that_is_not_finite_does_not_spoil_the_box_weight_of_alrp():
    loss = criterion("alrp", balance_period=2)
    loss(example(logits=LOGITS * math.nan))
    loss(example())
    assert loss.balance.isfinite()
    assert loss.balance != 50
    assert not loss.sums.any()


def test_focal_over_all_but_the_ignored():
    terms = criterion("focal", HeadRecipe(box_loss="l1", scored_box_weight=3.0))(example())
    rows = [0, 1, 3]
    total = sigmoid_focal_loss(LOGITS[rows], targets([1.0, 1.0])[rows], 0.25, 2.0, reduction="sum")
    torch.testing.assert_close(terms["cls"], total / 2)
    torch.testing.assert_close(terms["box"], torch.tensor(3 * (0.1 + 0.5 + 2.0) / 2))
    # With gamma 0 and alpha 1/2 focal loss is half the cross-entropy.
    plain = criterion("focal", focal_alpha=0.5, focal_gamma=0.0)(example())
    torch.testing.assert_close(2 * plain["cls"], criterion("ce")(example())["cls"])


def test_quality_weighs_the_boxes_and_has_its_own_term():
    quality = torch.tensor([0.8, 0.2])
    logits = torch.tensor([0.3, -0.1])
    terms = criterion("focal", HeadRecipe(quality_weight=0.5))(example(quality_logits=logits, quality_targets=quality))
    errors = generalized_box_iou_loss(BOXES, OBJECTS)
    torch.testing.assert_close(terms["box"], (errors * quality).sum() / quality.sum())
    torch.testing.assert_close(terms["quality"], 0.5 * F.binary_cross_entropy_with_logits(logits, quality))


def test_atss_divides_by_at_least_one_centerness():
    """As published: two positives with centernesses of 0.1 and 0.2 do not train their boxes at full strength."""
    errors = generalized_box_iou_loss(BOXES, OBJECTS)
    for quality, divisor in (([0.1, 0.2], 1.0), ([0.9, 0.6], 1.5)):
        given = example(quality_logits=torch.zeros(2), quality_targets=torch.tensor(quality))
        total = (errors * torch.tensor(quality)).sum()
        terms = criterion("focal", HeadRecipe(average_counts=True))(given)
        torch.testing.assert_close(terms["box"], total / divisor)
        # PAA, and box weights that are not the published ones, divide by any sum.
        torch.testing.assert_close(criterion("focal")(given)["box"], total / sum(quality))
    confident = criterion("focal", HeadRecipe(average_counts=True), box_confidence=True)
    assert confident.min_box_weight < 1e-9


def test_cross_entropy_of_the_rcnns_is_the_mean_over_the_sample_with_background_last():
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    recipe = HeadRecipe(box_loss="l1", samples=True, softmax=True)
    loss = criterion("ce", recipe)
    terms = loss(example(logits=logits))
    rows = [0, 1, 3]
    torch.testing.assert_close(terms["cls"], F.cross_entropy(logits[rows], torch.tensor([1, 2, 0])))
    torch.testing.assert_close(terms["box"], torch.tensor((0.1 + 0.5 + 2.0) / 3))
    torch.testing.assert_close(loss.scores(logits), logits.softmax(1)[:, :2])
    assert loss.samples
    assert not criterion("focal", recipe).samples
    assert not criterion("rs", recipe).softmax


def test_smooth_l1():
    terms = criterion("focal", HeadRecipe(box_loss="smooth_l1"))(example())
    torch.testing.assert_close(terms["box"], torch.tensor((0.5 * 0.1**2 + 0.5 * 0.5**2 + 2.0 - 0.5) / 2))
    terms = criterion("focal", HeadRecipe(box_loss="smooth_l1"), smooth_l1_beta=0.2)(example())
    torch.testing.assert_close(terms["box"], torch.tensor((0.5 * 0.1**2 / 0.2 + 0.5 - 0.1 + 2.0 - 0.1) / 2))


def test_settings_have_precedence_over_the_recipe():
    assert criterion("focal", HeadRecipe(box_loss="l1"), box_loss="giou").box_loss == "giou"
    assert criterion("ap", HeadRecipe(ranking_box_weight=2.0), box_weight=0.5).box_weight == 0.5
    assert criterion("rs", delta=0.25).delta == 0.25
    assert [criterion(name).delta for name in ("rs", "ap", "alrp")] == [0.5, 1.0, 1.0]


@pytest.mark.parametrize("name", [spec.name for spec in BUILT_IN_LOSSES if spec.criterion is not None])
def test_without_positives_every_input_still_gets_a_gradient(name):
    empty = torch.zeros(0, 4)
    deltas = torch.zeros(4, 4, requires_grad=True)
    assigned = example(
        labels=torch.tensor([NEGATIVE, NEGATIVE, IGNORED, NEGATIVE]),
        boxes=deltas[:0] * 2,
        objects=empty,
        box_deltas=deltas[:0],
        target_deltas=empty,
    )
    terms = criterion(name)(assigned)
    sum(terms.values()).backward()
    assert all(term.isfinite() for term in terms.values())
    torch.testing.assert_close(deltas.grad, torch.zeros(4, 4))
    assert assigned.logits.grad is not None
    assert (assigned.logits.grad[2] == 0).all()


def test_from_candidates_keeps_the_order_of_the_rows():
    coder = BoxCoder((10.0, 10.0, 5.0, 5.0))
    candidates = [torch.tensor([[0.0, 0, 4, 4], [2, 2, 6, 6]]), torch.tensor([[1.0, 1, 3, 3]])]
    ground_truths = [
        {"boxes": torch.tensor([[0.0, 0, 4, 2], [2, 2, 6, 5]]), "labels": torch.tensor([0, 1])},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
    ]
    matches = [torch.tensor([IGNORED, 1]), torch.tensor([NEGATIVE])]
    logits = torch.randn(3, 2)
    for deltas in (torch.full((3, 4), 0.5), torch.full((3, 1, 4), 0.5)):
        assigned = Assigned.from_candidates(
            logits, deltas, candidates=candidates, matches=matches, ground_truths=ground_truths, coder=coder
        )
        assert assigned.labels.tolist() == [IGNORED, 1, NEGATIVE]
        assert assigned.image_index.tolist() == [0, 0, 1]
        torch.testing.assert_close(assigned.objects, ground_truths[0]["boxes"][1:])
        torch.testing.assert_close(assigned.boxes, coder.decode_single(deltas.reshape(3, 4)[1:2], candidates[0][1:]))
        torch.testing.assert_close(coder.decode_single(assigned.target_deltas, candidates[0][1:]), assigned.objects)
    # With one box per class, the box of the object's class counts.
    by_class = torch.arange(24.0).reshape(3, 2, 4) / 10
    assigned = Assigned.from_candidates(
        logits, by_class, candidates=candidates, matches=matches, ground_truths=ground_truths, coder=coder
    )
    torch.testing.assert_close(assigned.box_deltas, by_class[1:2, 1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "rss"}, "expected one of rs, ap, alrp, .*, rsq, own, got 'rss'; the nearest is \"rs\""),
        ({"name": "rs", "delta": -1.0}, "delta"),
        ({"name": "rs", "delta": math.nan}, "delta"),
        ({"name": "rs", "method": "fast"}, "loss.method: expected one of exact, bucketed, pairwise, got 'fast'"),
        ({"name": "alrp", "method": "bucketed"}, "loss.method: expected one of exact, pairwise, got 'bucketed'"),
        ({"name": "rs", "ranking_scope": "gpu"}, "loss.ranking_scope: expected one of batch, image, global, got 'gpu'"),
        ({"name": "focal", "box_loss": "diou"}, "loss.box_loss: expected one of giou, l1, smooth_l1, got 'diou'"),
        ({"name": "focal", "box_weight": -1.0}, "box_weight"),
        ({"name": "alrp", "balance_period": 0}, "loss.balance_period: expected at least 1 or null, got 0"),
    ],
)
def test_invalid_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        build_criterion(loss_settings(**settings), HeadRecipe())
