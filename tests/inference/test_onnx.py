"""An exported detector matches torch, or no file is written."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
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
from bucketrank.errors import DataError, ExportError
from bucketrank.inference import export_onnx, predict
from bucketrank.inference import onnx as exporting
from bucketrank.inference.onnx import compare, comparison_images
from bucketrank.settings import detectors

from ..detectors.small_detectors import small_detector
from ..shared_data import shared
from .untrained_weights import CATEGORIES, CLASSES, randomised, write_weights

SIZE = (80, 112)


def run_onnx(path: Path, image: torch.Tensor) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"image": image.numpy()}), strict=True))


def proposals(name: str, number: int) -> dict[str, Any]:
    return {"test_proposals": number} if name.endswith("rcnn") else {}


@pytest.mark.slow
@pytest.mark.parametrize("name", detectors())
def test_every_detector_can_be_exported(name, tmp_path):
    model = randomised(small_detector(name, min_size=90, **proposals(name, 300)))
    agreement = export_onnx(model, tmp_path / "m.onnx", size=SIZE, classes=CLASSES)
    assert agreement.images == 3
    assert agreement.detections == 300
    assert agreement.unpaired <= 3
    assert agreement.box < 0.01
    assert agreement.score < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["atss", "mask_rcnn"])
def test_numbers_of_detections_are_not_frozen(name, tmp_path):
    model = randomised(small_detector(name, detections=1000, nms=0.3, **proposals(name, 1000)))
    images = comparison_images(SIZE)
    counts = sorted({len(detections["scores"]) for detections in predict(model, [image[0] for image in images])})
    assert len(counts) > 1, "otherwise this test could not fail"
    export_onnx(model, tmp_path / "m.onnx", size=SIZE, classes=CLASSES)
    assert sorted({len(run_onnx(tmp_path / "m.onnx", image)["scores"]) for image in images}) == counts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paa", "cascade_rcnn", "mask_rcnn"])
def test_no_detections_are_possible(name, tmp_path):
    model = randomised(small_detector(name, score_threshold=0.9999999))
    assert export_onnx(model, tmp_path / "m.onnx", size=SIZE, classes=CLASSES).detections == 0
    assert run_onnx(tmp_path / "m.onnx", comparison_images(SIZE)[0])["boxes"].shape == (0, 4)


def test_the_metadata_describe_the_detector(tmp_path, capsys):
    _, weights = write_weights(tmp_path / "w.safetensors", threshold=0.0375)
    Image.fromarray(Shapes(size=96).draw(1).pixels).save(tmp_path / "image.png")
    words = ["export", str(weights), "--out", str(tmp_path / "m.onnx"), "--size", "80x112"]
    assert main([*words, "--image", str(tmp_path / "image.png")]) == 0
    assert "detections in 3 images agree" in capsys.readouterr().out
    properties = {entry.key: entry.value for entry in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert json.loads(properties["classes"]) == CLASSES
    assert json.loads(properties["category_ids"]) == CATEGORIES
    assert float(properties["threshold"]) == 0.0375
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == [1, 3, 80, 112]
    assert [output.shape for output in session.get_outputs()] == [["detections", 4], ["detections"], ["detections"]]


@pytest.mark.slow
def test_the_default_size_is_that_of_the_image(tmp_path):
    _, weights = write_weights(tmp_path / "w.safetensors")
    Image.fromarray(Shapes(size=120).draw(1).pixels).crop((0, 0, 120, 72)).save(tmp_path / "image.png")
    assert (
        main(["export", str(weights), "--out", str(tmp_path / "a.onnx"), "--image", str(tmp_path / "image.png")]) == 0
    )
    assert main(["export", str(weights), "--out", str(tmp_path / "b.onnx")]) == 0
    for name, size in (("a", [72, 120]), ("b", [96, 96])):
        session = onnxruntime.InferenceSession(tmp_path / f"{name}.onnx", providers=["CPUExecutionProvider"])
        assert session.get_inputs()[0].shape == [1, 3, *size]


def test_on_a_photograph(tmp_path):
    """A photograph has other statistics than drawn shapes."""
    with Image.open(sorted(shared("data/coco_by/images").glob("*.jpg"))[0]) as photograph:
        agreement = export_onnx(
            randomised(small_detector("atss", min_size=160, max_size=256)),
            tmp_path / "m.onnx",
            size=(160, 200),
            classes=CLASSES,
            image=photograph,
        )
    assert agreement.detections - agreement.unpaired >= 295


@pytest.mark.slow
def test_a_detector_that_differs_is_not_written(tmp_path, monkeypatch):
    model = randomised(small_detector("atss"))
    trace = exporting._trace

    def trace_changed(traced, image, path):
        with torch.no_grad():
            traced.detector.head.boxes.weight.mul_(1.2)
        trace(traced, image, path)

    monkeypatch.setattr(exporting, "_trace", trace_changed)
    with pytest.raises(ExportError, match=r"in image 1 of 3 torch has 100 detections and onnxruntime 100, and"):
        export_onnx(model, tmp_path / "m.onnx", size=SIZE, classes=CLASSES)
    assert not list(tmp_path.iterdir())


def with_equal_scores(name):
    """Return a detector whose score depends on the class and the shape of the anchor alone."""
    model: Any = randomised(small_detector(name))
    with torch.no_grad():
        model.head.classes.weight.zero_()
    return model


@pytest.mark.parametrize("name", ["retinanet", "atss"])
def test_equal_scores_are_no_difference(name, tmp_path):
    agreement = export_onnx(with_equal_scores(name), tmp_path / "m.onnx", size=SIZE, classes=CLASSES)
    assert agreement.unpaired == agreement.tied > 0
    assert f"{agreement.tied} others differ because scores are equal" in str(agreement)
    assert (tmp_path / "m.onnx").is_file()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("equal_scores", [False, True])
@pytest.mark.parametrize("change", ["boxes", "scores", "nms"])
def test_a_detector_that_differs_is_refused_also_if_scores_are_equal(equal_scores, change, tmp_path, monkeypatch):
    if equal_scores and change == "nms":
        pytest.skip("every choice among equal scores is right, whatever NMS does with it")
    model = with_equal_scores("retinanet") if equal_scores else randomised(small_detector("retinanet"))
    trace = exporting._trace

    def trace_changed(traced, image, path):
        with torch.no_grad():
            if change == "boxes":
                traced.detector.head.boxes.bias.add_(0.05)
            elif change == "scores":
                traced.detector.head.classes.bias.add_(0.05)
            else:
                traced.detector.nms = 0.2
        trace(traced, image, path)

    monkeypatch.setattr(exporting, "_trace", trace_changed)
    with pytest.raises(ExportError, match="does not match torch"):
        export_onnx(model, tmp_path / "m.onnx", size=SIZE, classes=CLASSES)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["rs", "focal"])
def test_a_retinanet_after_some_training_steps(loss, tmp_path, one_thread):
    """After a few steps most scores of RS are equal to rounding."""
    model = small_detector("retinanet", loss=loss).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    shapes = Shapes(size=96, min_objects=8, max_objects=8)
    for step in range(40):
        images, targets = [], []
        for number in range(4):
            drawing = shapes.draw(4 * step + number)
            boxes, labels = torch.tensor(drawing.boxes, dtype=torch.float32), torch.tensor(drawing.labels)
            boxes[:, 2:] += boxes[:, :2]
            images.append(torch.from_numpy(drawing.pixels.copy()).permute(2, 0, 1) / 255)
            targets.append({"boxes": boxes[labels <= 3], "labels": labels[labels <= 3]})
        optimiser.zero_grad()
        sum(model(images, targets).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10)
        optimiser.step()
    agreement = export_onnx(model, tmp_path / "m.onnx", size=SIZE, classes=CLASSES)
    assert agreement.detections == 300
    assert agreement.unpaired - agreement.tied <= 3


@pytest.mark.parametrize("library", ["onnx", "onnxruntime"])
def test_a_missing_library_names_the_extra(library, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    message = f'export_onnx needs {library}, which is not installed; install it with: pip install "bucketrank[export]"'
    with pytest.raises(ModuleNotFoundError, match=re.escape(message)):
        export_onnx(small_detector("atss"), tmp_path / "m.onnx", size=SIZE, classes=CLASSES)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_operator_without_onnx_is_reported(tmp_path):
    model = small_detector("atss", backbone="resnet18", deformable_groups=1)
    model.train()
    with pytest.raises(ExportError, match=r"ATSS: this detector cannot be written as ONNX: .*deform_conv2d"):
        export_onnx(model, tmp_path / "m.onnx", size=SIZE, classes=CLASSES)
    assert model.training
    assert not list(tmp_path.iterdir())


def detections(**changes):
    unchanged = {
        "boxes": np.array([[0, 0, 10, 10], [20, 20, 30, 40]], dtype=np.float32),
        "labels": np.array([1, 2]),
        "scores": np.array([0.5, 0.5], dtype=np.float32),
    }
    return unchanged | changes


def test_equal_scores_may_change_places():
    reversed_order = {name: values[::-1] for name, values in detections().items()}
    agreement = compare(detections(), reversed_order, longer_side=100)
    assert (agreement.detections, agreement.unpaired, agreement.box) == (2, 0, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": np.array([1, 1])},
        {"scores": np.array([0.5, 0.501], dtype=np.float32)},
        {"boxes": np.array([[0, 0, 10, 10], [20, 20, 30, 40.02]], dtype=np.float32)},  # 1e-4 of 100 pixels: 0.01
    ],
)
def test_a_detection_that_differs_is_unpaired(changes):
    assert compare(detections(), detections(**changes), longer_side=100).unpaired == 1


def test_an_additional_detection_is_unpaired():
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
        (["--size", "99999x99999"], "--size: expected at most 178,956,970 pixels, got '99999x99999'"),
    ],
)
def test_wrong_values_name_the_flag(words, message, tmp_path, capsys):
    assert main(["export", str(tmp_path / "none.safetensors"), "--out", str(tmp_path / "m.onnx"), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "folder"], "folder: expected a file to write, got a folder; give a file such as folder/model.onnx"),
        (["--image", "nowhere.png"], "nowhere.png: expected an image file, got no such file; correct the path"),
        (["--image", "folder"], "folder: expected an image file, got a folder; correct the path"),
    ],
)
def test_wrong_paths_are_named_before_the_export(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    assert main(["export", "no-weights.safetensors", *words]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_is_refused_before_the_detector_is_traced(tmp_path):
    with pytest.raises(DataError, match="expected a file to write, got a folder"):
        export_onnx(small_detector("atss"), tmp_path, size=(-1, -1), classes=CLASSES)


def test_a_file_without_weights_is_named(tmp_path, capsys):
    (tmp_path / "w.safetensors").write_bytes(b"nothing")
    assert main(["export", str(tmp_path / "w.safetensors"), "--out", str(tmp_path / "m.onnx")]) == 1
    assert "w.safetensors: not a safetensors file" in capsys.readouterr().err


def test_inputs_are_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, weights = write_weights(Path("w.safetensors"))
    Image.fromarray(Shapes(size=96).draw(1).pixels).save("image.png")
    Path("link.onnx").symlink_to("w.safetensors")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for out in ("w.safetensors", "image.png", "link.onnx"):
        assert main(["export", str(weights), "--out", out, "--image", "image.png", "--size", "80x112"]) == 1
        assert f"{out}: expected a new file to write, got an input of the command" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_only_an_earlier_export_is_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, weights = write_weights(Path("w.safetensors"))
    Path("val.json").write_text('{"images": []}')
    Path("empty.onnx").touch()
    onnx.save(onnx.ModelProto(producer_name="another"), "foreign.onnx")
    Path("dangling.onnx").symlink_to("nowhere")
    os.mkfifo("pipe")
    for out in ("val.json", "empty.onnx", "foreign.onnx", "dangling.onnx", "pipe"):
        assert main(["export", str(weights), "--out", out, "--size", "80x112"]) == 1
        message = f"{out}: expected a new file or an earlier export, got another file; choose another --out"
        assert message in capsys.readouterr().err
    assert Path("val.json").read_text() == '{"images": []}'
    for _ in range(2):
        assert main(["export", str(weights), "--out", "m.onnx", "--size", "80x112"]) == 0


def test_more_pixels_than_a_weights_file_may_ask_for_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"size: expected images of at most 178,956,970 pixels, got 99999 x 99999"):
        export_onnx(small_detector("atss"), tmp_path / "m.onnx", size=(99999, 99999), classes=CLASSES)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nframe 1")]
)
@pytest.mark.parametrize("place", ["comparison_images", "_trace", "_compare_all"])
def test_too_little_memory_is_one_line(error, place, tmp_path, monkeypatch, capsys):
    _, weights = write_weights(tmp_path / "w.safetensors")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(exporting, place, fail)
    assert main(["export", str(weights), "--out", str(tmp_path / "m.onnx"), "--size", "80x112"]) == 1
    assert capsys.readouterr().err == (
        "bucketrank: export: expected enough memory for images of 80 x 112 pixels, got too little; "
        "choose a smaller size\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_half_file(number, tmp_path, monkeypatch, capsys):
    _, weights = write_weights(tmp_path / "w.safetensors")

    def stopped(_detector: object, _image: object, path: Path) -> None:
        path.write_bytes(b"half")
        signal.raise_signal(number)

    monkeypatch.setattr(exporting, "_trace", stopped)
    assert main(["export", str(weights), "--out", str(tmp_path / "m.onnx"), "--size", "80x112"]) == 130
    assert capsys.readouterr().err == "bucketrank: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
