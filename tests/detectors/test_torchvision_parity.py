"""Our detectors against torchvision's: the same weights and images give the same detections, losses and gradients."""

import copy
from typing import Any

import pytest
import torch
from torchvision.ops import remove_small_boxes

from .torchvision_twins import CLASSES, our_model, scene, torchvision_model, trained

DETECTORS = ["faster_rcnn", "mask_rcnn", "retinanet"]
LOSS_TERMS = {
    "rpn_cls": "loss_objectness",
    "rpn_box": "loss_rpn_box_reg",
    "roi_cls": "loss_classifier",
    "roi_box": "loss_box_reg",
    "mask": "loss_mask",
    "cls": "classification",
    "box": "bbox_regression",
}
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DETECTORS)
def test_detections_are_equal(name, tmp_path):
    theirs = torchvision_model(name, seed=1)
    ours = our_model(name, theirs, tmp_path)
    # The images are resized and padded. From a batch that is mostly padding, torchvision derives wrong pooling strides.
    images = [*scene(1, 1)[0], torch.rand(3, 60, 100, generator=torch.Generator().manual_seed(1))]
    with torch.no_grad():
        expected, actual = theirs(images), ours(images)
    for own, other in zip(actual, expected, strict=True):
        assert len(other["labels"]) > 50
        assert len(other["labels"].unique()) == CLASSES
        assert len(other["scores"].unique()) > 50
        # torchvision's RetinaNet also returns boxes without area, at the border of padding.
        solid = remove_small_boxes(other["boxes"], 0.01)
        for key in ("boxes", "scores", "labels", *(["masks"] if name == "mask_rcnn" else [])):
            torch.testing.assert_close(own[key][: len(solid)], other[key][solid], **CLOSE)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DETECTORS)
def test_losses_and_gradients_are_equal(name, tmp_path):
    theirs = torchvision_model(name)
    ours = our_model(name, theirs, tmp_path)
    # torchvision's RetinaNet divides by the positives of each image, ours by those of the batch: one image each.
    images, targets = scene(3) if name == "retinanet" else scene(3, 0, 2)
    terms = []
    for model in (ours, theirs):
        torch.manual_seed(5)  # both draw the same candidates
        terms.append(trained(model)(images, copy.deepcopy(targets)))
        torch.stack(list(terms[-1].values())).sum().backward()
    assert {LOSS_TERMS[term] for term in terms[0]} == set(terms[1])
    for term, value in terms[0].items():
        assert value > 1e-3
        torch.testing.assert_close(value, terms[1][LOSS_TERMS[term]], **CLOSE)
    gradients = [model.backbone.body.conv1.weight.grad for model in (ours, theirs)]
    assert gradients[1].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, **CLOSE)


def test_a_ranking_loss_keeps_proposals_and_boxes(tmp_path):
    """A ranking loss decodes deltas with other weights and has no background logit; loading accounts for both."""
    theirs = torchvision_model("faster_rcnn")
    ours = our_model("faster_rcnn", theirs, tmp_path, loss="rs")
    images, _ = scene(1)
    with torch.no_grad():
        batch, _ = theirs.transform(images)
        features = theirs.backbone(batch.tensors)
        expected, _ = theirs.rpn(batch, features)
        pyramid = ours.neck(ours.backbone(batch.tensors))
        actual, _ = ours.rpn(batch, pyramid)
        torch.testing.assert_close(actual[0], expected[0], **CLOSE)
        pooled = theirs.roi_heads.box_roi_pool(features, expected, batch.image_sizes)
        logits, deltas = theirs.roi_heads.box_predictor(theirs.roi_heads.box_head(pooled))
        own_logits, own_deltas = ours.box_head(pyramid, actual, batch.image_sizes)
    torch.testing.assert_close(own_logits, logits[:, 1:] - logits[:, :1], **CLOSE)
    torch.testing.assert_close(own_deltas.flatten(1), deltas[:, 4:], **CLOSE)


def test_a_ranking_loss_keeps_the_boxes_of_retinanet(tmp_path):
    theirs = torchvision_model("retinanet")
    ours = our_model("retinanet", theirs, tmp_path, loss="rs")
    images, _ = scene(1, 1)
    with torch.no_grad():
        batch, _ = theirs.transform(images)
        features = list(theirs.backbone(batch.tensors).values())
        anchors = torch.cat(ours.anchors(features))
        deltas = theirs.head(features)["bbox_regression"]
        own_deltas = ours.head(ours.neck(ours.backbone(batch.tensors))).box_deltas
    for own, other in zip(own_deltas, deltas, strict=True):
        expected = theirs.box_coder.decode_single(other, anchors)
        assert (expected - anchors).abs().max() > 1
        torch.testing.assert_close(ours.coder.decode_single(own, anchors), expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "largest"), [("faster_rcnn", 0.5), ("retinanet", 1.0)])
def test_torchvisions_rounded_anchors_differ_by_less_than_a_pixel(name, largest, tmp_path):
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.retinanet import _default_anchorgen

    ours = our_model(name, torchvision_model(name), tmp_path)
    generator = ours.anchors if name == "retinanet" else ours.rpn.anchor_generator
    usual = (
        _default_anchorgen()
        if name == "retinanet"
        else AnchorGenerator(((32,), (64,), (128,), (256,), (512,)), ((0.5, 1.0, 2.0),) * 5)
    )
    for own, other in zip(generator.cell_anchors, usual.cell_anchors, strict=True):
        assert (own - other).abs().max() <= largest
