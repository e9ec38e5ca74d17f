"""Detections have class names and become those of supervision, and back."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch
from faster_coco_eval.core import mask as rle_codec

from bucketrank.drawing import draw
from bucketrank.errors import MissingPackageError
from bucketrank.evaluation import Evaluator
from bucketrank.inference import Detections

CLASSES = ["cat", "dog", "bird"]


@pytest.fixture
def detections() -> Detections:
    masks = torch.zeros(2, 1, 4, 6)
    masks[0, 0, 1:3, 2:5] = 0.5
    masks[1, 0, :, 0] = 0.49
    values = {
        "boxes": torch.tensor([[2.0, 1, 5, 3], [0, 0, 1, 4]]),
        "scores": torch.tensor([0.75, 0.25]),
        "labels": torch.tensor([3, 1]),
        "masks": masks,
    }
    return Detections(values, CLASSES)


def test_names_follow_the_labels(detections: Detections) -> None:
    assert detections.names == ["bird", "cat"]
    assert repr(detections) == "Detections(2: bird 0.75, cat 0.25)"
    assert copy.copy(detections).names == ["bird", "cat"]
    assert Detections(dict(detections)).names == ["3", "1"]
    many = {"scores": torch.linspace(0.9, 0.1, 9), "labels": torch.ones(9, dtype=torch.long)}
    assert repr(Detections(many, CLASSES)).endswith("cat 0.50, ...)")
    none = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.long)}
    assert repr(Detections(none, CLASSES)) == "Detections(0)"


def test_supervision_and_back(detections: Detections) -> None:
    supervision = pytest.importorskip("supervision")
    converted = detections.to_supervision()
    assert isinstance(converted, supervision.Detections)
    assert converted.data["class_name"].tolist() == ["bird", "cat"]
    assert converted.class_id.tolist() == [2, 0]
    assert converted.xyxy.tolist() == [[2, 1, 5, 3], [0, 0, 1, 4]]
    assert converted.mask.dtype == bool
    assert [int(mask.sum()) for mask in converted.mask] == [6, 0], "0.49 is below the threshold of a mask"
    assert len(converted[converted.confidence > 0.5]) == 1
    back = Detections.from_supervision(converted, classes=CLASSES)
    assert back.names == detections.names
    for name in ("boxes", "scores", "labels"):
        torch.testing.assert_close(back[name], detections[name], rtol=0, atol=0)
    torch.testing.assert_close(back["masks"], (detections["masks"] >= 0.5).float(), rtol=0, atol=0)


def test_a_pixel_at_the_threshold_belongs_to_the_mask_everywhere(detections: Detections) -> None:
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES, 1)]
    evaluator = Evaluator(
        {"images": [{"id": 1, "width": 6, "height": 4}], "annotations": [], "categories": categories}, masks=True
    )
    evaluator.add([1], [detections])
    assert [int(rle_codec.area(record["segmentation"])) for record in evaluator.detections] == [6, 0]
    exact = {**detections, "masks": detections["masks"] == 0.5}  # the mask of the first detection, none of the second
    drawn, expected = (np.asarray(draw(torch.zeros(3, 4, 6), each, classes=CLASSES)) for each in (detections, exact))
    np.testing.assert_array_equal(drawn, expected)


def test_an_image_without_detections(detections: Detections) -> None:
    pytest.importorskip("supervision")
    none = Detections({name: values[:0] for name, values in detections.items()}, CLASSES)
    converted = none.to_supervision()
    assert len(converted) == 0
    back = Detections.from_supervision(converted)
    assert {name: tuple(value.shape) for name, value in back.items()} == {
        "boxes": (0, 4),
        "scores": (0,),
        "labels": (0,),
        "masks": (0, 1, 4, 6),
    }


def test_detections_of_others_are_sorted_and_named() -> None:
    supervision = pytest.importorskip("supervision")
    boxes = np.array([[0.0, 0, 1, 1], [0, 0, 2, 2]])
    names = {"class_name": np.array(["dog", "cat"])}
    theirs = supervision.Detections(boxes, confidence=np.array([0.2, 0.6]), class_id=np.array([17, 16]), data=names)
    by_name = Detections.from_supervision(theirs, classes=CLASSES)
    assert (by_name.names, by_name["labels"].tolist()) == (["cat", "dog"], [1, 2])
    by_number = Detections.from_supervision(theirs)
    assert (by_number.names, by_number["labels"].tolist()) == (["cat", "dog"], [17, 18])
    torch.testing.assert_close(by_number["boxes"], torch.tensor([[0.0, 0, 2, 2], [0, 0, 1, 1]]))
    truth = supervision.Detections(boxes, class_id=np.array([0, 2]))
    assert Detections.from_supervision(truth)["scores"].tolist() == [1, 1]
    assert Detections.from_supervision(truth, classes=CLASSES).names == ["cat", "bird"]
    with pytest.raises(ValueError, match="expected names among the 1 classes, got 'dog'"):
        Detections.from_supervision(theirs, classes=["cat"])
    with pytest.raises(ValueError, match="expected class_id, got None"):
        Detections.from_supervision(supervision.Detections(boxes))


def test_without_supervision_the_message_says_what_to_install(
    detections: Detections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "supervision", None)
    with pytest.raises(MissingPackageError, match="pip install supervision"):
        detections.to_supervision()
