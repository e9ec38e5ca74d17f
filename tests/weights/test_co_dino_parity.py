"""Converted Co-DINO against outputs of the published code: features, proposals, every layer, detections and soft-NMS.

The order of the proposals matters, and two of their scores may differ by less than the rounding of float32. The decoder
therefore gets the reference's tokens, which must be our own selection up to such swaps.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketrank.detectors.co_detr.dino import soften
from bucketrank.weights.published import convert_published

from .published_cases import Case

FEATURES = 1e-5  # largest deviation of backbone and neck
LOGITS, BOXES = 1e-3, 1e-4  # largest difference of logits and of boxes in units of the image
PIXELS, SCORES = 1e-3, 1e-4
ROUNDING = 2e-4  # of the proposals' scores, in float32


def convert(case: Case, folder: Any) -> Any:
    """Convert the checkpoint of a case and return the model."""
    converted = convert_published(case.checkpoint(folder))
    assert str(converted) == "co_dino with resnet50, trained with qfl; 674 of 674 keys, 80 classes"
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    keys = json.loads(str(case.arrays["state_dict"]))
    parameters = sum(math.prod(shape) for key, shape in keys if not key.endswith(buffers))
    assert sum(parameter.numel() for parameter in converted.model.parameters()) == parameters
    return converted.model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Both cases have the same weights."""
    return convert(Case.read("co_dino_5scale_r50"), tmp_path_factory.mktemp("co_dino"))


@torch.no_grad()
def compare(case: Case, model: Any) -> None:
    """Compare everything from the backbone to the detections."""
    images = case.images()
    features = model.backbone(images.tensors)
    for stage, feature in enumerate(features, start=2):
        assert case.deviates(f"backbone_c{stage}", feature) <= FEATURES
    features = model.neck(features)
    for level, feature in enumerate(features):
        assert case.deviates(f"neck_{level}", feature) <= FEATURES
    geometry, memory = model.encode(images, features)
    assert geometry.shapes == [tuple(shape) for shape in case["level_shapes"].tolist()]
    if "padding_mask" in case:
        assert torch.equal(~geometry.valid[0], case["padding_mask"].bool())
    tokens, channels = case["memory_tokens"].long(), case["memory_channels"].long()
    assert case.differs("memory", memory[0, tokens][:, channels]) <= LOGITS
    assert case.differs("memory_mean_square", memory[0, tokens].square().mean(1)) <= LOGITS
    assert case.deviates("encoder_map_5", model.fifth(geometry.maps(memory)[-1])) <= LOGITS

    proposals = model.proposer(memory, geometry)
    scores = proposals.logits[0].amax(-1)
    assert case.differs("proposal_scores", scores) <= LOGITS
    assert torch.equal(proposals.valid[0], case["proposal_valid"].bool())
    own, selected = proposals.top(model.selected.count)[0], case["selected_tokens"].long()
    assert set(own.tolist()) == set(selected.tolist())
    torch.testing.assert_close(scores[own], scores[selected], rtol=0, atol=ROUNDING)
    boxes = proposals.at(selected[None]).boxes
    assert case.differs("selected_boxes", boxes[0]) <= BOXES

    positions: list[Tensor] = []
    hook = model.decoder.positions.register_forward_hook(lambda _, __, output: positions.append(output[0]))
    layers = model.decoder(model.selected(boxes), memory, geometry)
    hook.remove()
    queries = case["queries"].long()
    assert case.differs("query_pos", torch.stack([each[queries][:, channels] for each in positions])) <= LOGITS
    assert case.differs("layer_logits", torch.stack([layer.logits[0, queries] for layer in layers])) <= LOGITS
    assert case.differs("layer_boxes", torch.stack([layer.boxes[0, queries] for layer in layers])) <= BOXES
    for start, iou in (("before", None), ("after", 0.8)):
        if f"{start}_nms_boxes" in case:
            model.soft_nms = iou
            (detections,) = model.top_detections(layers[-1], images.image_sizes)
            first = {name: values[:30] for name, values in detections.items()}
            assert first["labels"].tolist() == case[f"{start}_nms_labels"].tolist()
            assert case.differs(f"{start}_nms_boxes", first["boxes"]) <= PIXELS
            assert case.differs(f"{start}_nms_scores", first["scores"]) <= SCORES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["co_dino_5scale_r50", "co_dino_5scale_r50_padded"])
def test_co_dino(name, model):
    compare(Case.read(name), model)


def test_soft_nms():
    """The reference moves the boxes of each class apart before it compares them, which rounds their coordinates."""
    case = Case.read("co_dino_5scale_r50")
    boxes, scores, labels = (case[f"candidate_{name}"] for name in ("boxes", "scores", "labels"))
    order = case["after_nms_order"].long()
    softened = soften({"boxes": boxes, "scores": scores, "labels": labels}, iou=0.8)
    torch.testing.assert_close(softened["boxes"], boxes[order], rtol=0, atol=0)
    assert softened["labels"].tolist() == labels[order].tolist()
    torch.testing.assert_close(softened["scores"], case["after_nms_all_scores"], rtol=0, atol=1e-3)
    apart = boxes + labels[:, None] * (boxes.max() + 1)
    softened = soften({"boxes": apart, "scores": scores, "labels": labels}, iou=0.8)
    torch.testing.assert_close(softened["scores"], case["after_nms_all_scores"], rtol=0, atol=1e-6)
    assert (softened["scores"] < scores[order] - 0.1).sum() == 4
