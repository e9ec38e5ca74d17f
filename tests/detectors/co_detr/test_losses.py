"""The loss terms of a training step, their inputs and their weights."""

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

from bucketrank import rank_sort_loss
from bucketrank.boxes import paired_iou
from bucketrank.detectors.assignment import IGNORED, NEGATIVE, assign_hungarian
from bucketrank.detectors.co_detr import model as query_matching
from bucketrank.detectors.co_detr.decoder import Decoded, initial_boxes
from bucketrank.detectors.co_detr.model import QueryLayer
from bucketrank.detectors.criterion import Criterion, ranked

from ..small_detectors import CLASSES, scene, small_detector

HEADS = {"criterion": 7 + 2 * 6, "auxiliary.faster_rcnn.rpn.criterion": 1, "auxiliary.faster_rcnn.roi.criterion": 1}
HEADS |= {"auxiliary.atss.criterion": 1}


@contextmanager
def recorded_calls(model):
    """Yield a list of the inputs of all criteria, in order: name, input, terms."""
    calls: list[Any] = []

    def record(name, assigned, terms):
        several = isinstance(assigned, list)
        pairs = zip(assigned, terms, strict=True) if several else [(assigned, terms)]
        calls.extend((name, *pair) for pair in pairs)

    hooks = [
        module.register_forward_hook(lambda _, inputs, terms, name=name: record(name, inputs[0], terms))
        for name, module in model.named_modules()
        if isinstance(module, Criterion)
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def query_inputs(calls):
    """Return input and terms of the encoder's proposals, of the decoder's layers, then of the auxiliary queries."""
    return [(assigned, terms) for name, assigned, terms in calls if name == "criterion"]


@pytest.fixture(scope="module")
def step():
    """Run one training step with six decoder layers, as in the paper."""
    model = small_detector("co_detr", decoder_layers=6)
    images, targets = scene()
    with recorded_calls(model) as calls:
        losses = model(images, targets)
    return model, calls, losses


def test_a_step_ranks_22_lists_in_4_calls(monkeypatch):
    """The encoder and all decoder layers share one call; RPN, box head and ATSS head have their own."""
    rankings = []

    def counting(*arguments, sizes=None, **settings):
        rankings.append(1 if sizes is None else len(sizes))
        return rank_sort_loss(*arguments, sizes=sizes, **settings)

    monkeypatch.setattr(ranked, "rank_sort_loss", counting)
    small_detector("co_detr", decoder_layers=6)(*scene())
    assert sorted(rankings) == [1, 1, 1, 1 + 6 + 2 * 6]


def test_how_often_each_criterion_is_called(step):
    _, calls, _ = step
    names = [name for name, _, _ in calls]
    assert {name: names.count(name) for name in names} == HEADS


def test_rs_weighs_queries_2_and_auxiliary_heads_5(step):
    """Check rank, sort and each box loss of all 22 rankings."""
    _, calls, _ = step
    weights = {"criterion": 2.0, "auxiliary.faster_rcnn.rpn.criterion": 1.0}
    for name, assigned, terms in calls:
        weight = weights.get(name, 5.0)
        labels = paired_iou(assigned.boxes, assigned.objects).clamp(min=1e-6)
        ranking, sorting = rank_sort_loss(assigned.logits, assigned.targets(labels), delta=0.5)
        torch.testing.assert_close(terms["rank"], weight * ranking)
        torch.testing.assert_close(terms["sort"], weight * sorting)
        for box in {"box", "l1"} & set(terms):
            torch.testing.assert_close(terms[box], weight * (ranking + sorting))
        assert ("l1" in terms) == (name == "criterion")
        assert assigned.quality_logits is None  # no centerness


def test_terms_are_sums_over_the_layers(step):
    _, calls, losses = step
    queries = [terms for name, _, terms in calls if name == "criterion"]
    parts = {"encoder": queries[:1], "decoder": queries[1:7], "faster_rcnn_queries": queries[7:13]}
    parts["atss_queries"] = queries[13:]
    for head, layers in parts.items():
        for term in ("rank", "sort", "box", "l1"):
            torch.testing.assert_close(losses[f"{head}_{term}"], sum(terms[term] for terms in layers))


def test_boxes_of_queries_have_equal_weights(step):
    """No weighting by confidence: the gradients of L1 and GIoU are those of plain means, scaled."""
    model, calls, _ = step
    assigned = next(assigned for name, assigned, _ in calls if name == "criterion")
    boxes = assigned.boxes.detach().requires_grad_()
    deltas = assigned.box_deltas.detach().requires_grad_()
    detached = replace(assigned, boxes=boxes, box_deltas=deltas, logits=assigned.logits.detach())
    terms = model.criterion(detached)
    (terms["box"] + terms["l1"]).backward()
    for leaf, value, plain in (
        (boxes, terms["box"], lambda leaf: generalized_box_iou_loss(leaf, assigned.objects).mean()),
        (deltas, terms["l1"], lambda leaf: F.l1_loss(leaf, assigned.target_deltas)),
    ):
        other = leaf.detach().requires_grad_()
        mean = plain(other)
        (mean * (value / mean).detach()).backward()
        torch.testing.assert_close(leaf.grad, other.grad)


def test_the_encoder_ranks_one_class_over_the_tokens_that_may_propose(step):
    model, calls, _ = step
    images, targets = scene()
    assigned, _ = query_inputs(calls)[0]
    batch, _ = model.transform(images, targets)
    geometry, _ = model.encode(batch, model.neck(model.backbone(batch.tensors)))
    _, valid = initial_boxes(geometry)
    assert not valid.all()
    assert assigned.logits.shape == (valid.numel(), 1)
    assert ((assigned.labels == IGNORED) == ~valid.flatten()).all()
    assert (assigned.labels == 0).sum() == sum(len(target["boxes"]) for target in targets)


def test_each_decoder_layer_matches_one_query_per_object_and_ranks_all_classes(step):
    model, calls, _ = step
    for assigned, _ in query_inputs(calls)[1:7]:
        assert assigned.logits.shape == (2 * model.selected.count, CLASSES)
        assert assigned.positives.sum() == 5
        assert (assigned.labels[~assigned.positives] == NEGATIVE).all()


def test_auxiliary_queries_have_the_same_assignment_in_every_layer(step):
    _, calls, _ = step
    queries = [assigned for name, assigned, _ in calls if name == "criterion"]
    for first, *others in (queries[7:13], queries[13:]):
        assert first.positives.sum() >= 5
        for other in others:
            assert (other.labels == first.labels).all()
            torch.testing.assert_close(other.objects, first.objects)


def test_ranking_trains_on_all_proposals_and_the_ground_truth_boxes(step):
    model, calls, _ = step
    assigned = next(assigned for name, assigned, _ in calls if name.endswith("roi.criterion"))
    assert (assigned.labels != IGNORED).all()
    for image, objects in enumerate((3, 2)):
        assert (assigned.image_index == image).sum() <= 60 + objects
    assert assigned.positives.sum() >= 5  # the ground-truth boxes are among the proposals
    assert model.auxiliary["faster_rcnn"].rpn.post_nms_top_n() == 60


def test_a_matched_query_whose_box_misses_stays_a_positive():
    """Its target is just above 0, so it is still ranked above the negatives."""
    model = small_detector("co_detr")
    logits = torch.zeros(1, 2, CLASSES, requires_grad=True)
    boxes = torch.tensor([[[0.1, 0.1, 0.1, 0.1], [0.15, 0.1, 0.1, 0.1]]])
    ground_truths = [{"boxes": torch.tensor([[80.0, 80, 99, 99]]), "labels": torch.tensor([1])}]
    (assigned,) = model.match_queries([QueryLayer(Decoded(logits, boxes), ground_truths)], [(100, 100)])
    terms = model.criterion(assigned)
    (terms["rank"] + terms["sort"]).backward()
    matched = 1  # the nearer query
    assert logits.grad is not None
    assert logits.grad[0, matched, 1] < 0
    assert (logits.grad[0, 1 - matched] > 0).all()


def test_the_class_cost_of_matching_is_4_for_ranking_losses_and_2_otherwise(monkeypatch):
    calls = []

    def recording(batch, weights):
        calls.append((len(batch), weights.classification))
        return assign_hungarian(batch, weights)

    monkeypatch.setattr(query_matching, "assign_hungarian", recording)
    for loss, cost in (("rs", 4.0), ("ap", 4.0), ("focal", 2.0)):
        small_detector("co_detr", loss=loss)(*scene())
        assert calls == [(2 * (1 + 2), cost)]  # images, and the encoder and two layers
        calls.clear()
    assert small_detector("co_detr", class_cost=3.0).cost_weights.classification == 3.0


def test_focal_loss_has_the_weights_of_co_detr():
    """Weights: queries 2 (classification), 5 (L1), 2 (GIoU); RPN 12 and 12; RoI 12 and 120; ATSS 12, 24 and 12."""
    model = small_detector("co_detr", loss="focal")
    with recorded_calls(model) as calls:
        model(*scene())
    for name, assigned, terms in calls:
        errors = generalized_box_iou_loss(assigned.boxes, assigned.objects)
        count = assigned.positives.sum()
        if name in ("criterion", "auxiliary.atss.criterion"):
            used = assigned.labels != IGNORED
            focal = sigmoid_focal_loss(assigned.logits[used], assigned.targets(1.0)[used], 0.25, 2.0, reduction="sum")
        if name == "criterion":
            torch.testing.assert_close(terms["cls"], 2 * focal / count)
            torch.testing.assert_close(terms["box"], 2 * errors.sum() / count)
            torch.testing.assert_close(
                terms["l1"], 5 * (assigned.box_deltas - assigned.target_deltas).abs().sum() / count
            )
        elif name == "auxiliary.atss.criterion":
            torch.testing.assert_close(terms["cls"], 12 * focal / count)
            torch.testing.assert_close(
                terms["box"], 24 * (errors * assigned.quality_targets).sum() / assigned.quality_targets.sum()
            )
            quality = F.binary_cross_entropy_with_logits(assigned.quality_logits, assigned.quality_targets)
            torch.testing.assert_close(terms["quality"], 12 * quality)
        else:
            used = assigned.labels != IGNORED
            sample_size = 256 if "rpn" in name else 512
            assert max(int((assigned.image_index[used] == image).sum()) for image in range(2)) <= sample_size
            if "rpn" in name:
                cls = F.binary_cross_entropy_with_logits(assigned.logits[used], assigned.targets(1.0)[used])
                box = (assigned.box_deltas - assigned.target_deltas).abs().sum() / used.sum()
                torch.testing.assert_close(terms["box"], 12 * box)
            else:
                labels = assigned.labels.where(assigned.labels >= 0, CLASSES)  # background is last
                cls = F.cross_entropy(assigned.logits, labels)
                torch.testing.assert_close(terms["box"], 120 * errors.sum() / len(labels))
            torch.testing.assert_close(terms["cls"], 12 * cls)


def test_ap_loss_has_fixed_box_weights():
    model = small_detector("co_detr", loss="ap")
    with recorded_calls(model) as calls:
        model(*scene())
    assigned, terms = query_inputs(calls)[0]
    torch.testing.assert_close(terms["box"], 2 * generalized_box_iou_loss(assigned.boxes, assigned.objects).mean())
    torch.testing.assert_close(terms["l1"], 5 * (assigned.box_deltas - assigned.target_deltas).abs().sum(1).mean())


def test_the_weight_of_the_auxiliary_heads_can_be_set():
    plain, heavy = (small_detector("co_detr", auxiliary_weight=weight)(*scene()) for weight in (None, 10.0))
    for name in plain:
        factor = 2.0 if name.startswith(("rpn", "roi", "atss_rank", "atss_sort", "atss_box")) else 1.0
        torch.testing.assert_close(heavy[name], factor * plain[name])


@pytest.mark.parametrize("scope", ["image", "global"])
def test_scopes(scope):
    batch, other = (small_detector("co_detr", ranking_scope=name)(*scene()) for name in ("batch", scope))
    if scope == "global":  # one process
        torch.testing.assert_close(batch, other)
    else:
        assert all(batch[name] != other[name] for name in ("encoder_rank", "decoder_rank", "atss_queries_rank"))
