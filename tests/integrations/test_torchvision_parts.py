"""The parts of the torchvision adapter: expected signatures, log-odds, relative boxes and the terms of one head."""

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.ssd import SSD
from torchvision.ops import box_iou, generalized_box_iou_loss

from bucketrank.boxes import paired_iou
from bucketrank.integrations import torchvision as adapter
from bucketrank.integrations.ranking_loss import LossName, RankingLoss
from bucketrank.integrations.torchvision.heads import (
    BACKGROUND,
    IGNORED,
    head_terms,
    limit_positives,
    log_odds,
    relative_boxes,
)
from bucketrank.integrations.torchvision.signatures import check_signatures
from tests.integrations.gradients import gradient_of


class TestSignatures:
    CHANGES = (
        (RoIHeads, "subsample", lambda self, labels, generator: None),
        (RegionProposalNetwork, "compute_loss", lambda self, objectness: None),
        (SSD, "compute_loss", None),
    )

    def test_the_installed_version_fits(self):
        check_signatures()

    @pytest.mark.parametrize(("owner", "method", "changed"), CHANGES)
    def test_the_import_of_another_version_names_the_supported_ones(self, owner, method, changed, monkeypatch):
        monkeypatch.setattr(owner, method, changed)
        path = Path(adapter.__file__)
        spec: Any = importlib.util.spec_from_file_location("imported_again", path)
        with pytest.raises(ImportError, match=rf"expected torchvision 0\.21 to .*{owner.__name__}\.{method}.*install"):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))

    def test_without_torchvision_the_extra_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torchvision", None)
        with pytest.raises(ImportError, match=r"pip install \"bucketrank\[torchvision\]\""):
            check_signatures()


class TestPieces:
    def test_limit_positives(self):
        labels = torch.tensor([3, 0, 2, 2, 0, 1])
        kept = limit_positives(labels, 2)
        assert (kept > 0).sum() == 2
        assert ((kept == labels) | (kept == 0)).all()
        torch.testing.assert_close(limit_positives(labels, 9), labels)

    def test_log_odds_against_the_definition(self):
        torch.manual_seed(0)
        z = (torch.randn(200, 7, dtype=torch.float64) * 12).requires_grad_()
        others = [torch.cat([z[:, :c], z[:, c + 1 :]], 1).logsumexp(1) for c in range(7)]
        expected = z - torch.stack(others, 1)
        weights = torch.randn_like(z)
        (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), z)

        x = z.detach().float().requires_grad_()
        odds = log_odds(x)
        (odds * weights).sum().backward()
        torch.testing.assert_close(odds.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient_of(x).double(), expected_gradient, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("row", [[0.0, 0.0], [0.0, 200.0, -200.0], [5.0, 5.0, 5.0, 5.0]])
    def test_log_odds_at_the_edges(self, row):
        z = torch.tensor([row], requires_grad=True)
        odds = log_odds(z)
        odds.sum().backward()
        assert odds.isfinite().all()
        assert gradient_of(z).isfinite().all()
        torch.testing.assert_close(odds.sigmoid(), z.softmax(-1))

    def test_paired_iou_is_the_diagonal_of_box_iou(self):
        boxes, objects = (torch.rand(2, 50, 4) * 20).split(1)
        boxes, objects = (torch.cat([b[0, :, :2], b[0, :, :2] + b[0, :, 2:]], 1) for b in (boxes, objects))
        torch.testing.assert_close(paired_iou(boxes, objects), box_iou(boxes, objects).diagonal())
        assert paired_iou(boxes[:0], objects[:0]).shape == (0,)

    def test_relative_boxes_keep_iou_and_giou(self):
        torch.manual_seed(0)
        coder = BoxCoder((10.0, 10.0, 5.0, 5.0))
        corner, size = torch.rand(30, 2) * 100, torch.rand(30, 2) * 50 + 5
        anchors = torch.cat([corner, corner + size], 1)
        deltas = torch.randn(2, 30, 4)  # of predictions and of targets
        decoded = [coder.decode_single(encoded, anchors) for encoded in deltas]
        relative = [relative_boxes(coder, encoded) for encoded in deltas]
        torch.testing.assert_close(paired_iou(*relative), paired_iou(*decoded))
        torch.testing.assert_close(generalized_box_iou_loss(*relative), generalized_box_iou_loss(*decoded))

    def test_terms_by_hand(self):
        """Rank two positives, a negative above both and an ignored candidate; the boxes have IoU 1/2 and 1."""
        logits = torch.tensor([[2.0], [1.0], [3.0], [9.0]], requires_grad=True)
        labels = torch.tensor([0, 0, BACKGROUND, IGNORED])
        boxes = torch.tensor([[0.0, 0, 1, 1], [0, 0, 1, 1]], requires_grad=True)
        objects = torch.tensor([[0.0, 0, 2, 1], [0, 0, 1, 1]])
        terms = head_terms(RankingLoss(delta=0.0), logits, labels, boxes=boxes, objects=objects)
        # The positive of IoU 1/2 has rank 2, with 1 negative above: 1/2. The positive of IoU 1 has rank 3: 1/3.
        torch.testing.assert_close(terms["rank"], torch.tensor((1 / 2 + 1 / 3) / 2))
        # The mean 1 - IoU down to the second positive is (1/2 + 0) / 2 and should be 0. The first has no error.
        torch.testing.assert_close(terms["sort"], torch.tensor((0 + 1 / 4) / 2))
        torch.testing.assert_close(terms["box"], terms["rank"] + terms["sort"])  # self-balanced
        terms["box"].backward()
        assert gradient_of(boxes)[0].any()
        assert logits.grad is None  # the confidences are weights without a gradient

    def test_boxes_are_weighted_by_confidence(self):
        logits = torch.tensor([[0.0, -9.0], [-9.0, -2.0], [1.0, 1.0]])
        labels = torch.tensor([0, 1, BACKGROUND])
        boxes = torch.tensor([[0.0, 0, 1, 1], [0, 0, 1, 1]], requires_grad=True)
        objects = torch.tensor([[0.0, 0, 2, 1], [0, 0, 2, 1]])
        head_terms(RankingLoss(), logits, labels, boxes=boxes, objects=objects)["box"].backward()
        ratio = gradient_of(boxes)[0] / gradient_of(boxes)[1]
        confidence = torch.tensor([0.0, -2.0]).sigmoid()
        torch.testing.assert_close(ratio[2], confidence[0] / confidence[1])

    @pytest.mark.parametrize("loss", get_args(LossName))
    def test_a_box_weight_replaces_self_balancing(self, loss):
        """Confidences of 1/2 and 1/4 weigh GIoU losses of 1/2 and 0: (1/4 + 0) / (3/4) = 1/3."""
        logits = torch.tensor([[0.0], [-math.log(3)], [1.0]])
        labels = torch.tensor([0, 0, BACKGROUND])
        boxes = torch.tensor([[0.0, 0, 1, 1], [0, 0, 2, 1]], requires_grad=True)
        objects = torch.tensor([[0.0, 0, 2, 1], [0, 0, 2, 1]])
        fixed = head_terms(RankingLoss(loss, box_weight=2), logits, labels, boxes=boxes, objects=objects)
        torch.testing.assert_close(fixed["box"], torch.tensor(2 / 3))
        balanced = head_terms(RankingLoss(loss), logits, labels, boxes=boxes, objects=objects)
        ranking = torch.stack([balanced[name] for name in balanced if name != "box"]).sum()
        torch.testing.assert_close(balanced["box"], ranking)
        assert all(torch.equal(fixed[name], balanced[name]) for name in balanced if name != "box")
