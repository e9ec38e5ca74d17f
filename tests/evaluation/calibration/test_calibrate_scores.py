"""Calibration of anybody's detections: formats, the map, its file, and what cannot be calibrated."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bucketrank
from bucketrank.errors import CannotCalibrateError, DataError
from bucketrank.evaluation.calibration import Calibration, calibrate_scores

COUNT = 400


def example(seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return detections of two classes in one image, which are right with sigmoid(2 logit + 1), and the objects."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.arange(COUNT)[:, None] * 20.0
    boxes = corners + torch.tensor([0.0, 0, 10, 10])
    logits = torch.randn(COUNT, generator=generator) - 1
    labels = torch.arange(COUNT) % 2 + 3
    right = torch.rand(COUNT, generator=generator) < (2 * logits + 1).sigmoid()
    detections = {"boxes": boxes, "labels": labels, "scores": logits.sigmoid()}
    return detections, {"boxes": boxes[right], "labels": labels[right]}


def many() -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    found, objects = zip(*(example(seed) for seed in range(4)), strict=True)
    return list(found), list(objects)


def test_the_map_is_recovered() -> None:
    calibration = bucketrank.calibrate_scores(*many())
    (a,), (b,) = calibration.a, calibration.b
    assert a == pytest.approx(2, abs=0.25)
    assert b == pytest.approx(1, abs=0.25)
    assert calibration.d_ece[1] < 0.03 < calibration.d_ece[0]
    scores = torch.tensor([0.2, 0.5, 0.9])
    expected = (a * scores.logit() + b).sigmoid()
    torch.testing.assert_close(calibration(scores), expected)
    torch.testing.assert_close(torch.as_tensor(calibration(scores.numpy())).float(), expected)
    torch.testing.assert_close(torch.as_tensor(calibration([0.2, 0.5, 0.9])).float(), expected)
    assert calibration(0.5) == pytest.approx(expected[1].item())
    assert calibration(torch.zeros(0)).shape == (0,)


def test_each_class_may_have_its_own_pair() -> None:
    calibration = calibrate_scores(*many(), per_class=True)
    assert len(calibration.a) == 5, "labels are 3 and 4; the others have the pair of all classes"
    assert calibration.a[0] == calibration.a[2] != calibration.a[3]
    logit = torch.tensor(0.3).logit().item()
    own = torch.tensor([calibration.a[label] * logit + calibration.b[label] for label in (3, 4)]).sigmoid()
    torch.testing.assert_close(calibration(torch.tensor([0.3, 0.3]), torch.tensor([3, 4])), own)
    with pytest.raises(ValueError, match="expected labels for its 5 pairs"):
        calibration([0.3])
    with pytest.raises(ValueError, match="expected labels from 0 to 4, got 5 to 5"):
        calibration([0.3], [5])


def test_the_file_holds_the_map_as_text(tmp_path: Path) -> None:
    calibration = calibrate_scores(*many(), per_class=True, target="iou")
    calibration.save(tmp_path / "map.json")
    assert Calibration.load(tmp_path / "map.json") == calibration
    assert json.loads((tmp_path / "map.json").read_text())["a"] == list(calibration.a)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"a": [1]}', b"\x80\x04K\x01."])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_bytes(content)
    with pytest.raises(DataError, match=r"map.json: expected a calibration written by Calibration.save"):
        Calibration.load(tmp_path / "map.json")


def as_supervision(found: dict[str, Tensor]) -> Any:
    scores = found["scores"].numpy() if "scores" in found else None
    return SimpleNamespace(xyxy=found["boxes"].numpy(), class_id=found["labels"].numpy(), confidence=scores)


def as_ultralytics(found: dict[str, Tensor]) -> Any:
    boxes = SimpleNamespace(xyxy=found["boxes"], cls=found["labels"].float(), conf=found.get("scores"))
    return SimpleNamespace(boxes=boxes)


@pytest.mark.parametrize("convert", [as_supervision, as_ultralytics])
def test_outputs_of_other_libraries_mean_the_same(convert: Any) -> None:
    found, objects = many()
    expected = calibrate_scores(found, objects)
    assert calibrate_scores(map(convert, found), map(convert, objects)) == expected
    assert calibrate_scores(map(convert, found), objects) == expected


@pytest.mark.parametrize("count", [0, 3])
def test_no_detections_at_all(count: int) -> None:
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "scores": torch.zeros(0)}
    with pytest.raises(CannotCalibrateError, match=f"expected detections, got none in {count} images"):
        calibrate_scores([empty] * count, [example()[1]] * count)


def test_nothing_to_fit() -> None:
    found, objects = example()
    with pytest.raises(CannotCalibrateError, match=r"at least 10 detections that are right .*, got 0 and 400"):
        calibrate_scores([found], [{name: values[:0] for name, values in objects.items()}])
    with pytest.raises(CannotCalibrateError, match="right more often the higher their score"):
        calibrate_scores([{**found, "scores": 1 - found["scores"]}], [objects])
    with pytest.raises(CannotCalibrateError, match="different scores"):
        calibrate_scores([{**found, "scores": torch.full((COUNT,), 0.5)}], [objects])


def test_mistakes_are_explained() -> None:
    found, objects = example()
    with pytest.raises(
        ValueError, match=r"expected ground truth for each of \d+ images with detections, got \d+; give an entry"
    ):
        calibrate_scores([found, found], [objects])
    with pytest.raises(ValueError, match="give the detections first and the ground truth second"):
        calibrate_scores([objects], [found])
    with pytest.raises(ValueError, match="expected orig_size next to class_labels"):
        calibrate_scores([found], [{"class_labels": objects["labels"], "boxes": objects["boxes"]}])
    with pytest.raises(TypeError, match=r"expected the output of torchvision, .* got ndarray"):
        calibrate_scores([np.zeros(3)], [objects])
