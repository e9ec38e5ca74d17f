"""The heads of the R-CNNs: who is assigned to whom, and that weights meet their own RoIs."""

import pytest
import torch

from bucketrank.catalogue import loss_settings
from bucketrank.detectors.box_head import BoxHead
from bucketrank.detectors.criterion import Criterion

from .tiny import scene, tiny


def captured(model, images, targets):
    """The ``Assigned`` that each criterion of the model is given in a step."""
    seen = []
    handles = [
        module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        for module in model.modules()
        if isinstance(module, Criterion)
    ]
    model(images, targets)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("loss", ["rs", "focal"])
def test_nothing_is_sampled(loss):
    images, targets = scene()
    model = tiny("faster_rcnn", loss=loss)
    rpn, roi = captured(model, images, targets)
    # Every anchor has its row; the proposals of an image are followed by its objects, which are positives.
    assert len(rpn.labels) == 2 * sum(3 * (96 // s) * (160 // s) for s in (4, 8, 16, 32)) + 2 * 3 * 2 * 3
    counts = [int((roi.images == image).sum()) for image in range(2)]
    assert counts == [103, 102]
    assert (roi.labels >= -1).all()
    assert roi.positives[100:103].all()
    assert roi.positives[203:].all()


def test_cross_entropy_samples():
    images, targets = scene()
    rpn, roi = captured(tiny("faster_rcnn", loss="ce"), images, targets)
    for image in range(2):
        labels = rpn.labels[rpn.images == image]
        assert (labels >= -1).sum() == 256
        assert (labels >= 0).sum() <= 128
        assert (roi.labels[roi.images == image] >= 0).sum() <= 128


def test_objects_are_added_to_every_stage_of_a_cascade_and_dropped_after_it():
    images, targets = scene()
    found = captured(tiny("cascade_rcnn"), images, targets)
    assert len(found) == 4
    for stage in found[1:]:
        assert [int((stage.images == image).sum()) for image in range(2)] == [103, 102]


def test_a_cascade_asks_more_of_each_stage():
    images, targets = scene()
    counts = [int(stage.positives.sum()) for stage in captured(tiny("cascade_rcnn"), images, targets)[1:]]
    assert counts == sorted(counts, reverse=True)


def test_refined_boxes_stay_in_their_image():
    head = BoxHead(8, num_classes=2, loss=loss_settings("rs"), hidden=8, class_agnostic=True)
    proposals = [torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([[5.0, 5, 20, 20], [0, 0, 4, 4]])]
    codes = torch.tensor([[0.0, 0, 0, 0], [100, 100, 0, 0], [0, 0, 50, 50]])[:, None]
    first, second = head.refined(codes, proposals, [(12, 12), (24, 30)])
    torch.testing.assert_close(first, proposals[0])
    assert (second[:, [0, 2]] <= 30).all()
    assert (second[:, [1, 3]] <= 24).all()
    assert (second >= 0).all()


@pytest.mark.parametrize("most", [1, 5, 1000])
def test_masks_meet_their_own_weights_and_objects_when_positives_are_subsampled(most):
    """Every positive's confidence and true mask are made recognisable; after the draw they must still be together."""
    images, targets = scene((3, 3))
    # All objects alike in place and size, so that RoIs of one image fit the objects of the other as well:
    # only the masks, full in one image and empty in the other, tell whose RoI it was.
    for number, target in enumerate(targets):
        target["boxes"] = torch.tensor([[8.0, 8, 40, 40], [50, 10, 80, 50], [20, 45, 60, 75]])
        target["masks"] = torch.full_like(target["masks"], number)
    model = tiny("mask_rcnn", mask_rois=most)
    trained, seen = [], []
    train_on, masks = model.box_head.train_on, model.box_head.criterion.masks

    def watched_training(*arguments):
        trained.append(train_on(*arguments))
        return trained[-1]

    def watched_masks(*arguments, **named):
        seen.append((arguments, named))
        return masks(*arguments, **named)

    model.box_head.train_on, model.box_head.criterion.masks = watched_training, watched_masks
    model(images, targets)

    ((_, wanted), named) = seen[0]
    found = trained[0].found
    rows = torch.where(found.positives)[0]
    assert len(wanted) == min(most, len(rows))
    confidences = found.logits.sigmoid().amax(1)[rows]
    owners = found.images[rows]
    for mask, weight in zip(wanted, named["confidences"], strict=True):
        own = owners[confidences == weight]
        assert len(own) >= 1
        assert (mask.round() == own[0]).all()  # the mask of the image whose RoI has this confidence


def test_the_mask_term_is_balanced_to_the_box_heads_ranking():
    terms = tiny("mask_rcnn")(*scene())
    torch.testing.assert_close(terms["roi_box"], terms["roi_rank"] + terms["roi_sort"])
    torch.testing.assert_close(terms["rpn_box"], terms["rpn_rank"] + terms["rpn_sort"])
    torch.testing.assert_close(terms["mask"], terms["roi_rank"] + terms["roi_sort"])
