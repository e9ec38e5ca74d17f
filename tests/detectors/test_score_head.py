"""The description of each detector's score head: a map folded into it is the map of its scores."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bucketrank.errors import CannotCalibrateError
from bucketrank.evaluation.calibration import ScoreMap, calibrate, fold
from bucketrank.evaluation.calibration.mapping import fold_softmax
from bucketrank.settings import detectors
from tests.detectors.small_detectors import scene, small_detector

SIGMOID = ["atss", "cascade_rcnn", "co_detr", "co_dino", "faster_rcnn", "mask_rcnn", "paa", "retinanet"]
RCNNS = ["cascade_rcnn", "faster_rcnn", "mask_rcnn"]


def spread(name: str, loss: str = "rs", **settings: Any) -> Any:
    """A detector with random weights and logits around -2, by 3 to 5 at most."""
    model = small_detector(name, loss=loss, **settings).eval()
    outputs: dict[torch.nn.Module, list[torch.Tensor]] = defaultdict(list)  # of a convolution, one per level
    layers = model.score_head().layers
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d) and module.weight.std() < 0.05:
            torch.nn.init.kaiming_normal_(module.weight)  # so that features differ between locations
    for layer in layers:
        torch.nn.init.normal_(layer.weight)
        layer.register_forward_hook(lambda module, inputs, output: outputs[module].append(output))
    images, _ = scene()
    for layer in layers:  # the proposals of a later stage depend on no earlier logits
        outputs.clear()
        detected(model, images)
        axis = 1 if isinstance(layer, torch.nn.Conv2d) else -1
        by_column = torch.cat([each.movedim(axis, 0).flatten(1) for each in outputs[layer]], 1)
        mean = by_column.mean(1)
        deviation = (by_column - mean[:, None]).abs().amax(1) / torch.empty(len(mean)).uniform_(3, 5)
        with torch.no_grad():
            layer.bias.copy_(-2 - (mean - layer.bias) / deviation)
            layer.weight /= deviation.reshape(-1, *[1] * (layer.weight.dim() - 1))
    return model


@torch.no_grad()
def detected(model: Any, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    detections: list[dict[str, torch.Tensor]] = model(images)
    return detections


def test_every_detector_is_tested() -> None:
    assert {*SIGMOID} == {*detectors()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SIGMOID)
def test_a_folded_map_keeps_boxes_and_order(name: str) -> None:
    own: dict[str, dict[str, Any]] = {"paa": {"vote": False}, "co_dino": {"soft_nms": None}}
    model = spread(name, **own.get(name, {}))
    images, _ = scene()
    before = detected(model, images)
    score_map = ScoreMap((1.7,), (2.0,))
    fold(model.score_head(), score_map)
    for one, other in zip(before, detected(model, images), strict=True):
        assert len(one["scores"]) > 10
        expected = score_map(one["scores"].double().numpy(), one["labels"].numpy() - 1)
        assert_close(other["scores"].double(), torch.from_numpy(expected), atol=1e-5, rtol=0.0)
        assert torch.equal(other["labels"], one["labels"])
        assert_close(other["boxes"], one["boxes"], atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("name", ["retinanet", "co_detr", "faster_rcnn"])
def test_a_map_per_class_reaches_the_right_columns(name: str) -> None:
    model = spread(name)
    images, _ = scene()
    score_map = ScoreMap((1.0, 1.2, 1.4), (0.3, 0.0, -0.3))
    scores = [
        {(*box, label): score for box, label, score in zip(*(each[n].tolist() for n in names), strict=True)}
        for names in [("boxes", "labels", "scores")]
        for each in detected(model, images)
    ]
    fold(model.score_head(), score_map)
    compared = 0
    for known, each in zip(scores, detected(model, images), strict=True):
        for box, label, score in zip(*(each[n].tolist() for n in ("boxes", "labels", "scores")), strict=True):
            if (*box, label) in known:
                before = np.array([known[(*box, label)]])
                assert score == pytest.approx(score_map(before, np.array([label - 1]))[0], abs=1e-5)
                compared += 1
    assert compared > 20


def test_score_voting_weighs_boxes_by_scores_so_that_paa_moves_them() -> None:
    model = spread("paa")
    images, _ = scene()
    before = detected(model, images)
    fold(model.score_head(), ScoreMap((1.7,), (2.0,)))
    after = detected(model, images)
    assert torch.equal(before[0]["labels"], after[0]["labels"])
    assert not torch.equal(before[0]["boxes"], after[0]["boxes"])


@pytest.mark.parametrize("name", ["retinanet", "faster_rcnn"])
def test_the_score_threshold_is_mapped(name: str) -> None:
    model = spread(name, score_threshold=0.2)
    images, _ = scene()
    counts = [len(each["scores"]) for each in detected(model, images)]
    assert sum(counts) > 5
    fold(model.score_head(), ScoreMap((1.7,), (2.0,)))
    assert model.score_threshold > 0.3
    assert [len(each["scores"]) for each in detected(model, images)] == counts


@pytest.mark.parametrize("name", ["atss", "paa"])
def test_products_with_a_quality_say_so(name: str) -> None:
    images, targets = scene()
    with pytest.raises(CannotCalibrateError, match="class score times a predicted quality"):
        calibrate(small_detector(name, loss="focal"), list(zip(images, targets, strict=True)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RCNNS)
def test_cross_entropy_heads_are_a_softmax_with_the_background_last(name: str) -> None:
    model = spread(name, loss="ce")
    head = model.score_head()
    assert (head.link, head.columns, head.background) == ("softmax", 4, 3)
    images, _ = scene()
    before = torch.cat([each["scores"] for each in detected(model, images)])
    fold_softmax(head, 1.0, 3.0)  # a lower background raises every score
    after = torch.cat([each["scores"] for each in detected(model, images)])
    assert float(after.mean()) > float(before.mean()) + 0.05


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RCNNS)
def test_the_logits_behind_softmax_detections_are_found(name: str) -> None:
    from bucketrank.evaluation.calibration.fitting import Samples, collect

    model = spread(name, loss="ce")
    head = model.score_head()
    images, targets = scene()
    samples = Samples(list(zip(images, targets, strict=True)), lambda image: model([image])[0])
    outcomes = collect(head, samples)
    assert outcomes.logits is not None
    matched = outcomes.matched
    scores = torch.from_numpy(outcomes.logits[matched.numbers]).softmax(1).numpy()
    own = scores[np.arange(len(matched.labels)), matched.labels - 1]
    assert len(own) > 20
    np.testing.assert_allclose(own, matched.scores, atol=1e-5)


def test_a_detector_of_others_says_what_to_override() -> None:
    from bucketrank.detectors import Detector

    class Other(Detector):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.layer = torch.nn.Linear(1, 1)

    with pytest.raises(CannotCalibrateError, match=r"Other does not say .* override score_head\(\)"):
        calibrate(Other(), [])
