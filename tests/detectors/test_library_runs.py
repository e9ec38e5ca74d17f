"""A model of another library from the recipe to the report: train, stop, resume, evaluate, predict, load, export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bucketrank.cli import main
from bucketrank.detectors import build
from bucketrank.errors import ExportError
from bucketrank.evaluation.calibration import ScoreMap, fold
from bucketrank.inference import export_onnx, predict
from bucketrank.settings import load_recipe
from bucketrank.weights import load_model

from ..integrations import torchvision_models
from ..training import tiny
from .tiny_models import TINY_TORCHVISION, transformers_folder, use_tiny_torchvision

pytestmark = pytest.mark.usefixtures("one_thread")

FLAGS = [
    *("--data.batch_size", "4", "--data.workers", "0", "--schedule.epochs", "2", "--schedule.optimiser", "sgd"),
    *("--schedule.policy", "steps", "--schedule.milestones", "1", "--schedule.lr", "0.001"),
    *("--schedule.base_batch", "4", "--schedule.clip", "1", "--trainer.log_every", "1"),
    *("--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.pictures", "1"),
]


def start_torchvision(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """Write the weights of a tiny RetinaNet for 91 classes; return the words of the command that fine-tunes it."""
    use_tiny_torchvision(patch)
    patch.setattr(torchvision_models, "CLASSES", 91)
    torch.manual_seed(5)
    save_file(torchvision_models.retinanet().state_dict(), folder / "coco.safetensors")
    words = ["retinanet-coco", "--detector", "torchvision/retinanet_resnet50_fpn", "--detector.weights"]
    return [*words, str(folder / "coco.safetensors"), "--detector.trainable_layers", "null", "--loss", "own"]


def start_transformers(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    name = transformers_folder("rt_detr", folder)
    return ["rt-detr-coco", "--detector", f"transformers/{name}", "--inputs.min_size", "64"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("start", [start_torchvision, start_transformers])
def test_from_the_recipe_to_the_report(start, shapes, tmp_path, monkeypatch, capsys):
    if start is start_torchvision:  # the tiny backbone has no layers to count
        monkeypatch.setattr("bucketrank.detectors.torchvision.freeze_layers", lambda model, trained: None)
    words = start(tmp_path, monkeypatch)
    whole, run = tmp_path / "whole", tmp_path / "run"
    command = ["train", *words, "--data", str(shapes), *FLAGS]
    assert main([*command, "--out", str(whole)]) == 0
    assert words[2] in capsys.readouterr().out
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=3)
        assert main([*command, "--out", str(run)]) == 130
    shutil.rmtree(tmp_path / "rt_detr", ignore_errors=True)
    (tmp_path / "coco.safetensors").unlink(missing_ok=True)
    assert main(["train", "--resume", "--out", str(run)]) == 0
    one, two = load_file(whole / "weights.safetensors"), load_file(run / "weights.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (whole / "validation.csv").read_text() == (run / "validation.csv").read_text()

    weights = run / "weights.safetensors"
    model, meta = load_model(weights)
    assert meta.recipe["detector"]["weights"] is None
    assert len(meta.classes) == model.num_classes
    assert model.stored_threshold == meta.threshold
    image = next((shapes / "images").iterdir())
    assert main(["eval", str(weights), str(shapes), "--max-images", "2"]) == 0
    assert main(["predict", str(weights), str(image), "--out", str(tmp_path / "found"), "--threshold", "0"]) == 0
    detections = json.loads((tmp_path / "found" / "predictions.json").read_text())
    assert str(image.name) in json.dumps(detections)
    assert set(predict(model, [image], threshold=0)[0]["labels"].tolist()) <= set(range(1, len(meta.classes) + 1))
    assert main(["report", str(run), "--out", str(tmp_path / "report.html"), "--max-images", "2", "--images", "1"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert ("the loss is part of the model" in page) == (start is start_torchvision)
    assert "resnet50</dd>" not in page, "the backbone is that of the model"
    recipe = load_recipe(run / "recipe.yaml")
    assert recipe.backbone_name is None
    assert main(["train", *words, "--data", str(shapes), *FLAGS, "--out", str(run), "--resume"]) == 0


EXPORTED: list[Any] = [*(("torchvision", name) for name in TINY_TORCHVISION)]
EXPORTED += [("transformers", name) for name in ("deformable_detr", "rt_detr", "d_fine", "lw_detr")]


def with_signal(model: nn.Module) -> None:
    """Give all layers weights with which the scores vary: rounding must not decide which queries are chosen."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)


