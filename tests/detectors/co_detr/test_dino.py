"""Co-DINO: its decoder, proposals, losses and soft-NMS. The numbers of a forward pass are compared in tests/weights."""

from typing import Any

import pytest
import torch
from torchvision.ops import generalized_box_iou_loss

from bucketrank import quality_focal_loss
from bucketrank.boxes import paired_iou
from bucketrank.detectors.assignment import NEGATIVE
from bucketrank.detectors.co_detr.decoder import Decoder, Proposals, Proposer, Queries
from bucketrank.detectors.co_detr.dino import soften
from bucketrank.detectors.co_detr.transformer import Geometry, TransformerSettings, inverse_sigmoid, sine_encoding

from ..small_detectors import CLASSES, scene, small_detector
from .test_losses import query_inputs, recorded_calls

SETTINGS = TransformerSettings(width=32, heads=2, points=2, levels=1, feedforward=16, decoder_layers=3, dino=True)


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    built: Any = Decoder(SETTINGS, num_classes=2, score=0.01)
    for branch in built.boxes:
        torch.nn.init.normal_(branch[-1].weight, std=0.2)
    return built


def decode(decoder):
    torch.manual_seed(1)
    geometry = Geometry.of([torch.zeros(1, 32, 4, 8)], (32, 64), [(32, 48)])
    queries = Queries(torch.randn(1, 5, 32), None, torch.rand(1, 5, 4) * 0.8 + 0.1)
    return decoder(queries, torch.randn(1, 32, 32), geometry), queries


def test_positions_follow_the_boxes_and_predictions_use_the_normed_state(decoder):
    changes, positions, states = [], [], []
    for branch in decoder.boxes:
        branch.register_forward_hook(lambda _, inputs, change: changes.append((inputs[0], change)))
    decoder.positions.register_forward_hook(lambda _, __, position: positions.append(position))
    for layer in decoder.layers:
        layer.register_forward_hook(lambda _, __, state: states.append(state))
    layers, queries = decode(decoder)
    ratios = torch.tensor([48 / 64, 1.0, 48 / 64, 1.0])  # the image covers three quarters of the map's width
    reference = queries.boxes
    for number, layer in enumerate(layers):
        encoding = sine_encoding((reference * ratios)[..., [1, 0, 2, 3]], 16)
        expected = torch.nn.Sequential(*decoder.positions)(encoding)
        torch.testing.assert_close(positions[number], expected)
        normed, change = changes[2 * number]
        torch.testing.assert_close(normed, decoder.norm(states[number]))
        torch.testing.assert_close(layer.logits, decoder.classes[number](normed))
        torch.testing.assert_close(layer.boxes, (inverse_sigmoid(reference, edge=1e-3) + change).sigmoid())
        if number < 2:
            raw, change = changes[2 * number + 1]
            torch.testing.assert_close(raw, states[number])
            reference = (inverse_sigmoid(reference, edge=1e-3) + change).sigmoid()


@pytest.mark.parametrize("layer_index", range(3))
def test_the_box_of_a_layer_also_trains_the_refinement_of_the_previous_one(decoder, layer_index):
    """DINO's "look forward twice", along the path of the boxes; the hooks cut every other path between the layers."""
    changes = []

    def cut(module, inputs, change):
        changes.append(change.detach().requires_grad_())
        return changes[-1]

    for branch in decoder.boxes:
        branch.register_forward_hook(cut)
    layers, _ = decode(decoder)
    layers[layer_index].boxes.sum().backward()
    trained = {number for number, change in enumerate(changes) if change.grad is not None}
    # Even numbers predict, odd ones refine the box that is passed on; the last layer passes none on.
    assert len(changes) == 5
    assert trained == {2 * layer_index} | ({2 * layer_index - 1} if layer_index else set())


