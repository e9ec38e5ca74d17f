"""The one-stage detectors: order of anchors, assignment, detections, score voting."""

from typing import Any

import pytest
import torch

from bucketrank.detectors.assignment import IGNORED
from bucketrank.detectors.dense import FIRST_ENTRIES, DenseHead, class_nms, detect, top_scores, vote

from .small_detectors import scene, small_detector
from .test_rcnn import captured


def test_logits_and_deltas_have_the_order_of_the_anchors():
    """Anchors follow each other at each location: channel a * C + c of the map is anchor a, class c."""
    head: Any = DenseHead(32, num_classes=2, anchors=3, levels=1, convs=0, quality=True)
    with torch.no_grad():
        for layer in (head.classes, head.boxes, head.quality):
            layer.weight.zero_()
            layer.bias.copy_(torch.arange(len(layer.bias)))
        output = head([torch.zeros(1, 32, 2, 2)])
    assert output.logits.shape == (1, 12, 2)
    torch.testing.assert_close(output.logits[0, :3], torch.arange(6.0).reshape(3, 2))
    torch.testing.assert_close(output.box_deltas[0, 3:6], torch.arange(12.0).reshape(3, 4))
    torch.testing.assert_close(output.quality[0, :3], torch.arange(3.0))
    assert output.per_level == [12]


def test_every_level_has_its_scale():
    head: Any = DenseHead(32, num_classes=2, anchors=1, levels=2, convs=0)
    with torch.no_grad():
        head.boxes.weight.zero_()
        head.boxes.bias.fill_(1.0)
        head.scales.copy_(torch.tensor([2.0, 3.0]))
        deltas = head([torch.zeros(1, 32, 1, 1)] * 2).box_deltas
    torch.testing.assert_close(deltas[0], torch.tensor([[2.0] * 4, [3.0] * 4]))


@pytest.mark.parametrize("name", ["retinanet", "atss", "paa"])
def test_anchors_on_padding_are_ignored_and_the_box_loss_is_balanced(name):
    images, targets = scene()
    model = small_detector(name, min_size=64, max_size=160)
    (assigned,) = captured(model, images, targets)
    # Resized to 64 x 80 and 64 x 102, padded to 64 x 128; alone, the first image would be padded to 96 only.
    anchors = torch.cat(model.anchors(model.neck(model.backbone(torch.zeros(1, 3, 64, 128)))))
    padding = (anchors[:, 0] + anchors[:, 2]) / 2 > 95.5
    first, second = assigned.labels.split(len(anchors))
    assert padding.any()
    assert (first[padding] == IGNORED).all()
    assert (second[padding] != IGNORED).any()
    if name != "retinanet":  # which also ignores anchors between its two IoU thresholds
        assert (first[~padding] != IGNORED).all()
        assert (second != IGNORED).all()
    assert assigned.positives.any()
    terms = model(images, targets)
    torch.testing.assert_close(terms["box"], terms["rank"] + terms["sort"])


def test_positives_have_the_classes_of_the_objects():
    images, targets = scene()
    for name in ("retinanet", "atss", "paa"):
        (assigned,) = captured(small_detector(name), images, targets)
        assert 2 <= int(assigned.positives.sum()) < 400
        assert len(assigned.objects.unique(dim=0)) == 5  # every object has a positive
        classes = {int(label) - 1 for target in targets for label in target["labels"]}
        assert set(assigned.labels[assigned.positives].tolist()) <= classes


def test_top_scores():
    scores = torch.tensor([[0.1, 0.9], [0.5, 0.0], [0.7, 0.2]])
    values, rows, columns = top_scores(scores, limit=3, threshold=0.0)
    torch.testing.assert_close(values, torch.tensor([0.9, 0.7, 0.5]))
    assert rows.tolist() == [0, 2, 1]
    assert columns.tolist() == [1, 0, 0]
    assert len(top_scores(scores, limit=10, threshold=0.0)[0]) == 5  # a score of 0 is not above the threshold
    assert len(top_scores(scores, limit=10, threshold=0.5)[0]) == 2


def test_duplicates_are_removed_within_a_class_only():
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 10, 9], [30, 30, 30, 40]])
    scores, labels = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([0, 0, 1, 0])
    result = class_nms(boxes, scores, labels, iou=0.5, limit=10)
    torch.testing.assert_close(result["scores"], torch.tensor([0.9, 0.7]))  # the last box has no area


