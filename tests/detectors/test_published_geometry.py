"""The geometry of the published code, where torchvision's differs: RoIAlign, masks, resizing and box deltas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from bucketrank.boxes import giou_loss
from bucketrank.detectors.base import InputTransform, paste_masks
from bucketrank.detectors.box_coder import BoxCoder
from bucketrank.detectors.mask_rcnn import cropped_masks
from bucketrank.detectors.rcnn import STRIDES, CascadeRCNN, RoIPool
from bucketrank.settings.detector_specs import CoDETRSettings

from .small_detectors import scene, small_detector


def ramp(stride: int, side: int = 512) -> torch.Tensor:
    """Return a map (1, 2, H, W) whose channels are x and y of the cells' centres, in pixels."""
    centres = (torch.arange(side // stride) + 0.5) * stride
    return torch.stack(torch.meshgrid(centres, centres, indexing="xy"))[None]


MAPS = [ramp(stride) for stride in STRIDES]


class TestRoIAlign:
    def test_bins_are_pooled_around_their_centres(self):
        """On a linear map every bin has the value at its centre, on every level and for every size of the box."""
        boxes = torch.tensor([[100.0, 120, 142, 134], [90, 100, 230, 310], [60, 70, 340, 420], [40.5, 30.25, 90.5, 85]])
        pooled = RoIPool(STRIDES, size=7)(MAPS, [boxes], [(512, 512)])
        bins = (torch.arange(7) + 0.5) / 7
        for (x1, y1, x2, y2), values in zip(boxes, pooled, strict=True):
            torch.testing.assert_close(values[0], (x1 + bins * (x2 - x1)).expand(7, 7), rtol=1e-4, atol=1e-2)
            torch.testing.assert_close(values[1], (y1 + bins * (y2 - y1))[:, None].expand(7, 7), rtol=1e-4, atol=1e-2)

    def test_torchvisions_is_half_a_cell_off(self):
        boxes = torch.tensor([[100.0, 120, 142, 134]])  # pooled at stride 4
        published, other = (
            RoIPool(STRIDES, size=7, roi_align=name)(MAPS, [boxes], [(512, 512)])
            for name in ("published", "torchvision")
        )
        torch.testing.assert_close(other, published + 2, rtol=1e-4, atol=1e-2)

    def test_large_boxes_get_more_samples(self):
        """Every cell of the map counts: torchvision's 2 x 2 samples per bin miss most cells of a large box."""
        spikes = [torch.zeros(1, 1, 512 // stride, 512 // stride) for stride in STRIDES]
        spikes[3][0, 0, 5, 5] = 1.0  # at stride 32
        box = torch.tensor([[0.0, 0, 512, 512]])
        full = RoIPool(STRIDES, size=7)(spikes, [box], [(512, 512)])
        # Bins of 16 / 7 cells have 3 x 3 samples each, so that the spike is spread over all samples around it.
        assert full.sum() == pytest.approx(49 / 256, rel=0.3)

    @pytest.mark.parametrize("name", ["faster_rcnn", "mask_rcnn", "cascade_rcnn", "co_detr"])
    def test_the_default_is_published(self, name):
        pools = [module for module in small_detector(name).modules() if isinstance(module, RoIPool)]
        assert len(pools) == {"mask_rcnn": 2, "cascade_rcnn": 3}.get(name, 1)
        assert {pool.roi_align for pool in pools} == {"published"}
        if name != "co_detr":
            model = small_detector(name, roi_align="torchvision")
            assert {pool.roi_align for pool in model.modules() if isinstance(pool, RoIPool)} == {"torchvision"}


class TestMasks:
    def test_targets_are_binary_and_aligned(self):
        masks = torch.zeros(2, 20, 20, dtype=torch.uint8)
        masks[0, 4:12, 6:10] = 1
        masks[1, :, 10:] = 1
        boxes = torch.tensor([[6.0, 4, 10, 12], [6, 0, 14, 8], [-5, 15, 30, 40]])
        crops = cropped_masks(masks, boxes, torch.tensor([0, 1, 1]), 4)
        assert crops[0].tolist() == [[1.0] * 4] * 4  # exactly the object
        assert crops[1].tolist() == [[0.0, 0, 1, 1]] * 4  # its right half
        assert crops[2].tolist() == [[0.0, 0, 1, 1]] * 4  # clipped to the image: columns 0 to 20

    def test_half_covered_cells_belong_to_the_object(self):
        masks = torch.zeros(1, 4, 4)
        masks[0, :, 1:] = 1
        crops = cropped_masks(masks, torch.tensor([[0.0, 0, 4, 4]]), torch.tensor([0]), 2)
        assert crops.tolist() == [[[1.0, 1.0], [1.0, 1.0]]]

    def test_pasting_is_bilinear_at_pixel_centres(self):
        """The published code samples the mask at the pixels' centres, with zeros outside."""
        torch.manual_seed(0)
        masks = torch.rand(3, 1, 28, 28)
        boxes = torch.tensor([[3.2, 4.7, 40.1, 30.9], [-5.5, 2.25, 12.5, 60], [50, 20, 50.5, 21]])
        height, width = 48, 64
        expected = []
        for mask, (x1, y1, x2, y2) in zip(masks, boxes, strict=True):
            x = (torch.arange(width) + 0.5 - x1) / (x2 - x1) * 2 - 1
            y = (torch.arange(height) + 0.5 - y1) / (y2 - y1) * 2 - 1
            grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)
            expected.append(F.grid_sample(mask[None], grid[None], align_corners=False)[0])
        torch.testing.assert_close(paste_masks(masks, boxes, (height, width)), torch.stack(expected))

    def test_the_setting_selects_targets_and_pasting(self):
        images, _ = scene()
        published, other = (small_detector("mask_rcnn", roi_align=name).eval() for name in ("published", "torchvision"))
        assert published.transform.published_masks
        assert not other.transform.published_masks
        with torch.no_grad():
            (first, _), (second, _) = published(images), other(images)
        assert first["masks"].shape[1:] == second["masks"].shape[1:] == (1, 96, 120)


class TestResizing:
    @pytest.mark.parametrize(
        ("size", "expected"),
        [((480, 640), (800, 1067)), ((640, 427), (1199, 800)), ((427, 640), (800, 1199)), ((375, 1242), (402, 1333))],
    )
    def test_sides_are_rounded(self, size, expected):
        transform = InputTransform(min_size=800, max_size=1333, image_mean=[0.5] * 3, image_std=[0.2] * 3).eval()
        image, target = transform.resize(torch.rand(3, *size), {"boxes": torch.tensor([[0.0, 0, size[1], size[0]]])})
        assert image.shape[-2:] == expected
        torch.testing.assert_close(target["boxes"], torch.tensor([[0.0, 0, expected[1], expected[0]]]))


def test_boxes_shrink_to_a_limit():
    coder = BoxCoder(weights=(1.0, 1.0, 1.0, 1.0))
    anchors = torch.tensor([[0.0, 0, 1000, 1000]] * 3)
    deltas = torch.tensor([[0.0, 0, -9, -9], [0, 0, math.log(0.016), math.log(0.016)], [0, 0, 9, 9]])
    sides = coder.decode_single(deltas, anchors)
    sides = sides[:, 2] - sides[:, 0]
    torch.testing.assert_close(sides, torch.tensor([16.0, 16.0, 62500.0]), rtol=1e-4, atol=1e-2)


def test_deviations_of_the_cascade():
    weights = [stage.coder.weights for stage in small_detector("cascade_rcnn", loss="ce").stages]
    for (x, y, width, height), (shift, size) in zip(weights, ((0.1, 0.2), (0.05, 0.1), (0.033, 0.067)), strict=True):
        assert (x, y, width, height) == pytest.approx((1 / shift, 1 / shift, 1 / size, 1 / size))
    ranked = small_detector("cascade_rcnn", loss="rs")
    assert isinstance(ranked, CascadeRCNN)
    assert {stage.coder.weights for stage in ranked.stages} == {(10.0, 10.0, 5.0, 5.0)}


@torch.no_grad()
@pytest.mark.parametrize(
    ("loss", "settings", "weight"), [("focal", {}, 1.3), ("focal", {"box_weight": 2.0}, 2.0), ("rs", {}, 1.0)]
)
def test_the_box_weight_of_paas_candidates(loss, settings, weight):
    model = small_detector("paa", loss=loss, **settings)
    images, targets = scene((3,))
    batch, resized = model.transform(images, targets)
    features = model.neck(model.backbone(batch.tensors))
    output, anchors = model.head(features), torch.cat(model.anchors(features))
    ground_truths = [target | {"labels": target["labels"] - 1} for target in resized]
    nearest = torch.full((1, len(anchors)), -1)
    nearest[0, 7] = 1  # one candidate, of the second object
    losses = model.candidate_losses(output, anchors, nearest, ground_truths)[0]
    scores = output.logits[0, 7].sigmoid()
    positive = torch.arange(3) == ground_truths[0]["labels"][1]
    focal = torch.where(
        positive, -0.25 * (1 - scores) ** 2 * scores.log(), -0.75 * scores**2 * (1 - scores).log()
    ).sum()
    box = model.coder.decode_single(output.box_deltas[0, 7:8], anchors[7:8])
    expected = focal + weight * giou_loss(box, ground_truths[0]["boxes"][1:2])[0]
    torch.testing.assert_close(losses[7], expected)


class TestCoDETR:
    def test_the_stride_128_convolution_has_a_bias(self):
        model = small_detector("co_detr")
        assert model.fifth[0].bias is not None
        assert all(level[0].bias is None for level in model.neck.levels)

    def test_the_published_choices(self):
        model = small_detector("co_detr", published=True)
        assert model.proposer.classes.out_features == 3
        assert {module.head.shape for module in model.auxiliary_queries.values()} == {torch.Size([1])}
        assert model.min_label == 0
        losses = model(*scene())
        sum(losses.values()).backward()
        assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
        assert not CoDETRSettings().published
        usual = small_detector("co_detr")
        assert usual.proposer.classes.out_features == 1
        assert usual.min_label > 0

    @torch.no_grad()
    def test_proposals_are_chosen_by_the_first_logit(self):
        model = small_detector("co_detr", published=True).eval()
        images, _ = scene((0,))
        batch, _ = model.transform(images)
        geometry, memory = model.encode(batch, model.neck(model.backbone(batch.tensors)))
        before = model.proposer(memory, geometry).best(5)
        model.proposer.classes.bias[1:] += 100
        torch.testing.assert_close(model.proposer(memory, geometry).best(5), before, rtol=0, atol=0)
