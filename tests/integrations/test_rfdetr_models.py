"""The models of the package rfdetr: trained with a ranking loss by one call, small and with random weights."""

import json
import os
import warnings

import pytest
import torch
from PIL import Image

from tests.process_settings import restored_process_settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings(), restored_process_settings():
    warnings.simplefilter("ignore")  # rfdetr uses torch.jit.script, which is deprecated, when it is imported
    pytest.importorskip("rfdetr")
    from rfdetr import RFDETRNano, training

from bucketrank import calibrate_scores
from bucketrank.integrations.rfdetr import undo, use_ranking_loss
from tests.evaluation.calibration.labelled_detections import objects_among

CLASSES, SIDE = 3, 64

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and rfdetr


@pytest.fixture(autouse=True)
def _restored_settings():
    with restored_process_settings():
        yield


def tiny_model():
    return RFDETRNano(
        pretrain_weights=None,
        resolution=SIDE,
        positional_encoding_size=SIDE // 16,  # other than DINOv2's, so that no weights are downloaded
        num_queries=20,
        num_select=20,
        group_detr=2,
        num_classes=CLASSES,
        hidden_dim=32,
        sa_nheads=2,
        ca_nheads=2,
        device="cpu",
    )


@pytest.fixture
def data(tmp_path):
    """Write two images for training and two for validation, in the layout of Roboflow."""
    for split in ("train", "valid"):
        (tmp_path / split).mkdir()
        for index in range(2):
            Image.new("RGB", (SIDE, SIDE), (40 * index, 90, 40)).save(tmp_path / split / f"{index}.png")
        images = [{"id": i, "file_name": f"{i}.png", "width": SIDE, "height": SIDE} for i in range(2)]
        box = {"category_id": 1, "bbox": [8, 8, 30, 30], "area": 900, "iscrowd": 0}
        annotations = [{"id": i, "image_id": i} | box for i in range(2)]
        categories = [{"id": i + 1, "name": f"class {i}", "supercategory": "all"} for i in range(CLASSES)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (tmp_path / split / "_annotations.coco.json").write_text(json.dumps(content))
    return {
        "dataset_dir": str(tmp_path),
        "output_dir": str(tmp_path / "out"),
        "dataset_file": "roboflow",
        "epochs": 1,
        "batch_size": 2,
        "grad_accum_steps": 1,
        "num_workers": 0,
        "multi_scale": False,
        "tensorboard": False,
        "run_test": False,
        "eval_backend": "faster_coco_eval",
        "progress_bar": None,
        "device": "cpu",
    }


@pytest.fixture
def criteria(monkeypatch):
    """Record the criterion of every run instead of training."""
    seen = []

    class Trainer:
        def fit(self, module, *_, **__):
            seen.append(module.criterion)

    monkeypatch.setattr(training, "build_trainer", lambda *_, **__: Trainer())
    return seen


def test_train_uses_the_ranking_loss_until_it_is_undone(data, criteria):
    own_module = training.RFDETRModelModule
    model = tiny_model()
    assert use_ranking_loss(model, delta=0.25) is model
    model.train(**data)
    assert undo(model) is model
    model.train(**data)
    ranked, own = criteria
    assert (type(ranked).__name__, ranked.ranking_loss.delta) == ("RankingSetCriterion", 0.25)
    assert type(own).__name__ == "SetCriterion"
    assert training.RFDETRModelModule is own_module
    with pytest.raises(ValueError, match="undo: expected a model with a ranking loss"):
        undo(model)


def test_a_second_call_replaces_the_settings_and_a_failed_run_leaves_no_trace(data, criteria, monkeypatch):
    own_module = training.RFDETRModelModule
    model = use_ranking_loss(use_ranking_loss(tiny_model()), loss="ap")
    model.train(**data)
    assert criteria[0].ranking_loss.loss == "ap"
    with pytest.raises(Exception, match="no_such_setting"):
        model.train(**data, no_such_setting=1)
    assert training.RFDETRModelModule is own_module


def test_mistakes_are_refused():
    with pytest.raises(TypeError, match=r"use_ranking_loss: expected a detector of rfdetr 1.8 or newer.*got object"):
        use_ranking_loss(object())
    with pytest.raises(ValueError, match="expected loss to be one of rs, ap"):
        use_ranking_loss(tiny_model(), loss="focal")  # type: ignore[arg-type]


def test_the_scores_are_calibrated():
    torch.manual_seed(0)
    model = tiny_model()
    torch.nn.init.normal_(model.model.model.class_embed.weight, std=0.5)
    pixels = torch.randint(256, (12, SIDE, SIDE, 3), dtype=torch.uint8).numpy()
    detections = model.predict(list(map(Image.fromarray, pixels)), threshold=0.0)
    calibration = calibrate_scores(detections, objects_among(detections))
    assert calibration.detections == sum(map(len, detections)) > 100
    assert calibration.d_ece[1] < 0.5 * calibration.d_ece[0]
    found = detections[0]
    assert calibration(found.confidence).shape == found.confidence.shape


@pytest.mark.slow
def test_a_trained_model_predicts(data):
    model = use_ranking_loss(tiny_model())
    model.train(**data)
    found = model.predict(Image.new("RGB", (SIDE, SIDE)), threshold=0.0)
    assert len(found)
