"""Training that starts from a run on other classes takes the rows of shared classes by name."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bucketrank.detectors import Detector, build
from bucketrank.settings import from_dict
from bucketrank.training.run import train
from bucketrank.weights import Meta, save_weights
from bucketrank.weights.load import build_detector, load_matching_weights
from tests.detectors.tiny_models import transformers_folder, use_tiny_torchvision
from tests.training import tiny

OLD, NEW = ["cat", "dog", "bird"], ["dog", "fish", "cat", "horse"]
SMALL: dict[str, Any] = {"channels": 32}
DETECTORS: dict[str, dict[str, Any]] = {
    "atss": SMALL,
    "retinanet": SMALL,
    "mask_rcnn": SMALL | {"hidden": 32},
    "cascade_rcnn": SMALL | {"hidden": 32},
    "co_detr": {
        "channels": 32,
        "queries": 8,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "feedforward": 32,
        "auxiliary_queries": 5,
        "published": True,
    },
}


def recipe(name: str, loss: str = "rs") -> Any:
    return from_dict(
        {
            "detector": {"name": name, **DETECTORS[name]},
            "backbone": {"name": "test_resnet"},
            "loss": {"name": loss},
            "inputs": {"min_size": 64, "max_size": 64},
        }
    )


def saved(path: Path, settings: Any) -> Detector:
    """Write a detector of the old classes whose numbers are all different."""
    model = build_detector(settings, num_classes=len(OLD))
    torch.manual_seed(1)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.1, 0.9)
    save_weights(path, model, Meta(OLD, [1, 2, 3], 0.1, settings.to_dict()))
    return model


def logits(layer: Any, classes: int) -> torch.Tensor:
    """Return the weights of a classifier as (anchors, classes, inputs)."""
    weight: torch.Tensor = layer.weight.detach()
    return weight.reshape(-1, classes, *weight.shape[1:])


@pytest.mark.parametrize("name", DETECTORS)
def test_shared_classes_keep_their_rows(name: str, tmp_path: Path) -> None:
    old: Any = saved(tmp_path / "old.safetensors", recipe(name))
    new: Any = build_detector(recipe(name), num_classes=len(NEW))
    before = {key: tensor.clone() for key, tensor in new.state_dict().items()}
    lines: list[str] = []
    assert load_matching_weights(new, str(tmp_path / "old.safetensors"), classes=NEW, tell=lines.append) == []
    assert lines == ["init: classes kept by name: dog, cat; new: fish, horse"]
    trained, own = (logits(model.score_head().layers[-1], len(each)) for model, each in ((old, OLD), (new, NEW)))
    torch.testing.assert_close(own[:, 0], trained[:, 1], rtol=0, atol=0)
    torch.testing.assert_close(own[:, 2], trained[:, 0], rtol=0, atol=0)
    layer = next(key for key, each in new.named_modules() if each is new.score_head().layers[-1])
    initial = before[f"{layer}.weight"].reshape(own.shape)
    torch.testing.assert_close(own[:, [1, 3]], initial[:, [1, 3]], rtol=0, atol=0)
    for key, tensor in new.state_dict().items():
        if tensor.shape == old.state_dict()[key].shape and not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(tensor, old.state_dict()[key], rtol=0, atol=0)


def test_boxes_and_masks_follow_their_classes_and_the_background_stays_last(tmp_path: Path) -> None:
    old: Any = saved(tmp_path / "old.safetensors", recipe("mask_rcnn", "ce"))
    new: Any = build_detector(recipe("mask_rcnn", "ce"), num_classes=len(NEW))
    load_matching_weights(new, str(tmp_path / "old.safetensors"), classes=NEW)
    boxes, old_boxes = new.box_head.boxes.bias.reshape(4, 4), old.box_head.boxes.bias.reshape(3, 4)
    torch.testing.assert_close(boxes[0], old_boxes[1], rtol=0, atol=0)
    torch.testing.assert_close(boxes[2], old_boxes[0], rtol=0, atol=0)
    masks, old_masks = (model.mask_head[1].mask_fcn_logits.bias for model in (new, old))
    torch.testing.assert_close(masks[[0, 2]], old_masks[[1, 0]], rtol=0, atol=0)
    classes, old_classes = new.box_head.classes.bias, old.box_head.classes.bias
    torch.testing.assert_close(classes[[0, 2, 4]], old_classes[[1, 0, 3]], rtol=0, atol=0)


def test_the_same_number_of_classes_in_another_order(tmp_path: Path) -> None:
    """By shape alone, the rows of cat would become those of bird."""
    old: Any = saved(tmp_path / "old.safetensors", recipe("atss"))
    new: Any = build_detector(recipe("atss"), num_classes=3)
    assert load_matching_weights(new, str(tmp_path / "old.safetensors"), classes=["bird", "cat", "dog"]) == []
    rows, old_rows = (logits(model.head.classes, 3) for model in (new, old))
    torch.testing.assert_close(rows, old_rows[:, [2, 0, 1]], rtol=0, atol=0)


def test_no_shared_class_leaves_the_class_layer_as_it_is(tmp_path: Path) -> None:
    saved(tmp_path / "old.safetensors", recipe("atss"))
    new: Any = build_detector(recipe("atss"), num_classes=3)
    before = new.head.classes.weight.detach().clone()
    lines: list[str] = []
    skipped = load_matching_weights(
        new, str(tmp_path / "old.safetensors"), classes=["one", "two", "three"], tell=lines.append
    )
    assert skipped == ["head.classes.weight", "head.classes.bias"]
    assert lines == ["init: classes kept by name: none; new: one, two, three"]
    torch.testing.assert_close(new.head.classes.weight, before, rtol=0, atol=0)


def test_another_loss_has_another_head(tmp_path: Path) -> None:
    saved(tmp_path / "old.safetensors", recipe("atss"))
    new: Any = build_detector(recipe("atss", "focal"), num_classes=len(NEW))
    skipped = load_matching_weights(new, str(tmp_path / "old.safetensors"), classes=NEW)
    assert "head.classes.weight" in skipped, "one anchor instead of three"


def test_equal_classes_load_as_before_and_are_not_announced(tmp_path: Path) -> None:
    saved(tmp_path / "old.safetensors", recipe("atss"))
    new: Any = build_detector(recipe("atss"), num_classes=3)
    state = torch.random.get_rng_state()
    assert load_matching_weights(new, str(tmp_path / "old.safetensors"), classes=OLD, tell=pytest.fail) == []
    load_matching_weights(new, str(tmp_path / "old.safetensors"), classes=["dog", "cat", "bird"])
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn"])
def test_torchvision_models_have_the_background_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiny_torchvision(monkeypatch)
    settings = from_dict({"detector": {"name": f"torchvision/{name}"}, "loss": {"name": "own"}})
    old: Any = saved(tmp_path / "old.safetensors", settings)
    new: Any = build_detector(settings, num_classes=len(NEW))
    assert load_matching_weights(new, str(tmp_path / "old.safetensors"), classes=NEW) == []
    first = old.first_label
    rows = [model.score_head().layers[0].bias for model in (new, old)]
    own, trained = (each.reshape(-1, first + len(names)) for each, names in zip(rows, (NEW, OLD), strict=True))
    torch.testing.assert_close(own[:, first + 0], trained[:, first + 1], rtol=0, atol=0)
    torch.testing.assert_close(own[:, first + 2], trained[:, first + 0], rtol=0, atol=0)
    if first:
        torch.testing.assert_close(own[:, 0], trained[:, 0], rtol=0, atol=0)
        boxes, old_boxes = (model.model.roi_heads.box_predictor.bbox_pred.bias.reshape(-1, 4) for model in (new, old))
        torch.testing.assert_close(boxes[[0, 1, 3]], old_boxes[[0, 2, 1]], rtol=0, atol=0)


def test_transformers_models(tmp_path: Path) -> None:
    folder = transformers_folder("rt_detr", tmp_path)
    start = build(f"transformers/{folder}", num_classes=3, loss="rs")
    settings = from_dict({"detector": {"name": f"transformers/{folder}"}, "loss": {"name": "rs"}})
    settings = replace(settings, detector=start.complete_settings(settings.detector))
    old: Any = saved(tmp_path / "old.safetensors", settings)
    new: Any = build_detector(settings, num_classes=len(NEW))
    assert load_matching_weights(new, str(tmp_path / "old.safetensors"), classes=NEW) == []
    rows, old_rows = (model.score_head().layers[0].weight for model in (new, old))
    torch.testing.assert_close(rows[[0, 2]], old_rows[[1, 0]], rtol=0, atol=0)


def test_a_run_says_which_classes_it_keeps(shapes: Path, tmp_path: Path) -> None:
    tiny.run(tmp_path / "first", shapes, "--schedule.max_steps 1")
    data = shutil.copytree(shapes, tmp_path / "data")
    for file in ("train.json", "val.json"):
        text = (data / file).read_text()
        (data / file).write_text(text.replace('"circle"', '"disc"'))
    output = io.StringIO()
    settings = tiny.recipe(f"--schedule.max_steps 1 --init {tmp_path / 'first'}")
    train(settings, data, tmp_path / "second", console=Console(file=output, width=200))
    assert "init: classes kept by name: square, triangle, star; new: disc\n" in output.getvalue()