def test_voting_by_hand():
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 8], [20, 20, 30, 30]])
    scores = torch.tensor([[0.9, 0.0], [0.8, 0.7], [0.6, 0.0]])  # of two classes
    detection = {"boxes": boxes[:1], "scores": scores[:1, 0], "labels": torch.tensor([0])}
    # The second box overlaps the first by 0.8: its vote is 0.8 * exp(-0.04 / 0.025).
    weight = 0.8 * torch.exp(torch.tensor(-1.6))
    y2 = (0.9 * 10 + weight * 8) / (0.9 + weight)
    moved = vote(detection, boxes, scores)
    torch.testing.assert_close(moved["boxes"][0], torch.stack([*torch.tensor([0.0, 0, 10]), y2]))
    torch.testing.assert_close(moved["scores"], detection["scores"])


def test_no_score_is_left_out_before_nms():
    """10,000 boxes of class 0 hide one object; those of class 1, all of lower scores, are not cut off."""
    count = 2 * FIRST_ENTRIES
    boxes = torch.tensor([[0.0, 0, 10, 10]]).repeat(count, 1)
    boxes[:3] += torch.tensor([[0.0], [20], [40]])
    scores = torch.stack([torch.linspace(0.5, 0.9, count), torch.zeros(count)], 1)
    scores[:3, 1] = torch.tensor([0.1, 0.3, 0.2])
    calls: list[int] = []

    def boxes_of(rows, _labels):
        calls.append(len(rows))
        return boxes[rows]

    found = detect(scores, boxes_of, threshold=0.0, iou=0.5, limit=6)
    # Class 0: the last box, and the two that were moved away. Class 1: all three.
    torch.testing.assert_close(found["scores"], torch.tensor([0.9, scores[2, 0], scores[1, 0], 0.3, 0.2, 0.1]))
    assert found["labels"].tolist() == [0, 0, 0, 1, 1, 1]
    assert calls == [FIRST_ENTRIES, count + 3]
    calls.clear()
    assert len(detect(scores, boxes_of, threshold=0.0, iou=0.5, limit=1)["scores"]) == 1
    assert calls == [FIRST_ENTRIES]  # the best score is found without comparing all boxes


@torch.no_grad()
def test_atss_selects_by_class_score_and_ranks_by_quality():
    model = small_detector("atss", loss="focal", candidates=1, score_threshold=0.5).eval()
    class_scores = torch.tensor([[0.9, 0.6], [0.8, 0.1], [0.55, 0.4]])
    scores = class_scores * torch.tensor([[0.1], [1.0], [1.0]])
    anchors, kept = model.candidate_scores(class_scores, scores, [2, 1])
    # The best class score of each level enters, although its product with the quality is low and below the threshold.
    assert anchors.tolist() == [0, 2]
    torch.testing.assert_close(kept, torch.tensor([[0.09, 0.0], [0.55, 0.0]]))


@torch.no_grad()
def test_paa_selects_anchors_with_all_their_classes():
    model = small_detector("paa", loss="focal", candidates=1, score_threshold=0.05).eval()
    scores = torch.tensor([[0.1, 0.2], [0.8, 0.04], [0.6, 0.3]])
    anchors, kept = model.candidate_scores(scores, scores, [2, 1])
    assert anchors.tolist() == [1, 2]
    torch.testing.assert_close(kept, torch.tensor([[0.8, 0.0], [0.6, 0.3]]))


def test_quality_multiplies_the_score_in_atss_and_paa_takes_the_root():
    images, _ = scene()
    for name, power in (("atss", 1.0), ("paa", 0.5)):
        model = small_detector(name, loss="focal").eval()
        with torch.no_grad():
            batch, _ = model.transform(images)
            output = model.head(model.neck(model.backbone(batch.tensors)))
            expected = (output.logits.sigmoid() * output.quality.sigmoid()[..., None]) ** power
            torch.testing.assert_close(model.scores(output), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retinanet", "atss", "paa"])
def test_a_norm_after_the_finest_map_is_frozen(name):
    """Swin has such a norm. The pyramid starts at stride 8, so the norm never receives a gradient."""
    model = small_detector(name, backbone="swin_tiny", min_size=64, max_size=96)
    sum(model(*scene()).values()).backward()
    assert [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_score_voting_keeps_its_precision_under_autocast(dtype):
    corners = torch.tensor([[1100.3, 600.7, 1330.1, 790.9]]).repeat(80, 1) + torch.rand(80, 1)
    scores = torch.full((80, 1), 0.95)
    detection = {"boxes": corners[:1], "scores": scores[0], "labels": torch.tensor([0])}
    expected = vote(detection, corners, scores)
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(vote(detection, corners, scores), expected)