def test_proposals_are_selected_by_their_highest_class():
    logits = torch.tensor([[[0.1, 3.0], [2.0, 0.0], [0.0, 0.0], [9.0, -9.0]]])
    boxes = torch.arange(16.0).reshape(1, 4, 4)
    proposals = Proposals(logits, boxes, torch.tensor([[True, True, True, False]]), by_class=True)
    assert proposals.top(3).tolist() == [[3, 0, 1]]  # as published, invalid tokens take part
    chosen = proposals.at(proposals.top(2))
    torch.testing.assert_close(chosen.logits, logits[:, [3, 0]])
    torch.testing.assert_close(chosen.boxes, boxes[:, [3, 0]])


def test_invalid_tokens_propose_the_last_corner():
    geometry = Geometry.of([torch.zeros(1, 32, 2, 100)], (16, 800), [(16, 800)])
    torch.manual_seed(0)
    proposals = Proposer(32, score=0.01, logits=3, dino=True)(torch.randn(1, 200, 32), geometry)
    assert (~proposals.valid).sum() == 4
    assert (proposals.boxes[~proposals.valid] == 1).all()
    assert (proposals.boxes[proposals.valid] < 1).all()


@pytest.mark.parametrize(("levels", "strides"), [(4, (8, 16, 32, 64)), (5, (4, 8, 16, 32, 64))])
def test_levels(levels, strides):
    model = small_detector("co_dino", levels=levels)
    assert model.neck.strides == strides
    maps = [
        torch.zeros(1, count, 128 // stride, 128 // stride)
        for count, stride in zip(model.backbone.channels, (4, 8, 16, 32), strict=True)
    ]
    assert [each.shape[-1] for each in model.neck(maps)] == [128 // stride for stride in strides]
    assert len(model.auxiliary["atss"].head.scales) == levels + 1
    assert len(model.auxiliary["faster_rcnn"].roi.pool.scales) == levels
    losses = model(*scene((1, 0)))
    assert all(term.isfinite() for term in losses.values())


@pytest.fixture(scope="module")
def step():
    """Run one training step with the published loss."""
    model = small_detector("co_dino", loss="qfl")
    images, targets = scene()
    with recorded_calls(model) as calls:
        losses = model(images, targets)
    return model, calls, losses


def test_the_published_weights_of_the_queries(step):
    """1 for quality focal loss, 5 for L1, 2 for GIoU; every box has the same weight."""
    _, calls, _ = step
    inputs = query_inputs(calls)
    assert len(inputs) == 1 + 2 + 2 + 2 * 2  # proposals, layers, denoising, two auxiliary heads
    for assigned, terms in inputs:
        count = assigned.positives.sum()
        targets = assigned.targets(paired_iou(assigned.boxes, assigned.objects).clamp(min=1e-6))
        quality = quality_focal_loss(assigned.logits, targets, beta=2.0, reduction="sum")
        torch.testing.assert_close(terms["cls"], quality / count)
        errors = generalized_box_iou_loss(assigned.boxes, assigned.objects, reduction="sum")
        torch.testing.assert_close(terms["box"], 2 * errors / count)
        distance = (assigned.box_deltas - assigned.target_deltas).abs().sum()
        torch.testing.assert_close(terms["l1"], 5 * distance / count)


def test_the_selected_proposals_are_matched_with_all_classes(step):
    model, calls, _ = step
    assigned, _ = query_inputs(calls)[0]
    assert assigned.logits.shape == (2 * model.selected.count, CLASSES)
    assert assigned.positives.sum() == 5
    assert assigned.labels[assigned.rows].tolist() != [0] * 5


def test_every_positive_copy_is_a_positive_of_its_object(step):
    _, calls, _ = step
    for assigned, _ in query_inputs(calls)[3:5]:
        groups = 100 // 3
        assert len(assigned.labels) == 2 * (2 * 3 * groups)
        assert assigned.positives.sum() == 5 * groups
        assert (assigned.labels[~assigned.positives] == NEGATIVE).all()


def test_a_score_based_loss_leaves_the_auxiliary_heads_their_own(step):
    model, _, losses = step
    rcnn, atss = model.auxiliary["faster_rcnn"], model.auxiliary["atss"]
    assert rcnn.roi.criterion.softmax
    assert rcnn.roi.classes.out_features == CLASSES + 1
    assert (atss.criterion.settings.name, model.criterion.settings.name) == ("focal", "qfl")
    assert "atss_quality" in losses
    ranked = small_detector("co_dino", loss="rs")
    assert ranked.auxiliary["faster_rcnn"].roi.classes.out_features == CLASSES
    assert ranked.auxiliary["atss"].head.quality is None


@pytest.mark.parametrize("loss", ["qfl", "rs", "mal"])
def test_denoising_does_not_change_the_losses_of_the_other_queries(loss):
    model = small_detector("co_dino", loss=loss, auxiliary=())
    images, targets = scene()
    with_copies = model(images, targets)
    model.denoising = None
    without = model(images, targets)
    assert {name for name in with_copies if name not in without} == {
        name for name in with_copies if name.startswith("denoising")
    }
    for name, term in without.items():
        torch.testing.assert_close(with_copies[name], term, rtol=1e-4, atol=1e-5)


def test_no_denoising():
    model = small_detector("co_dino", denoising=0)
    assert model.denoising is None
    assert not any(name.startswith("denoising") for name in model(*scene()))


def test_frozen_batch_norms_are_not_trained_at_all():
    model = small_detector("co_dino", batch_norm="frozen")
    norms = [name for name, module in model.backbone.named_modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert norms
    assert not any(model.backbone.get_parameter(f"{name}.weight").requires_grad for name in norms)


class TestSoftNMS:
    """Linear soft-NMS within each class."""

    detections = {  # noqa: RUF012 (a constant)
        "boxes": torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 10, 9], [20, 0, 30, 10], [0, 0, 10, 5]]),
        "scores": torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5]),
        "labels": torch.tensor([1, 1, 2, 1, 1]),
    }

    def test_by_hand(self):
        """The second box overlaps the first by 0.9; the third has another class, and the last overlaps by 0.5."""
        softened = soften(self.detections, iou=0.8)
        torch.testing.assert_close(softened["scores"], torch.tensor([0.9, 0.7, 0.6, 0.5, 0.8 * 0.1]))
        assert softened["labels"].tolist() == [1, 2, 1, 1, 1]
        torch.testing.assert_close(softened["boxes"], self.detections["boxes"][[0, 2, 3, 4, 1]])

    def test_a_softened_box_no_longer_suppresses_first(self):
        """Of three like boxes the second falls behind the third, so that it is lowered twice."""
        boxes = torch.tensor([[0.0, 0, 100, 100], [0, 0, 100, 99], [0, 0, 100, 90]])
        softened = soften({"boxes": boxes, "scores": torch.tensor([0.9, 0.8, 0.7]), "labels": torch.zeros(3)}, iou=0.8)
        assert softened["boxes"][:, 3].tolist() == [100, 90]  # 0.8 * 0.01 * (1 - 90 / 99) < 0.001
        torch.testing.assert_close(softened["scores"], torch.tensor([0.9, 0.7 * 0.1]))

    def test_low_scores_and_empty_images(self):
        low = self.detections | {"scores": torch.tensor([0.9, 0.002, 0.7, 0.6, 0.0005])}
        assert len(soften(low, iou=0.8)["scores"]) == 3  # 0.002 * 0.1 and 0.0005 are below 0.001
        empty = {name: values[:0] for name, values in self.detections.items()}
        assert soften(empty, iou=0.8)["boxes"].shape == (0, 4)

    def test_a_detector_without_it(self):
        torch.manual_seed(0)
        model = small_detector("co_dino", soft_nms=None).eval()
        images, _ = scene()
        with torch.no_grad():
            plain = model(images)
            model.soft_nms = 0.0  # any overlap
            softened = model(images)
        assert any((one["scores"] != other["scores"]).any() for one, other in zip(plain, softened, strict=True))


def test_settings_out_of_range():
    wrong: list[dict[str, Any]] = [{"levels": 3}, {"soft_nms": 1.5}, {"label_noise": -0.1}, {"box_noise": -1.0}]
    for settings in wrong:
        with pytest.raises(ValueError, match=f"detector.{next(iter(settings))}: expected"):
            small_detector("co_dino", **settings)
