"""Converted checkpoints against outputs of the published code: features, heads, detections and losses agree.

One test per model, because the weights are generated and converted once.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList

from bucketrank.detectors.assignment import IGNORED
from bucketrank.detectors.criterion.base import Assigned
from bucketrank.weights.published import convert_published

from .published_cases import Case, use_bucketed_losses

FEATURES = 1e-5  # largest deviation of features and logits
PIXELS, SCORES = 1e-3, 1e-4
LOSSES = 1e-4  # relative

pytestmark = pytest.mark.slow


def converted(case: Case, folder: Any, **arguments: Any) -> Any:
    """Convert the checkpoint of a case and return the model."""
    result = convert_published(case.checkpoint(folder), **arguments)
    case_parameters = case.settings["parameters"]
    ours = sum(parameter.numel() for parameter in result.model.parameters())
    assert ours == case_parameters
    use_bucketed_losses(result.model)
    for parameter in result.model.parameters():
        parameter.requires_grad = False
    return result.model


def run(case: Case, model: Any) -> tuple[ImageList, list[Tensor], list[dict[str, Tensor]]]:
    """Compare backbone and pyramid, and return the images, the features and the detections."""
    images = case.images()
    maps = model.backbone(images.tensors)
    for stage, feature in enumerate(maps, start=2):
        if f"backbone_c{stage}" in case:
            assert case.deviates(f"backbone_c{stage}", feature) <= FEATURES
    features = model.neck(maps)
    for level, feature in enumerate(features, start=3 if "pyramid_p7" in case else 2):
        if f"pyramid_p{level}" in case:
            assert case.deviates(f"pyramid_p{level}", feature) <= FEATURES
    return images, features, model.detect(images, features)


def compare_detections(case: Case, detections: list[dict[str, Tensor]], suffix: str = "") -> None:
    for number, own in enumerate(detections):
        start = f"image{number}_detections{suffix}"
        count = len(case[f"{start}_labels"])
        assert own["labels"][:count].tolist() == case[f"{start}_labels"].tolist()
        assert case.differs(f"{start}_boxes", own["boxes"][:count]) <= PIXELS
        assert case.differs(f"{start}_scores", own["scores"][:count]) <= SCORES


def compare_losses(expected: dict[str, float], actual: dict[str, Tensor], names: dict[str, str]) -> None:
    assert set(names.values()) <= set(expected)
    for ours, theirs in names.items():
        assert float(actual[ours]) == pytest.approx(expected[theirs], rel=LOSSES), ours


@torch.no_grad()
@pytest.mark.parametrize("name", ["atss_brs", "atss_brs_padded", "atss_focal", "paa_brs", "retinanet_focal"])
def test_dense_detectors(name, tmp_path):
    case = Case.read(name)
    model = converted(case, tmp_path)
    images, features, detections = run(case, model)
    compare_detections(case, detections)

    output, anchors = model.head(features), model.anchors(features)
    first = 0
    for level, (count, own) in enumerate(zip(output.per_level, anchors, strict=True), start=3):
        rows = slice(first, first + count)
        assert case.deviates(f"logits_p{level}", output.logits[:, rows]) <= FEATURES
        assert case.deviates(f"deltas_p{level}", output.box_deltas[:, rows]) <= FEATURES
        assert case.differs(f"anchors_p{level}", own) <= PIXELS
        if output.quality is not None:
            assert case.deviates(f"quality_p{level}", output.quality[:, rows]) <= FEATURES
        first += count
    if "image0_detections_all_pairs_boxes" in case:
        model.candidates, model.score_threshold = 10**6, 0.3
        compare_detections(case, model.detect(images, features), "_all_pairs")

    ground_truths = case.ground_truths()
    every = torch.cat(anchors)
    valid = model.anchors.valid(every, images.image_sizes)
    for number, match in enumerate(model.assign(output, every, valid, ground_truths)):
        positive = torch.where(match >= 0)[0]
        assert positive.tolist() == case[f"image{number}_positive_anchors"].tolist()
        labels = ground_truths[number]["labels"][match[positive]]
        assert labels.tolist() == case[f"image{number}_positive_labels"].tolist()
        assert int((match == IGNORED).sum()) == int(case[f"image{number}_ignored_anchors"])
    names = {"rank": "loss_rank", "sort": "loss_sort", "box": "loss_bbox"}
    if "focal" in name:
        names = {"cls": "loss_cls", "box": "loss_bbox", "quality": "loss_centerness"}
    expected = case.losses()
    names = {ours: theirs for ours, theirs in names.items() if theirs in expected}
    compare_losses(expected, model.losses(images, features, ground_truths), names)


def train_on_all(model: Any) -> None:
    """Let the samplers of cross-entropy draw every candidate, as in the reference; otherwise the loss is random."""
    model.rpn.sampler = Everything()
    model.box_head.sampler = Everything()


class Everything:
    """A sampler that leaves nothing out."""

    def rows(self, match: Tensor) -> Tensor:
        return torch.where(match != IGNORED)[0]

    def subsample(self, match: Tensor) -> Tensor:
        return match


def compare_rpn(case: Case, model: Any, images: ImageList, features: list[Tensor]) -> None:
    logits, deltas = model.rpn.head(features)
    for level, (own, codes) in enumerate(zip(logits, deltas, strict=True), start=2):
        count = own.shape[1]
        by_anchor = codes.unflatten(1, (count, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3)
        assert case.deviates(f"rpn_logits_p{level}", own.permute(0, 2, 3, 1).flatten(1)) <= FEATURES
        assert case.deviates(f"rpn_deltas_p{level}", by_anchor) <= FEATURES
    (proposals,), _ = model.rpn(images, features)
    assert len(proposals) == int(case["num_proposals"])
    assert case.differs("proposals", proposals[:100]) <= PIXELS


def compare_head(case: Case, head: Any, start: str, features: list[Tensor], images: ImageList) -> None:
    boxes = [case[f"{start}_boxes"]]
    pooled = head.pool(features, boxes, images.image_sizes)
    assert case.deviates(f"{start}_roi_features", pooled) <= FEATURES
    logits, deltas = head.predict(pooled)
    assert case.deviates(f"{start}_logits", logits) <= FEATURES
    assert case.deviates(f"{start}_deltas", deltas) <= FEATURES


@torch.no_grad()
@pytest.mark.parametrize("name", ["faster_rcnn_brs", "faster_rcnn_ce", "mask_rcnn_brs", "cascade_rcnn_brs"])
def test_rcnns(name, tmp_path):
    case = Case.read(name)
    model = converted(case, tmp_path)
    images, features, detections = run(case, model)
    compare_detections(case, detections)
    if "image0_mask_probabilities" in case:
        masks = case["image0_mask_probabilities"]
        assert case.deviates("image0_mask_probabilities", detections[0]["masks"][: len(masks), 0]) <= FEATURES
    compare_rpn(case, model, images, features)
    cascade = name.startswith("cascade")
    heads = [(f"stage{i}", head) for i, head in enumerate(model.stages)] if cascade else [("box_head", model.box_head)]
    for start, head in heads:
        compare_head(case, head, start, features, images)

    ground_truths = case.ground_truths()
    if name.endswith("_ce"):
        train_on_all(model)
    _, terms = model.rpn(images, features, ground_truths)
    # The losses of the box heads belong to the proposals of the reference.
    model.rpn.forward = lambda *_: ([case["train_proposals"]], terms)
    losses = model.losses(images, features, ground_truths)
    if name.endswith("_ce"):
        names = {"rpn_cls": "loss_rpn_cls", "rpn_box": "loss_rpn_bbox", "roi_cls": "loss_cls", "roi_box": "loss_bbox"}
    else:
        names = {f"rpn_{ours}": f"loss_rpn_{theirs}" for ours, theirs in RANKED.items()}
        prefixes = {f"stage{i + 1}": f"s{i}." for i in range(3)} if cascade else {"roi": ""}
        for head, prefix in prefixes.items():
            names |= {f"{head}_{ours}": f"{prefix}loss_roi_{theirs}" for ours, theirs in RANKED.items()}
        names |= {"mask": "loss_mask"} if "mask" in losses else {}
    compare_losses(case.losses(), losses, names)


RANKED = {"rank": "rank", "sort": "sort", "box": "bbox"}
LOGITS, BOXES = 1e-3, 1e-4  # of Co-DETR, whose transformer adds up rounding differences


@torch.no_grad()
def test_co_deformable_detr(tmp_path):
    case = Case.read("co_deformable_detr_brs")
    model = converted(case, tmp_path)
    images, features, detections = run(case, model)
    compare_detections(case, detections)
    for level, feature in enumerate(features):
        assert case.deviates(f"neck_{level}", feature) <= FEATURES
    geometry, memory = model.encode(images, features)
    assert case.deviates("encoder_memory", memory) <= LOGITS
    maps = geometry.maps(memory)
    maps.append(model.fifth(maps[-1]))
    for level, feature in enumerate(maps):
        assert case.deviates(f"encoder_map_{level}", feature) <= LOGITS
    proposals = model.proposer(memory, geometry)
    assert case.deviates("proposal_logits", proposals.logits[..., 0]) <= LOGITS
    assert case.differs("proposal_boxes", proposals.boxes) <= BOXES
    boxes = proposals.best(model.selected.count)
    assert case.differs("selected_boxes", boxes[0]) <= BOXES
    layers = model.decoder(model.selected(boxes), memory, geometry)
    queries = case["queries"].long()
    for number, layer in enumerate(layers):
        torch.testing.assert_close(layer.logits[0, queries], case["layer_logits"][number], rtol=0, atol=LOGITS)
        torch.testing.assert_close(layer.boxes[0, queries], case["layer_boxes"][number], rtol=0, atol=BOXES)
    atss = model.auxiliary["atss"].head(maps)
    assert case.deviates("auxiliary_atss_logits", atss.logits) <= LOGITS
    assert case.deviates("auxiliary_atss_deltas", atss.box_deltas) <= LOGITS
    objectness, deltas = model.auxiliary["faster_rcnn"].rpn.head(maps)
    objectness = torch.cat([own.permute(0, 2, 3, 1).flatten(1) for own in objectness], 1)
    deltas = torch.cat([own.unflatten(1, (9, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3) for own in deltas], 1)
    assert case.deviates("auxiliary_rpn_logits", objectness) <= LOGITS
    assert case.deviates("auxiliary_rpn_deltas", deltas) <= LOGITS

    from bucketrank.detectors.co_detr.model import QueryLayer

    names = json.loads(str(case.arrays["loss_names"]))
    # In the first list of objects some matched queries do not overlap their object, so their target is 0 as published.
    for start, objects in (("", "image0"), ("large_", "large")):
        ground_truths = case.ground_truths(objects)
        assigned = model.match_queries([QueryLayer(layer, ground_truths) for layer in layers], images.image_sizes)
        for number, own in enumerate(assigned):
            assert_matched(case, f"{start}layer{number}_matched", own)
        expected = case[f"{start}layer_losses"]
        for terms, values in zip(model.criterion(assigned), expected, strict=True):
            by_name = dict(zip(names, values.tolist(), strict=True))
            translation = {"rank": "loss_rank", "sort": "loss_sort", "l1": "loss_bbox", "box": "loss_iou"}
            compare_losses(by_name, terms, translation)


def assert_matched(case: Case, start: str, assigned: Assigned) -> None:
    queries = case[f"{start}_queries"].tolist()
    order = sorted(range(len(queries)), key=queries.__getitem__)
    assert assigned.rows.tolist() == sorted(queries)
    assert assigned.labels[assigned.rows].tolist() == case[f"{start}_labels"][order].tolist()
    torch.testing.assert_close(assigned.ious, case[f"{start}_iou"][order], rtol=0, atol=1e-4)
