"""What is exported detects the same as torch, or is not kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

from bucketrank.cli import main
from bucketrank.data.shapes import Shapes
from bucketrank.deploy import ExportError, export_onnx, predict
from bucketrank.deploy import onnx as exporting
from bucketrank.deploy.onnx import check_images, compare
from bucketrank.detectors import DETECTORS

from ..detectors.small_detectors import small_detector
from ..shared_data import shared
from .made_up import CATEGORIES, CLASSES, stirred, write_weights

SIZE = (80, 112)


def run(path: Path, image: torch.Tensor) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"image": image.numpy()}), strict=True))


def proposals(name: str, number: int) -> dict[str, Any]:
    return {"test_proposals": number} if name.endswith("rcnn") else {}


@pytest.mark.parametrize("name", DETECTORS)
def test_every_detector_can_be_exported(name, tmp_path):
    model = stirred(small_detector(name, min_size=90, **proposals(name, 300)))
    agreement = export_onnx(model, tmp_path / "m.onnx", size=SIZE, classes=CLASSES)
    assert agreement.pictures == 3
    assert agreement.detections == 300
    assert agreement.unpaired <= 3
    assert agreement.box < 0.01
    assert agreement.score < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize("name", ["atss", "mask_rcnn"])
def test_numbers_of_detections_are_not_frozen(name, tmp_path):
    model = stirred(small_detector(name, detections=1000, nms=0.3, **proposals(name, 1000)))
    images = check_images(SIZE)
    counts = sorted({len(found["scores"]) for found in predict(model, [image[0] for image in images])})
    assert len(counts) > 1, "or this test shows nothing"
    export_onnx(model, tmp_path / "m.onnx", size=SIZE, classes=CLASSES)
    assert sorted({len(run(tmp_path / "m.onnx", image)["scores"]) for image in images}) == counts


@pytest.mark.parametrize("name", ["paa", "cascade_rcnn", "mask_rcnn"])
def test_no_detections_are_possible(name, tmp_path):
    model = stirred(small_detector(name, score_threshold=0.9999999))
    assert export_onnx(model, tmp_path / "m.onnx", size=SIZE, classes=CLASSES).detections == 0
    assert run(tmp_path / "m.onnx", check_images(SIZE)[0])["boxes"].shape == (0, 4)


def test_what_is_written_describes_itself(tmp_path, capsys):
    model, weights = write_weights(tmp_path / "w.safetensors", threshold=0.0375)
    Image.fromarray(Shapes(size=96).draw(1).pixels).save(tmp_path / "picture.png")
    words = ["export", str(weights), "--out", str(tmp_path / "m.onnx"), "--size", "80x112"]
    assert main([*words, "--image", str(tmp_path / "picture.png")]) == 0
    assert "detections on 3 pictures agree" in capsys.readouterr().out
    properties = {entry.key: entry.value for entry in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert json.loads(properties["classes"]) == CLASSES
    assert json.loads(properties["category_ids"]) == CATEGORIES
    assert float(properties["threshold"]) == 0.0375
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == [1, 3, 80, 112]
    assert [output.shape for output in session.get_outputs()] == [["detections", 4], ["detections"], ["detections"]]
    assert model is not None


def test_the_size_is_that_of_the_picture_unless_given(tmp_path):
    _, weights = write_weights(tmp_path / "w.safetensors")
    Image.new("RGB", (120, 72), (90, 120, 30)).save(tmp_path / "picture.png")
    picture = Image.fromarray(Shapes(size=120).draw(1).pixels).crop((0, 0, 120, 72))
    picture.save(tmp_path / "picture.png")
    assert (
        main(["export", str(weights), "--out", str(tmp_path / "a.onnx"), "--image", str(tmp_path / "picture.png")]) == 0
    )
    assert main(["export", str(weights), "--out", str(tmp_path / "b.onnx")]) == 0
    for name, size in (("a", [72, 120]), ("b", [96, 96])):
        session = onnxruntime.InferenceSession(tmp_path / f"{name}.onnx", providers=["CPUExecutionProvider"])
        assert session.get_inputs()[0].shape == [1, 3, *size]


def test_on_a_photograph(tmp_path):
    """A real picture has other statistics than drawn ones."""
    with Image.open(sorted(shared("data/coco_by/images").glob("*.jpg"))[0]) as picture:
        agreement = export_onnx(
            stirred(small_detector("atss", min_size=160, max_size=256)),
            tmp_path / "m.onnx",
            size=(160, 200),
            classes=CLASSES,
            picture=picture,
        )
    assert agreement.detections - agreement.unpaired >= 295


def test_a_different_detector_is_not_kept(tmp_path, monkeypatch):
    model = stirred(small_detector("atss"))
    trace = exporting._trace

    def spoilt(whole, image, path):
        with torch.no_grad():
            whole.detector.head.boxes.weight.mul_(1.2)
        trace(whole, image, path)

    monkeypatch.setattr(exporting, "_trace", spoilt)
    with pytest.raises(ExportError, match=r"on picture 1 of 3 torch has 100 detections and onnxruntime 100, of which"):
        export_onnx(model, tmp_path / "m.onnx", size=SIZE, classes=CLASSES)
    assert not list(tmp_path.iterdir())


def test_what_onnx_does_not_have_is_said(tmp_path):
    model = small_detector("atss", backbone="resnet18", deformable_groups=1)
    model.train()
    with pytest.raises(ExportError, match=r"ATSS: this detector cannot be written as ONNX: .*deform_conv2d"):
        export_onnx(model, tmp_path / "m.onnx", size=SIZE, classes=CLASSES)
    assert model.training
    assert not list(tmp_path.iterdir())


def detections(**changes):
    found = {
        "boxes": np.array([[0, 0, 10, 10], [20, 20, 30, 40]], dtype=np.float32),
        "labels": np.array([1, 2]),
        "scores": np.array([0.5, 0.5], dtype=np.float32),
    }
    return found | changes


def test_equal_scores_may_change_places():
    turned = {name: values[::-1] for name, values in detections().items()}
    agreement = compare(detections(), turned, longer_side=100)
    assert (agreement.detections, agreement.unpaired, agreement.box) == (2, 0, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": np.array([1, 1])},
        {"scores": np.array([0.5, 0.501], dtype=np.float32)},
        {"boxes": np.array([[0, 0, 10, 10], [20, 20, 30, 40.02]], dtype=np.float32)},  # 1e-4 of 100 pixels: 0.01
    ],
)
def test_what_differs_has_no_partner(changes):
    assert compare(detections(), detections(**changes), longer_side=100).unpaired == 1


def test_one_more_or_less_has_no_partner():
    fewer = {name: values[:1] for name, values in detections().items()}
    assert compare(detections(), fewer, longer_side=100).unpaired == 1
    assert compare(fewer, detections(), longer_side=100).unpaired == 1
    none = {name: values[:0] for name, values in detections().items()}
    assert compare(none, detections(), longer_side=100).unpaired == 2


def test_masks_are_compared_too():
    masks = np.zeros((2, 1, 4, 4), dtype=np.float32)
    other = masks.copy()
    other[1, 0, 2, 2] = 0.2
    assert compare(detections(masks=masks), detections(masks=other), longer_side=100).unpaired == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "80"], "--size: expected HEIGHTxWIDTH like 480x640, got '80'"),
        (["--size", "0x20"], "--size: expected HEIGHTxWIDTH like 480x640, got '0x20'"),
    ],
)
def test_wrong_values_name_the_flag(words, message, tmp_path, capsys):
    assert main(["export", str(tmp_path / "none.safetensors"), "--out", str(tmp_path / "m.onnx"), *words]) == 2
    assert message in capsys.readouterr().err


def test_weights_that_are_none_are_named(tmp_path, capsys):
    (tmp_path / "w.safetensors").write_bytes(b"nothing")
    assert main(["export", str(tmp_path / "w.safetensors"), "--out", str(tmp_path / "m.onnx")]) == 1
    assert "w.safetensors: not a safetensors file" in capsys.readouterr().err
