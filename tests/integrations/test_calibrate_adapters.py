"""Calibration of models of torchvision and transformers: the folded layers are those behind the scores."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bucketrank import calibrate_scores
from bucketrank.data import CocoDataset, eval_transform, find_splits, write_shapes
from bucketrank.errors import CannotCalibrateError
from bucketrank.evaluation.calibration import ScoreMap, fold
from bucketrank.evaluation.calibration import fitting as calibrate_model
from bucketrank.integrations import torchvision as tv_adapter
from bucketrank.integrations import transformers as hf_adapter
from tests.evaluation.calibration.labelled_detections import objects_among
from tests.integrations import torchvision_models, transformers_models

A, B = 1.6, 1.5


def tv_model(name: str) -> Any:
    """Return a torchvision model whose scores vary, with all detections shown."""
    model = tv_adapter.use_ranking_loss(torchvision_models.build(name)).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d) and module.weight.std() < 0.02:
            torch.nn.init.kaiming_normal_(module.weight)  # so that features differ between locations
    if name != "fcos":
        for layer in tv_adapter.score_head(model).layers:
            torch.nn.init.normal_(layer.weight, std=0.1)
    return model


def images(count: int = 2) -> list[Tensor]:
    return list(torch.rand(count, 3, 96, 96, generator=torch.Generator().manual_seed(1)))


def labelled(model: Any, *, count: int = 8, first: int = 0) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return images whose objects are detections of the model, the more likely the higher their score."""
    generator = torch.Generator().manual_seed(2)
    items = []
    for image in images(count)[first:]:
        with torch.no_grad():
            (detections,) = model([image])
        logits = detections["scores"].logit(eps=1e-6)
        chance = (3 * (logits - logits.quantile(0.8))).sigmoid()
        kept = torch.rand(len(chance), generator=generator) < chance
        items.append((image, {name: detections[name][kept] for name in ("boxes", "labels")}))
    return items


def test_retinanet_keeps_boxes_and_order() -> None:
    model = tv_model("retinanet")
    model.score_thresh = 0.004
    head = tv_adapter.score_head(model)
    with torch.no_grad():
        before = model(images())
        fold(head, ScoreMap((A,), (B,)))
        after = model(images())
    for one, other in zip(before, after, strict=True):
        assert len(one["scores"]) > 10
        expected = ScoreMap((A,), (B,))(one["scores"].double().numpy(), one["labels"].numpy())
        np.testing.assert_allclose(other["scores"].numpy(), expected, atol=1e-5)
        assert_close(other["boxes"], one["boxes"])
        assert torch.equal(other["labels"], one["labels"])


def test_retinanet_is_calibrated() -> None:
    model = tv_model("retinanet")
    with torch.no_grad():
        model.head.classification_head.cls_logits.bias -= 4
    data = labelled(model)
    calibration = tv_adapter.calibrate(model, data, max_images=7)
    assert calibration.images == 7
    assert calibration.d_ece[1] < 0.5 * calibration.d_ece[0]
    per_class = tv_adapter.calibrate(tv_model("retinanet"), data, per_class=True)
    assert len(per_class.a) == torchvision_models.CLASSES


def test_retinanet_ignores_label_0_in_a_data_set(tmp_path) -> None:
    model = tv_model("retinanet")
    split = find_splits(write_shapes(tmp_path / "shapes", train=2, val=1, size=96)).train
    assert split is not None
    dataset = CocoDataset(split, transform=eval_transform())
    assert len(dataset.class_names) >= torchvision_models.CLASSES - 1
    images = [dataset[number][0] for number in range(len(dataset))]
    with torch.no_grad():
        assert any((model([image])[0]["labels"] == 0).any() for image in images)
    with pytest.raises(CannotCalibrateError, match="right"):  # an untrained model has too few right detections
        tv_adapter.calibrate(model, dataset)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["faster_rcnn", "mask_rcnn", "keypoint_rcnn", "ssd"])
def test_softmax_models_take_a_temperature(name: str) -> None:
    model = tv_model(name)
    data = labelled(model)
    state = deepcopy(model.state_dict())
    with pytest.raises(CannotCalibrateError, match="share a softmax"):
        tv_adapter.calibrate(model, data)
    assert_close(model.state_dict(), state)
    calibration = tv_adapter.calibrate(model, data, method="temperature")
    assert calibration.method == "temperature"
    assert calibration.d_ece[1] < calibration.d_ece[0]
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, state[key])}
    assert changed
    assert all("cls_score" in key or "classification_head" in key for key in changed)


def test_fcos_says_why_not() -> None:
    with pytest.raises(CannotCalibrateError, match="FCOS multiplies the class score by the centerness"):
        tv_adapter.calibrate(tv_model("fcos"), [])


def test_ssdlite_blocks_end_in_their_convolution() -> None:
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    head = tv_adapter.score_head(model)
    assert (head.columns, head.background, len(head.layers)) == (3, 0, 6)
    assert all(isinstance(layer, torch.nn.Conv2d) for layer in head.layers)


