"""The heads of the R-CNNs: sampling, stages, and the rows of masks, confidences and objects."""

import pytest
import torch

from bucketrank.detectors.assignment import NEGATIVE
from bucketrank.detectors.criterion import Assigned, Criterion
from bucketrank.detectors.rcnn import BoxHead
from bucketrank.settings import loss_settings

from .small_detectors import scene, small_detector


def captured(model, images, targets):
    """Return the input of each call of a criterion in one training step."""
    inputs_of_criteria: list[Assigned] = []
    handles = [
        module.register_forward_pre_hook(lambda _, inputs: inputs_of_criteria.append(inputs[0]))
        for module in model.modules()
        if isinstance(module, Criterion)
    ]
    model(images, targets)
    for handle in handles:
        handle.remove()
    return inputs_of_criteria


@pytest.mark.parametrize("loss", ["rs", "focal"])
def test_all_candidates_are_trained(loss):
    images, targets = scene()
    model = small_detector("faster_rcnn", loss=loss)
    rpn, roi = captured(model, images, targets)
    # One row per anchor. The proposals of an image are followed by its ground-truth boxes, which are positive.
    assert len(rpn.labels) == 2 * sum(3 * (96 // s) * (160 // s) for s in (4, 8, 16, 32)) + 2 * 3 * 2 * 3
    counts = [int((roi.image_index == image).sum()) for image in range(2)]
    assert counts == [103, 102]
    assert (roi.labels >= -1).all()
    assert roi.positives[100:103].all()
    assert roi.positives[203:].all()


def test_cross_entropy_samples():
    images, targets = scene()
    rpn, roi = captured(small_detector("faster_rcnn", loss="ce"), images, targets)
    for image in range(2):
        labels = rpn.labels[rpn.image_index == image]
        assert (labels >= -1).sum() == 256
        assert (labels >= 0).sum() <= 128
        assert (roi.labels[roi.image_index == image] >= 0).sum() <= 128


def test_objects_are_added_to_every_stage_of_a_cascade_and_dropped_after_it():
    images, targets = scene()
    _, *stages = captured(small_detector("cascade_rcnn"), images, targets)
    assert len(stages) == 3
    for stage in stages:
        assert [int((stage.image_index == image).sum()) for image in range(2)] == [103, 102]


def test_later_stages_of_a_cascade_have_fewer_positives():
    images, targets = scene()
    counts = [int(stage.positives.sum()) for stage in captured(small_detector("cascade_rcnn"), images, targets)[1:]]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_refined_boxes_are_clipped_to_their_image():
    head = BoxHead(8, num_classes=2, loss=loss_settings("rs"), hidden=8, class_agnostic=True)
    proposals = [torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([[5.0, 5, 20, 20], [0, 0, 4, 4]])]
    deltas = torch.tensor([[0.0, 0, 0, 0], [100, 100, 0, 0], [0, 0, 50, 50]])[:, None]
    first, second = head.refined(deltas, proposals, [(12, 12), (24, 30)])
    torch.testing.assert_close(first, proposals[0])
    assert (second[:, [0, 2]] <= 30).all()
    assert (second[:, [1, 3]] <= 24).all()
    assert (second >= 0).all()


@pytest.mark.parametrize("mask_rois", [1, 5, 1000])
def test_masks_keep_their_confidences_and_objects_when_positives_are_subsampled(mask_rois):
    """Confidences identify the positives and masks identify their image; after the draw they must still agree."""
    images, targets = scene((3, 3))
    # Both images have the same boxes, so RoIs of one image fit the objects of the other. Only the masks, empty in the
    # first image and full in the second, show which image a RoI belongs to.
    for number, target in enumerate(targets):
        target["boxes"] = torch.tensor([[8.0, 8, 40, 40], [50, 10, 80, 50], [20, 45, 60, 75]])
        target["masks"] = torch.full_like(target["masks"], number)
    model = small_detector("mask_rcnn", mask_rois=mask_rois)
    steps, mask_calls = [], []
    train_on, mask_loss = model.box_head.train_on, model.mask_loss

    def recorded_train_on(*arguments):
        steps.append(train_on(*arguments))
        return steps[-1]

    def recorded_mask_loss(*arguments, **named):
        mask_calls.append((arguments, named))
        return mask_loss(*arguments, **named)

    model.box_head.train_on, model.mask_loss = recorded_train_on, recorded_mask_loss
    model(images, targets)

    ((_, target_masks), named) = mask_calls[0]
    assigned = steps[0].assigned
    rows = torch.where(assigned.positives)[0]
    assert len(target_masks) == min(mask_rois, len(rows))
    confidences = assigned.logits.sigmoid().amax(1)[rows]
    image_index = assigned.image_index[rows]
    for mask, weight in zip(target_masks, named["class_logits"].sigmoid().amax(1), strict=True):
        image = image_index[confidences == weight]
        assert len(image) >= 1
        assert (mask.round() == image[0]).all()


def test_the_mask_term_is_balanced_to_the_box_heads_ranking():
    terms = small_detector("mask_rcnn")(*scene())
    torch.testing.assert_close(terms["roi_box"], terms["roi_rank"] + terms["roi_sort"])
    torch.testing.assert_close(terms["rpn_box"], terms["rpn_rank"] + terms["rpn_sort"])
    torch.testing.assert_close(terms["mask"], terms["roi_rank"] + terms["roi_sort"])


@pytest.mark.parametrize(("low_quality", "owner"), [(False, 0), (True, 1)])
def test_an_object_claims_its_best_proposal_in_mask_rcnn(low_quality, owner):
    """The proposal overlaps the objects by 9/10 and 8/9. If both claim it, the later one gets it."""
    head = BoxHead(4, num_classes=2, loss=loss_settings("rs"), hidden=8, low_quality=low_quality)
    features = [torch.rand(1, 4, 64 // stride, 64 // stride) for stride in (4, 8, 16, 32)]
    objects = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 8], [0, 0, 10, 8]])
    proposals = torch.tensor([[0.0, 0, 10, 9], [30, 30, 40, 40]])
    ground_truth = {"boxes": objects[:2], "labels": torch.tensor([0, 1])}
    (matches,) = head.train_on(features, [proposals], [ground_truth], [(64, 64)]).matches
    assert matches.tolist() == [owner, NEGATIVE, 0, 1]
    # Of two objects with the same box, each keeps its own.
    ground_truth = {"boxes": objects[1:], "labels": torch.tensor([0, 1])}
    (matches,) = head.train_on(features, [proposals], [ground_truth], [(64, 64)]).matches
    assert matches.tolist()[2:] == [0, 1]
    assert small_detector("mask_rcnn").box_head.low_quality == 0.5
    assert small_detector("faster_rcnn").box_head.low_quality is None
