"""Weights of an earlier run as the start of another: the calibration of the file is undone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketrank.detectors import Detector
from bucketrank.errors import OutOfMemoryError, WeightsError
from bucketrank.evaluation.calibration import Calibration, fold
from bucketrank.evaluation.calibration.mapping import fold_softmax
from bucketrank.settings import Recipe
from bucketrank.weights.files import Meta, save_weights
from bucketrank.weights.load import build_detector, load_matching_weights, load_model

from ..training import tiny

CLASSES = ["cat", "dog", "owl"]


def calibration(**changes: Any) -> Calibration:
    platt = Calibration(
        method="platt",
        target="match",
        a=(2.5,),
        b=(-0.75,),
        d_ece=(0.2, 0.1),
        la_ece=(0.2, 0.1),
        images=8,
        detections=80,
        right=20,
        best_threshold=0.5,
    )
    return replace(platt, **changes)


def write_calibrated(path: Path, recipe: Recipe, fitted: Calibration) -> Detector:
    """Write the weights of a calibrated detector; return the detector before its calibration."""
    trained, calibrated = build_detector(recipe, num_classes=3), build_detector(recipe, num_classes=3)
    calibrated.load_state_dict(trained.state_dict())
    if fitted.method == "platt":
        fold(calibrated.score_head(), fitted.score_map)
    else:
        fold_softmax(calibrated.score_head(), fitted.a[0], fitted.b[0])
    meta = Meta(classes=CLASSES, category_ids=[1, 2, 3], threshold=0.1, recipe=recipe.to_dict())
    save_weights(path, calibrated, meta.calibrated(fitted))
    return trained


@pytest.mark.parametrize(
    ("name", "flags", "changes"),
    [
        ("atss-laptop", "--detector.score_threshold 0.05", {}),
        ("atss-laptop", "", {"a": (2.0, 0.5, 3.0), "b": (0.1, 0.2, -0.3)}),
        ("cascade-rcnn-laptop", "--detector.hidden 32", {}),
        ("faster-rcnn-laptop", "--detector.hidden 32 --loss ce", {"method": "temperature"}),
    ],
    ids=["platt", "a pair per class", "several heads", "temperature"],
)
def test_a_run_starts_from_the_logits_before_the_calibration(name, flags, changes, tmp_path):
    recipe = tiny.recipe(flags, name=name)
    path = tmp_path / "weights.safetensors"
    trained = write_calibrated(path, recipe, calibration(**changes)).state_dict()
    model: Any = build_detector(recipe, num_classes=3)
    random_state = torch.random.get_rng_state()
    assert load_matching_weights(model, str(path)) == []
    assert torch.equal(torch.random.get_rng_state(), random_state)
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, trained[key])
    assert model.score_threshold == recipe.flat()["detector.score_threshold"], "that of the new recipe stays"


def test_another_loss_starts_from_these_logits_too(tmp_path):
    """With the focal loss, the scores of ATSS are products with a centerness, which cannot be calibrated."""
    path = tmp_path / "weights.safetensors"
    trained: Any = write_calibrated(path, tiny.recipe(), calibration())
    model: Any = build_detector(tiny.recipe("--loss focal --detector.anchors 3"), num_classes=3)
    assert model.score_head().link == "other"
    load_matching_weights(model, str(path))
    torch.testing.assert_close(model.head.classes.weight, trained.head.classes.weight)


def test_a_calibration_of_another_detector_is_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    recipe = tiny.recipe()
    meta = Meta(classes=CLASSES, category_ids=[1, 2, 3], threshold=0.1, recipe=recipe.to_dict())
    for fitted in (calibration(method="temperature"), calibration(a=(1.0, 2.0), b=(0.0, 0.0))):
        model = build_detector(recipe, num_classes=3)
        save_weights(path, model, replace(meta, calibration=fitted))
        with pytest.raises(WeightsError, match=r"weights\.safetensors: the calibration inside does not fit"):
            load_matching_weights(model, str(path))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_too_little_memory_is_not_blamed_on_the_recipe(error, tmp_path, monkeypatch):
    recipe = tiny.recipe(name="atss-laptop")
    write_calibrated(tmp_path / "w.safetensors", recipe, calibration())

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("bucketrank.weights.load.build_detector", fail)
    with pytest.raises(
        OutOfMemoryError, match=r"w.safetensors: expected enough memory for the detector, got too little"
    ):
        load_model(tmp_path / "w.safetensors")
