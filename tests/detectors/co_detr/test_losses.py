"""Which losses a step has, of what, and how much each counts."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

from bucketrank import rank_sort_loss
from bucketrank.detectors.co_detr import co_detr
from bucketrank.detectors.co_detr.decoder import Decoded
from bucketrank.detectors.co_detr.proposals import first_boxes
from bucketrank.detectors.criterion import Criterion, ranked
from bucketrank.ops.assignment import IGNORED, NEGATIVE, assign_hungarian
from bucketrank.ops.boxes import paired_iou

from ..tiny import CLASSES, scene, tiny

HEADS = {"criterion": 7 + 2 * 6, "auxiliary.faster_rcnn.rpn.criterion": 1, "auxiliary.faster_rcnn.roi.criterion": 1}
HEADS |= {"auxiliary.atss.criterion": 1}


@contextmanager
def heard(model):
    """What each criterion was given and gave, in order."""
    calls = []
    hooks = [
        module.register_forward_hook(lambda _, given, terms, name=name: calls.append((name, given[0], terms)))
        for name, module in model.named_modules()
        if isinstance(module, Criterion)
    ]
    yield calls
    for hook in hooks:
        hook.remove()


@pytest.fixture(scope="module")
def step():
    """One step with the six layers of the paper."""
    model = tiny("co_detr", decoder_layers=6)
    images, targets = scene()
    with heard(model) as calls:
        losses = model(images, targets)
    return model, calls, losses


def test_a_step_ranks_22_times(monkeypatch):
    count = []

    def counting(*arguments, **settings):
        count.append(arguments[0].shape)
        return rank_sort_loss(*arguments, **settings)

    monkeypatch.setattr(ranked, "rank_sort_loss", counting)
    tiny("co_detr", decoder_layers=6)(*scene())
    assert len(count) == 6 + 1 + 2 * 6 + 1 + 1 + 1


def test_who_ranks(step):
    _, calls, _ = step
    names = [name for name, _, _ in calls]
    assert {name: names.count(name) for name in names} == HEADS


def test_rs_weighs_queries_2_and_auxiliary_heads_5(step):
    """Rank, sort and each box loss, for each of the 22."""
    _, calls, _ = step
    weights = {"criterion": 2.0, "auxiliary.faster_rcnn.rpn.criterion": 1.0}
    for name, found, terms in calls:
        weight = weights.get(name, 5.0)
        labels = paired_iou(found.boxes, found.objects).clamp(min=1e-6)
        ranking, sorting = rank_sort_loss(found.logits, found.targets(labels), delta=0.5)
        torch.testing.assert_close(terms["rank"], weight * ranking)
        torch.testing.assert_close(terms["sort"], weight * sorting)
        for box in {"box", "l1"} & set(terms):
            torch.testing.assert_close(terms[box], weight * (ranking + sorting))
        assert ("l1" in terms) == (name == "criterion")
        assert found.quality_logits is None  # no centerness


def test_terms_are_sums_over_the_layers(step):
    _, calls, losses = step
    queries = [terms for name, _, terms in calls if name == "criterion"]
    parts = {"encoder": queries[:1], "decoder": queries[1:7], "faster_rcnn_queries": queries[7:13]}
    parts["atss_queries"] = queries[13:]
    for head, layers in parts.items():
        for term in ("rank", "sort", "box", "l1"):
            torch.testing.assert_close(losses[f"{head}_{term}"], sum(terms[term] for terms in layers))


def test_boxes_of_queries_count_alike(step):
    """Not by confidence: the gradients of L1 and GIoU are those of plain means, scaled."""
    model, calls, _ = step
    found = next(found for name, found, _ in calls if name == "criterion")
    boxes = found.boxes.detach().requires_grad_()
    codes = found.codes.detach().requires_grad_()
    given = type(found)(**(vars(found) | {"boxes": boxes, "codes": codes, "logits": found.logits.detach()}))
    terms = model.criterion(given)
    (terms["box"] + terms["l1"]).backward()
    for leaf, value, plain in (
        (boxes, terms["box"], lambda leaf: generalized_box_iou_loss(leaf, found.objects).mean()),
        (codes, terms["l1"], lambda leaf: F.l1_loss(leaf, found.object_codes)),
    ):
        other = leaf.detach().requires_grad_()
        mean = plain(other)
        (mean * (value / mean).detach()).backward()
        torch.testing.assert_close(leaf.grad, other.grad)


def test_the_encoder_ranks_one_class_over_the_tokens_that_may_propose(step):
    model, calls, _ = step
    images, targets = scene()
    found = calls[0][1]
    batch, _ = model.transform(images, targets)
    geometry, _ = model.encode(batch, model.neck(model.backbone(batch.tensors)))
    _, valid = first_boxes(geometry)
    assert not valid.all()
    assert found.logits.shape == (valid.numel(), 1)
    assert ((found.labels == IGNORED) == ~valid.flatten()).all()
    assert (found.labels == 0).sum() == sum(len(target["boxes"]) for target in targets)


def test_each_decoder_layer_has_one_query_for_an_object_and_ranks_all_classes(step):
    model, calls, _ = step
    for _, found, _ in calls[1:7]:
        assert found.logits.shape == (2 * model.selected.count, CLASSES)
        assert found.positives.sum() == 5
        assert (found.labels[~found.positives] == NEGATIVE).all()


def test_auxiliary_queries_have_many_for_an_object_in_every_layer_the_same(step):
    _, calls, _ = step
    queries = [found for name, found, _ in calls if name == "criterion"]
    for first, *others in (queries[7:13], queries[13:]):
        assert first.positives.sum() >= 5
        for other in others:
            assert (other.labels == first.labels).all()
            torch.testing.assert_close(other.objects, first.objects)


def test_ranking_takes_all_proposals_and_the_objects(step):
    model, calls, _ = step
    found = next(found for name, found, _ in calls if name.endswith("roi.criterion"))
    assert (found.labels != IGNORED).all()
    for image, objects in enumerate((3, 2)):
        assert (found.images == image).sum() <= 60 + objects
    assert found.positives.sum() >= 5  # each object is a proposal of its own
    assert model.auxiliary["faster_rcnn"].rpn.post_nms_top_n() == 60


def test_a_matched_query_whose_box_misses_stays_a_positive():
    """Its label is just above 0, so it still ranks above the negatives."""
    model = tiny("co_detr")
    logits = torch.zeros(1, 2, CLASSES, requires_grad=True)
    boxes = torch.tensor([[[0.1, 0.1, 0.1, 0.1], [0.15, 0.1, 0.1, 0.1]]])
    truths = [{"boxes": torch.tensor([[80.0, 80, 99, 99]]), "labels": torch.tensor([1])}]
    images = type("Images", (), {"image_sizes": [(100, 100)]})
    match = model.matching(truths, [(100, 100)])
    terms = model.compare([Decoded(logits, boxes)], match, truths, images)
    (terms["rank"] + terms["sort"]).backward()
    matched = 1  # the nearer one
    assert logits.grad is not None
    assert logits.grad[0, matched, 1] < 0
    assert (logits.grad[0, 1 - matched] > 0).all()


def test_the_class_costs_4_in_matching_with_ranking_and_2_without(monkeypatch):
    costs = []

    def spying(*arguments, class_cost, **settings):
        costs.append(class_cost)
        return assign_hungarian(*arguments, class_cost=class_cost, **settings)

    monkeypatch.setattr(co_detr, "assign_hungarian", spying)
    for loss, cost in (("rs", 4.0), ("ap", 4.0), ("focal", 2.0)):
        tiny("co_detr", loss=loss)(*scene())
        assert set(costs) == {cost}
        assert len(costs) == 2 * (1 + 2)  # images, and the encoder and two layers
        costs.clear()
    assert tiny("co_detr", class_cost=3.0).class_cost == 3.0


def test_focal_is_co_detr():
    """Classification, L1 and GIoU of queries 2, 5 and 2; RPN 12 and 12; RoI 12 and 120; ATSS 12, 24 and 12."""
    model = tiny("co_detr", loss="focal")
    with heard(model) as calls:
        model(*scene())
    for name, found, terms in calls:
        errors = generalized_box_iou_loss(found.boxes, found.objects)
        count = found.positives.sum()
        if name in ("criterion", "auxiliary.atss.criterion"):
            taken = found.labels != IGNORED
            focal = sigmoid_focal_loss(found.logits[taken], found.targets(1.0)[taken], 0.25, 2.0, reduction="sum")
        if name == "criterion":
            torch.testing.assert_close(terms["cls"], 2 * focal / count)
            torch.testing.assert_close(terms["box"], 2 * errors.sum() / count)
            torch.testing.assert_close(terms["l1"], 5 * (found.codes - found.object_codes).abs().sum() / count)
        elif name == "auxiliary.atss.criterion":
            torch.testing.assert_close(terms["cls"], 12 * focal / count)
            torch.testing.assert_close(terms["box"], 24 * (errors * found.quality).sum() / found.quality.sum())
            quality = F.binary_cross_entropy_with_logits(found.quality_logits, found.quality)
            torch.testing.assert_close(terms["quality"], 12 * quality)
        else:
            taken = found.labels != IGNORED
            most = 256 if "rpn" in name else 512
            assert max(int((found.images[taken] == image).sum()) for image in range(2)) <= most
            if "rpn" in name:
                cls = F.binary_cross_entropy_with_logits(found.logits[taken], found.targets(1.0)[taken])
                box = (found.codes - found.object_codes).abs().sum() / taken.sum()
                torch.testing.assert_close(terms["box"], 12 * box)
            else:
                wanted = found.labels.where(found.labels >= 0, CLASSES)  # background is last
                cls = F.cross_entropy(found.logits, wanted)
                torch.testing.assert_close(terms["box"], 120 * errors.sum() / len(wanted))
            torch.testing.assert_close(terms["cls"], 12 * cls)


def test_ap_has_the_usual_weights_of_the_boxes():
    model = tiny("co_detr", loss="ap")
    with heard(model) as calls:
        model(*scene())
    _, found, terms = calls[0]
    torch.testing.assert_close(terms["box"], 2 * generalized_box_iou_loss(found.boxes, found.objects).mean())
    torch.testing.assert_close(terms["l1"], 5 * (found.codes - found.object_codes).abs().sum(1).mean())


def test_the_weight_of_the_auxiliary_heads_can_be_set():
    plain, heavy = (tiny("co_detr", auxiliary_weight=weight)(*scene()) for weight in (None, 10.0))
    for name in plain:
        factor = 2.0 if name.startswith(("rpn", "roi", "atss_rank", "atss_sort", "atss_box")) else 1.0
        torch.testing.assert_close(heavy[name], factor * plain[name])


@pytest.mark.parametrize("scope", ["image", "global"])
def test_scopes(scope):
    batch, other = (tiny("co_detr", ranking_scope=name)(*scene()) for name in ("batch", scope))
    if scope == "global":  # one process
        torch.testing.assert_close(batch, other)
    else:
        assert all(batch[name] != other[name] for name in ("encoder_rank", "decoder_rank", "atss_queries_rank"))
