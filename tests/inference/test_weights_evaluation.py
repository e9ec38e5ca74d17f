"""Evaluation of a weights file: its splits, and the masks in given boxes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from torch import nn

from bucketrank.cli import main
from bucketrank.detectors.mask_rcnn import MaskRCNN
from bucketrank.inference import evaluate
from bucketrank.weights.files import save_weights
from bucketrank.weights.load import load_model
from tests.inference.untrained_weights import CATEGORIES, CLASSES, write_weights


@pytest.fixture(scope="module")
def rectangles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set whose masks are rectangles: each fills its box. The third image has no object."""
    folder = tmp_path_factory.mktemp("data") / "rectangles"
    (folder / "images").mkdir(parents=True)
    images, annotations = [], []
    for number, (x, y, w, h) in enumerate([(20, 10, 60, 50), (30, 40, 40, 30)], start=1):
        Image.new("RGB", (120, 96)).save(folder / "images" / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 120, "height": 96})
        corners = [x, y, x + w, y, x + w, y + h, x, y + h]
        entry = {"id": number, "image_id": number, "category_id": CATEGORIES[number], "bbox": [x, y, w, h]}
        annotations.append({**entry, "segmentation": [corners], "area": w * h, "iscrowd": 0})
    Image.new("RGB", (120, 96)).save(folder / "images" / "3.png")
    images.append({"id": 3, "file_name": "3.png", "width": 120, "height": 96})
    categories = [{"id": each, "name": name} for each, name in zip(CATEGORIES, CLASSES, strict=True)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    for split in ("train", "val"):
        (folder / f"{split}.json").write_text(json.dumps(document))
    (folder / "test.json").write_text(json.dumps({**document, "images": images[:2]}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("bias", "ap"), [(10.0, 1.0), (-10.0, 0.0)])
def test_masks_in_given_boxes_do_not_depend_on_the_detected_boxes(bias, ap, rectangles, tmp_path, capsys):
    """The detector is untrained, but its masks fill their boxes, or are empty."""
    _, path = write_weights(tmp_path / "mask.safetensors", name="mask_rcnn", channels=16)
    model, meta = load_model(path)
    assert isinstance(model, MaskRCNN)
    last = model.get_submodule("mask_head.1.mask_fcn_logits")
    assert isinstance(last, nn.Conv2d)
    assert last.bias is not None
    nn.init.zeros_(last.weight)
    nn.init.constant_(last.bias, bias)
    save_weights(path, model, meta)
    evaluation = evaluate(path, rectangles, given_boxes=True)
    assert evaluation.masks_in_boxes is not None
    assert evaluation.masks is not None
    # At 0.75: a pasted mask reaches up to a pixel beyond its box, so its IoU is not 1.
    assert evaluation.masks_in_boxes.metrics["AP75"] == pytest.approx(ap)
    assert evaluation.masks.metrics["AP75"] < 0.5
    assert evaluate(path, rectangles).masks_in_boxes is None
    with pytest.raises(ValueError, match="evaluate: expected max_images of at least 1 or None, got 0"):
        evaluate(path, rectangles, max_images=0)
    assert main(["eval", str(path), str(rectangles), "--given-boxes"]) == 0
    assert "masks in given boxes" in capsys.readouterr().out


def test_given_boxes_need_a_detector_with_masks(rectangles, tmp_path, capsys):
    _, path = write_weights(tmp_path / "atss.safetensors", name="atss")
    assert main(["eval", str(path), str(rectangles), "--given-boxes"]) == 1
    assert "--given-boxes: expected a Mask R-CNN, got ATSS; leave the flag out" in capsys.readouterr().err


def test_every_split_is_evaluated(rectangles, tmp_path, capsys):
    _, path = write_weights(tmp_path / "atss.safetensors", name="atss")
    counts = {"val": 3, "train": 3, "test": 2}
    for split, count in counts.items():
        assert main(["eval", str(path), str(rectangles), "--split", split]) == 0
        assert f"{count} images" in capsys.readouterr().out
    assert evaluate(path, rectangles, split="test").images == 2
    (tmp_path / "data").mkdir()
    shutil.copy(rectangles / "val.json", tmp_path / "data")
    assert main(["eval", str(path), str(tmp_path / "data"), "--split", "test"]) == 1
    assert "data: expected a split 'test' with annotations, got none; choose val" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-images", "0"], "eval: --max-images: expected at least 1, got 0"),
        (["--workers", "-1"], "eval: --workers: expected at least 0, got -1"),
    ],
)
def test_wrong_numbers_are_named(flags, message, tmp_path, capsys):
    assert main(["eval", str(tmp_path / "weights.safetensors"), str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_for_the_detections_is_refused_before_the_evaluation(tmp_path, capsys):
    words = ["eval", str(tmp_path / "no-weights.safetensors"), str(tmp_path), "--detections", str(tmp_path)]
    assert main(words) == 1
    suggested = tmp_path / "detections.json"
    assert f"{tmp_path}: expected a file to write, got a folder; give a file such as {suggested}" in (
        capsys.readouterr().err
    )