def test_other_models_are_refused() -> None:
    with pytest.raises(TypeError, match="expected torchvision's FasterRCNN"):
        tv_adapter.calibrate(torch.nn.Linear(1, 1), [])
    with pytest.raises(TypeError, match=r"calibrate: expected one of DeformableDetr"):
        hf_adapter.calibrate(torch.nn.Linear(1, 1), [])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", list(transformers_models.MODELS))
@torch.no_grad()
def test_the_logits_of_a_transformer_are_folded(name: str) -> None:
    model = transformers_models.make(name).eval()
    pixels, _ = transformers_models.batch()
    head = hf_adapter.score_head(model)
    for layer in (*head.layers, *head.summands):  # so that forgotten biases and summands show
        layer.weight.normal_(std=0.3)
        torch.nn.init.constant_(layer.bias, 0.7)  # type: ignore[arg-type]
    before = model(pixel_values=pixels)
    fold(head, ScoreMap((A,), (B,)))
    after = model(pixel_values=pixels)
    assert float(before.logits.std()) > 0.01
    assert_close(after.logits, before.logits * A + B, atol=1e-4, rtol=1e-4)
    assert_close(after.pred_boxes, before.pred_boxes, atol=1e-4, rtol=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["rt_detr", "d_fine", "two_stage_deformable_detr"])
def test_a_transformer_is_calibrated(name: str) -> None:
    model = transformers_models.make(name).eval()
    for layer in hf_adapter.score_head(model).layers:
        torch.nn.init.normal_(layer.weight, std=0.3)
        torch.nn.init.constant_(layer.bias, -5.0)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(8, 3, 64, 64, generator=generator)
    with torch.no_grad():
        outputs = model(pixel_values=pixels)
    labels = []
    for logits, boxes in zip(outputs.logits, outputs.pred_boxes, strict=True):
        chance = (3 * (logits.flatten() - outputs.logits.quantile(0.7))).sigmoid()
        kept = torch.where(torch.rand(len(chance), generator=generator) < chance)[0]
        labels.append({"class_labels": kept % logits.shape[1], "boxes": boxes[kept // logits.shape[1]]})
    batches = [
        {"pixel_values": pixels[:5], "pixel_mask": torch.ones(5, 64, 64), "labels": labels[:5]},
        {"pixel_values": pixels[5:], "pixel_mask": torch.ones(3, 64, 64), "labels": labels[5:]},
    ]
    calibration = hf_adapter.calibrate(model, iter(batches), max_images=7)
    assert calibration.images == 7
    assert calibration.d_ece[1] < 0.5 * calibration.d_ece[0]


@pytest.mark.parametrize("name", ["retinanet", "faster_rcnn", "fcos"])
def test_the_scores_of_a_torchvision_model_with_its_own_loss_are_calibrated(name: str) -> None:
    model = tv_adapter.undo(tv_model(name))
    parts: list[Any] = [model, getattr(model, "roi_heads", model)]
    for part in parts:
        if hasattr(part, "score_thresh"):
            part.score_thresh = 0.0
    with torch.no_grad():
        detections = [each for image in images(8) for each in model([image])]
    calibration = calibrate_scores(detections, objects_among(detections))
    assert calibration.images == 8
    assert calibration.d_ece[1] < 0.5 * calibration.d_ece[0]


def test_the_scores_of_a_transformer_with_its_own_loss_are_calibrated() -> None:
    from transformers import RTDetrImageProcessor

    model = transformers_models.make("rt_detr").eval()
    for layer in hf_adapter.score_head(model).layers:
        torch.nn.init.normal_(layer.weight, std=0.3)
    with torch.no_grad():
        outputs = model(pixel_values=torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(3)))
    sizes = torch.tensor([[48, 80]] * 8)
    processed = RTDetrImageProcessor().post_process_object_detection(outputs, threshold=0.0, target_sizes=sizes)
    objects = objects_among(processed)
    calibration = calibrate_scores(processed, objects)
    assert calibration.d_ece[1] < 0.5 * calibration.d_ece[0]
    scale = torch.tensor([80, 48, 80, 48])
    targets = []  # as the image processor writes them: relative centres and sizes
    for each in objects:
        corners = each["boxes"] / scale
        boxes = torch.cat([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], 1)
        targets.append({"class_labels": each["labels"], "boxes": boxes, "orig_size": torch.tensor([48, 80])})
    again = calibrate_scores(processed, targets)
    assert again.right == calibration.right
    assert again.a[0] == pytest.approx(calibration.a[0])


def test_a_pair_per_class_is_refused_where_classes_share_a_summand(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers_models.make("d_fine").eval()
    state = deepcopy(model.state_dict())
    pixels, labels = transformers_models.batch()
    monkeypatch.setattr(calibrate_model, "fitted", lambda *_: ScoreMap((A,) * 3, (B,) * 3))
    with pytest.raises(CannotCalibrateError, match="summand that all classes share"):
        hf_adapter.calibrate(model, [{"pixel_values": pixels, "labels": labels}], per_class=True)
    assert_close(model.state_dict(), state)
