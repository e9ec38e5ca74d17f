"""torchvision's detectors as detectors of this package: built as torchvision builds them, with new class layers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn
from torchvision.models import detection, get_model, vgg
from torchvision.models._api import WeightsEnum

from bucketrank.detectors import build
from bucketrank.detectors.torchvision import backbone_layers, freeze_layers
from bucketrank.errors import RecipeError
from bucketrank.integrations.ranking_loss import LossName
from bucketrank.settings import InputSettings, detector_settings, from_dict
from bucketrank.settings.library_specs import LIBRARY_LOSSES, TORCHVISION_MODELS
from bucketrank.weights.sources import CLASS_LAYERS

from ..detectors.small_detectors import CLASSES, scene
from .coco_download import coco_weights, download
from .small_resnet import RESNET_MODELS, small_backbones, small_resnet

__all__ = ["download", "small_backbones"]
pytestmark = pytest.mark.usefixtures("one_thread", "small_backbones")

MOBILE = "fasterrcnn_mobilenet_v3_large_320_fpn"
SMALL: dict[str, Any] = {"min_size": 96, "max_size": 128}
# One model for each of torchvision's classes of detectors, small enough to run in a test.
FAMILIES: tuple[Any, ...] = (*RESNET_MODELS, "ssdlite320_mobilenet_v3_large")
FAMILIES = tuple(pytest.param(each, marks=pytest.mark.slow) if "mask" in each else each for each in FAMILIES)


def small(model: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {} if model.startswith("ssd") else SMALL
    proposals = {"proposals": 60} if "rcnn" in model else {}
    return build(f"torchvision/{model}", num_classes=CLASSES, **{**sizes, **proposals, **settings})


def test_the_losses_are_those_of_the_adapters():
    assert set(LIBRARY_LOSSES) == {"own", *get_args(LossName)}


def test_the_models_are_those_of_torchvision():
    names = {name for name in torchvision.models.list_models(module=detection) if "keypoint" not in name}
    assert set(TORCHVISION_MODELS) == names


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", [MOBILE, "maskrcnn_resnet50_fpn", "ssdlite320_mobilenet_v3_large"])
def test_weights_are_loaded_and_frozen_as_torchvision_does(model, download):
    """The model that torchvision builds from the same weights is the yardstick, but for the class layers."""
    ours = small(model, weights="coco", loss="own").model
    theirs = get_model(model, weights="DEFAULT", **({} if model.startswith("ssd") else SMALL))
    (our_address, safe), (their_address, _) = download
    assert our_address == their_address
    assert safe, "code in a pickle must not run"
    theirs_trained = {name for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    assert {name for name, parameter in ours.named_parameters() if parameter.requires_grad} == theirs_trained
    their_tensors, our_tensors = theirs.state_dict(), ours.state_dict()
    assert our_tensors.keys() == their_tensors.keys()
    for name, tensor in our_tensors.items():
        if tensor.shape == their_tensors[name].shape:
            assert torch.equal(tensor, their_tensors[name]), name
        else:
            assert name.startswith(CLASS_LAYERS)
    assert len(backbone_layers(ours)) == TORCHVISION_MODELS[model].total
    images, _ = scene()
    with torch.no_grad():
        batch = theirs.eval().transform(images)[0].tensors
        expected, features = theirs.backbone(batch), ours.eval().backbone(batch)
    torch.testing.assert_close(list(features.values()), list(expected.values()), rtol=0, atol=0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", [MOBILE, "fasterrcnn_resnet50_fpn", "ssdlite320_mobilenet_v3_large"])
@pytest.mark.parametrize("layers", [0, 1, 4])
def test_layers_are_counted_as_torchvision_counts_them(model, layers, monkeypatch):
    backbones = {"fasterrcnn_resnet50_fpn": small_resnet}
    build_backbone = backbones.get(model, lambda: torchvision.models.mobilenet_v3_large(weights=None))
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda self, **_: build_backbone().state_dict())
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda self, state, **_: None)
    theirs = get_model(model, weights_backbone="DEFAULT", trainable_backbone_layers=layers)
    ours = small(model, trainable_layers=layers, loss="own").model
    frozen = {name for name, parameter in theirs.named_parameters() if not parameter.requires_grad}
    expected = {name for name, parameter in ours.named_parameters() if not parameter.requires_grad}
    batch_norms = (".bn", ".1.weight", ".1.bias", "downsample.1")  # parameters here, buffers in frozen batch norms
    assert frozen <= expected
    assert all(any(part in name for part in batch_norms) for name in expected - frozen)
    assert frozen


def test_the_layers_of_vgg():
    vgg16 = SimpleNamespace(features=vgg.make_layers(vgg.cfgs["D"]))
    backbone = detection.ssd._vgg_extractor(vgg16, highres=False, trainable_layers=2)
    model = nn.Module()
    model.backbone = backbone
    expected = {name for name, parameter in backbone.named_parameters() if not parameter.requires_grad}
    backbone.requires_grad_(requires_grad=True)
    assert len(backbone_layers(model)) == TORCHVISION_MODELS["ssd300_vgg16"].total
    freeze_layers(model, trained=2)
    assert {name for name, parameter in backbone.named_parameters() if not parameter.requires_grad} == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("loss", ["own", "rs"])
def test_one_step_and_detections(model, loss):
    detector = small(model, loss=loss)
    images, targets = scene()
    losses = detector(images, targets)
    assert all(term.isfinite() and term.dim() == 0 for term in losses.values())
    assert any(name.endswith("_rank") for name in losses) == (loss == "rs")
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in detector.parameters() if p.requires_grad)
    with torch.no_grad():
        results = detector.eval()(images)
    for result in results:
        assert set(result) == {"boxes", "labels", "scores"} | ({"masks"} if detector.masks else set())
        assert set(result["labels"].tolist()) <= {1, 2, 3}
    if loss == "rs":  # without a threshold
        assert all(len(result["labels"]) >= 50 for result in results)


def test_a_batch_without_objects_has_gradients():
    detector = small("retinanet_resnet50_fpn", loss="rs")
    images, targets = scene((0, 0))
    sum(detector(images, targets).values()).backward()
    assert all(p.grad is not None for p in detector.parameters() if p.requires_grad)


def test_a_file_with_other_classes(tmp_path):
    model = "retinanet_resnet50_fpn"
    state = coco_weights(model)
    save_file(state, tmp_path / "retinanet.safetensors")
    detector = small(model, weights=str(tmp_path / "retinanet.safetensors"))
    tensors = detector.model.state_dict()
    assert tensors["head.classification_head.cls_logits.weight"].shape[0] == 9 * CLASSES
    assert tensors["head.classification_head.cls_logits.bias"].unique().item() == pytest.approx(-4.595, abs=1e-3)
    kept = {name for name in tensors if name in state and torch.equal(tensors[name], state[name])}
    assert set(tensors) - kept == {f"head.classification_head.cls_logits.{part}" for part in ("weight", "bias")}
    assert not any(isinstance(module, nn.BatchNorm2d) for module in detector.modules())


def test_settings_reach_the_model():
    detector = small("fasterrcnn_resnet50_fpn", score_threshold=0.3, nms=0.4, detections=7, loss="own", proposals=33)
    heads = detector.model.roi_heads
    assert (heads.score_thresh, heads.nms_thresh, heads.detections_per_img) == (0.3, 0.4, 7)
    assert detector.model.rpn.post_nms_top_n() == 33
    assert (detector.transform.min_size, detector.transform.max_size) == ((96,), 128)
    assert detector.transform is detector.model.transform
    ssd = build("torchvision/ssdlite320_mobilenet_v3_large", num_classes=2, batch_norm="frozen", loss="ap")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in ssd.modules())
    assert ssd.model.score_thresh == 0  # type: ignore[union-attr]
    settings = detector_settings("torchvision/ssdlite320_mobilenet_v3_large")
    assert ssd.complete_settings(settings) == replace(settings, score_threshold=0.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("torchvision", {}, ValueError, "expected torchvision/MODEL, like torchvision/retinanet_resnet50_fpn_v2"),
        ("torchvison/x", {}, ValueError, "before the slash: .*got 'torchvison'; the nearest is \"torchvision\""),
        (
            "torchvision/retinanet_resnet50",
            {},
            ValueError,
            'got .*the nearest is "torchvision/retinanet_resnet50_fpn"',
        ),
        ("torchvision/keypointrcnn_resnet50_fpn", {}, ValueError, "expected one of torchvision/fasterrcnn"),
        (f"torchvision/{MOBILE}", {"loss": "focal"}, ValueError, "expected one of own, rs, ap, got 'focal'"),
        ("atss", {"loss": "own"}, ValueError, "loss.name for atss: expected one of rs, ap, .*got 'own'"),
        (f"torchvision/{MOBILE}", {"backbone": "resnet18"}, TypeError, "brings its own backbone"),
        (f"torchvision/{MOBILE}", {"inputs": InputSettings()}, TypeError, "expected inputs as LibraryInputSettings"),
        (f"torchvision/{MOBILE}", {"frozen_stages": 1}, TypeError, "has no setting 'frozen_stages'"),
        (f"torchvision/{MOBILE}", {"trainable_layers": 7}, ValueError, "trainable_layers: expected 0 to 6 or null"),
        (f"torchvision/{MOBILE}", {"weights": "coco.pth"}, FileNotFoundError, "expected null, coco or an existing"),
        (f"torchvision/{MOBILE}", {"ranking_scope": "image"}, ValueError, "ranking_scope: expected batch"),
        (f"torchvision/{MOBILE}", {"memory": 8}, ValueError, "loss.memory: expected 0 for a model of another library"),
        (
            f"torchvision/{MOBILE}",
            {"box_balance": False},
            ValueError,
            "box_balance: expected null for a model",
        ),
        (f"torchvision/{MOBILE}", {"box_loss": "l1"}, ValueError, "box_loss: expected giou or null"),
        (f"torchvision/{MOBILE}", {"loss": "own", "box_weight": 2.0}, ValueError, "box_weight: expected null"),
        (
            f"torchvision/{MOBILE}",
            {"min_size": 900, "max_size": 800},
            ValueError,
            "min_size: expected sizes up to max_size",
        ),
        (
            f"torchvision/{MOBILE}",
            {"max_size": 10**9},
            ValueError,
            r"expected resized images of at most .*320 \(min_size\) x 1000000000",
        ),
        ("torchvision/ssdlite320_mobilenet_v3_large", {"min_size": 300}, ValueError, "inputs of 320 x 320 pixels"),
        ("torchvision/fcos_resnet50_fpn", {"proposals": 5}, ValueError, "proposals: expected null for fcos"),
    ],
)
def test_what_cannot_be_built(name, settings, error, message):
    with pytest.raises(error, match=message):
        build(name, num_classes=2, **settings)


@pytest.mark.slow
def test_weights_of_another_model(tmp_path):
    save_file(coco_weights("fcos_resnet50_fpn"), tmp_path / "fcos.safetensors")
    with pytest.raises(ValueError, match=r"expected weights of torchvision's retinanet_resnet50_fpn, got .*tensors"):
        small("retinanet_resnet50_fpn", weights=str(tmp_path / "fcos.safetensors"))
    (tmp_path / "pickle.pth").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected a \.safetensors file, got .*pickle\.pth; convert"):
        small("retinanet_resnet50_fpn", weights=str(tmp_path / "pickle.pth"))
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="with other contents"):
        small("retinanet_resnet50_fpn", weights=str(tmp_path / "broken.safetensors"))


def test_without_a_connection(monkeypatch, tmp_path):
    monkeypatch.setattr("bucketrank.weights.sources.is_reachable", lambda address: False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(ConnectionError, match=r"COCO weights of fcos_resnet50_fpn cannot be read \(no connection"):
        small("fcos_resnet50_fpn", weights="coco")


def test_a_recipe_holds_no_backbone_settings():
    recipe = from_dict({"detector": {"name": f"torchvision/{MOBILE}", "weights": "coco"}})
    assert "backbone" not in recipe.to_dict()
    assert recipe.inputs.min_size is None
    assert from_dict(recipe.to_dict()) == recipe
    with pytest.raises(RecipeError, match=r'there is no setting "backbone\.name"'):
        from_dict({"detector": {"name": f"torchvision/{MOBILE}"}, "backbone": {"name": "resnet18"}})


def test_the_adapters_versions_are_checked(monkeypatch):
    from bucketrank.settings import detector_spec

    def refuse(path):
        raise ImportError("expected torchvision 0.21 to 0.29, got 0.99")

    monkeypatch.setattr("bucketrank.settings.detector_specs.import_object", refuse)
    with pytest.raises(ValueError, match=r"detector\.name: torchvision's detectors cannot be used: .*got 0\.99"):
        detector_spec("torchvision/fcos_resnet50_fpn").load()