@pytest.mark.slow
@pytest.mark.parametrize(("library", "name"), EXPORTED)
def test_export(library, name, tmp_path, monkeypatch):
    torch.manual_seed(0)
    if library == "torchvision":
        use_tiny_torchvision(monkeypatch)
        model = build(f"torchvision/{name}", num_classes=2)
    else:
        model = build(f"transformers/{transformers_folder(name, tmp_path)}", num_classes=2, min_size=64)
    with_signal(model)
    agreement = export_onnx(model, tmp_path / "model.onnx", size=(96, 96), classes=["a", "b"])
    assert agreement.detections > 0
    assert (tmp_path / "model.onnx").exists()


@pytest.mark.slow
def test_what_cannot_be_exported_is_named(tmp_path):
    model = build(f"transformers/{transformers_folder('rf_detr', tmp_path)}", num_classes=2, min_size=64)
    with pytest.raises(ExportError, match=r"cannot be written as ONNX: Exporting the operator .* is not supported"):
        export_onnx(model, tmp_path / "model.onnx", size=(96, 96), classes=["a", "b"])
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("start", [start_torchvision, start_transformers])
def test_a_calibration_is_folded_into_the_scores(start, tmp_path, monkeypatch):
    """One pair per class reaches the column of that class: labels count from 1, columns from 0."""
    words = start(tmp_path, monkeypatch)
    sizes: dict[str, Any] = {"min_size": 64} if start is start_transformers else {}
    torch.manual_seed(0)
    model: Any = build(words[2], num_classes=2, score_threshold=0.0, detections=1000, **sizes).eval()
    image = [torch.rand(3, 64, 64)]
    head = model.score_head()
    assert (head.link, head.first_label, head.columns) == ("sigmoid", 1, 2)
    with torch.no_grad():
        before = class_scores(model(image)[0])
        fold(head, ScoreMap((2.0, 0.5), (1.0, -1.0)))
        after = class_scores(model(image)[0])
    for label, (a, b) in {1: (2.0, 1.0), 2: (0.5, -1.0)}.items():
        expected = (a * before[label].logit() + b).sigmoid()
        torch.testing.assert_close(after[label][:5], expected[:5], rtol=1e-4, atol=1e-6)


def class_scores(detections: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {label: detections["scores"][detections["labels"] == label] for label in (1, 2)}


def test_help_shows_the_settings_of_the_recipe(capsys):
    with pytest.raises(SystemExit):
        main(["train", "rt-detr-coco", "--help"])
    shown = capsys.readouterr().out
    assert "--detector.class_cost" in shown
    assert "PekingU/rtdetr_v2_r18vd" in shown
    assert "--backbone.name" not in shown


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--detector torchvision/yolo", 2, "expected one of torchvision/"),
        ("--detector transformers/./nowhere", 1, "expected a folder or a name on the hub, got './nowhere'"),
        ("--loss dr", 2, "loss.name for transformers/PekingU/rtdetr_v2_r18vd: expected one of own, rs, ap, got 'dr'"),
    ],
)
def test_mistakes_are_one_line(words, status, message, shapes, tmp_path, capsys):
    command = ["train", "rt-detr-coco", "--data", str(shapes), "--out", str(tmp_path / "run"), *words.split()]
    assert main([*command, "--trainer.accelerator", "cpu"]) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
