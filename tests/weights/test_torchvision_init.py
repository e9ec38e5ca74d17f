"""Weights of torchvision's models in our detectors: names, class layers, batch norms and refusals."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import get_model, get_model_weights

from bucketrank.detectors import build
from bucketrank.errors import WeightsError
from bucketrank.weights import sources as torchvision_download
from bucketrank.weights.load import load_initial_weights
from bucketrank.weights.tensor_table import translate
from bucketrank.weights.torchvision import OTHER_ARCHITECTURES, TABLES

from ..detectors.torchvision_twins import our_model, scene, torchvision_model

SETTINGS: dict[str, Any] = {
    "retinanet": {"loss": "focal", "extra_levels": "p5_relu"},
    "faster_rcnn": {"roi_align": "torchvision"},
    "mask_rcnn": {"roi_align": "torchvision"},
}
# Names of torchvision before its version 0.13, in which the COCO weights are stored.
OLD_NAMES: tuple[tuple[str, Any], ...] = (
    (r"fpn\.(inner|layer)_blocks\.(\d)\.0\.", r"fpn.\1_blocks.\2."),
    (r"rpn\.head\.conv\.0\.0\.", "rpn.head.conv."),
    (r"mask_head\.(\d)\.0\.", lambda match: f"mask_head.mask_fcn{int(match[1]) + 1}."),
    (r"_head\.conv\.(\d)\.0\.", lambda match: f"_head.conv.{2 * int(match[1])}."),
)


def old_name(name: str) -> str:
    for pattern, replacement in OLD_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def in_hub_cache(monkeypatch, folder: Path, name: str, state: dict[str, torch.Tensor]) -> Path:
    """Store ``state`` where torch.hub looks for the COCO weights of ``name``."""
    monkeypatch.setattr(torch.hub, "_hub_dir", str(folder))
    file: Path = folder / "checkpoints" / get_model_weights(name).DEFAULT.url.rpartition("/")[2]
    file.parent.mkdir()
    torch.save(state, file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_every_tensor_of_the_coco_weights_is_loaded(name, tmp_path, monkeypatch):
    table = TABLES[name]
    theirs = get_model(table.model, weights=None, weights_backbone=None)
    state = {key: each for key, each in theirs.state_dict().items() if not key.endswith("num_batches_tracked")}
    old_state = {old_name(key): tensor for key, tensor in state.items()}
    assert old_state.keys() != state.keys()
    theirs.load_state_dict(old_state)  # torchvision knows the old names, so these are they
    in_hub_cache(monkeypatch, tmp_path, table.model, old_state)

    ours: Any = build(name, num_classes=90, **({"loss": "ce"} | SETTINGS.get(name, {})))
    for tensor in ours.state_dict().values():
        tensor.zero_()
    assert load_initial_weights(ours, f"torchvision:{table.model}") == []
    translated = translate(state, table.rows)
    assert translated.unknown == []
    own = ours.state_dict()
    assert sorted(translated.state) == sorted(key for key in own if not key.endswith("num_batches_tracked"))
    # Equal but for a constant, the order of classes and the epsilon: nothing is left at 0 that is not 0 in the source.
    assert [key for key, tensor in translated.state.items() if tensor.any() and not own[key].any()] == []


def test_classes_of_coco_take_their_rows_by_name(tmp_path, monkeypatch):
    labels = get_model_weights("fasterrcnn_resnet50_fpn").DEFAULT.meta["categories"]
    theirs = torchvision_model("faster_rcnn", labels=len(labels))
    in_hub_cache(monkeypatch, tmp_path, "fasterrcnn_resnet50_fpn", theirs.state_dict())
    sizes: dict[str, Any] = {"channels": 16, "hidden": 24, "roi_align": "torchvision"}
    ours: Any = build("faster_rcnn", num_classes=2, backbone="resnet18", loss="ce", **sizes)
    init = "torchvision:fasterrcnn_resnet50_fpn"

    assert load_initial_weights(ours, init, classes=["dog", "person"]) == []
    predictor, rows = theirs.roi_heads.box_predictor, [18, 1]  # COCO's ids of dog and person
    torch.testing.assert_close(ours.box_head.classes.weight, predictor.cls_score.weight[[*rows, 0]])
    boxes = predictor.bbox_pred.bias.reshape(-1, 4)[rows]
    torch.testing.assert_close(ours.box_head.boxes.bias.reshape(-1, 4), boxes)

    skipped = load_initial_weights(ours, init, classes=["dog", "unicorn"])
    expected = ["box_head.classes.weight", "box_head.classes.bias", "box_head.boxes.weight", "box_head.boxes.bias"]
    assert skipped == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TABLES)
def test_class_layers_of_another_number_of_classes_keep_their_values(name, tmp_path):
    file = tmp_path / "state.safetensors"
    theirs = torchvision_model(name, labels=4)
    save_file(theirs.state_dict(), file)
    settings: dict[str, Any] = SETTINGS[name] if name == "retinanet" else SETTINGS[name] | {"hidden": 24, "loss": "ce"}
    ours: Any = build(name, num_classes=5, backbone="resnet18", channels=16, **settings)
    before = {key: tensor.clone() for key, tensor in ours.state_dict().items()}
    skipped = load_initial_weights(ours, f"torchvision:{file}")
    parts = {"head.classes"} if name == "retinanet" else {"box_head.classes", "box_head.boxes"}
    parts |= {"mask_head.1.mask_fcn_logits"} if name == "mask_rcnn" else set()
    assert {key.rpartition(".")[0] for key in skipped} == parts
    for key in skipped:
        torch.testing.assert_close(ours.state_dict()[key], before[key], rtol=0, atol=0)
    changed = "backbone.body.layer4.1.conv2.weight"
    torch.testing.assert_close(ours.state_dict()[changed], theirs.state_dict()[changed])


def test_the_epsilon_of_the_coco_weights_is_kept(tmp_path, monkeypatch):
    """torchvision sets the epsilon of the norms to 0 for its COCO weights; ours is 1e-5."""
    theirs = torchvision_model("faster_rcnn")
    for key, tensor in theirs.state_dict().items():
        if key.endswith("running_var"):
            tensor.mul_(1e-4)[:2] = torch.tensor([1e-6, 4e-5])
            theirs.state_dict()[key.replace("running_var", "weight")].mul_(1e-2)
    for module in theirs.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eps = 0.0
    in_hub_cache(monkeypatch, tmp_path, "fasterrcnn_resnet50_fpn", theirs.state_dict())
    ours = our_model("faster_rcnn", theirs, tmp_path)  # from a file, with an epsilon of 1e-5
    images = torch.stack(scene(1)[0])
    with torch.no_grad():
        expected = theirs.backbone(images)["0"]
        assert (ours.neck(ours.backbone(images))[0] - expected).abs().max() > 0.1
        load_initial_weights(ours, "torchvision:fasterrcnn_resnet50_fpn")
        torch.testing.assert_close(ours.neck(ours.backbone(images))[0], expected, rtol=1e-4, atol=1e-4)


def test_a_channel_without_variance_stays_finite(tmp_path, monkeypatch):
    theirs = torchvision_model("faster_rcnn")
    theirs.state_dict()["backbone.body.bn1.running_var"][0] = 1e-44
    in_hub_cache(monkeypatch, tmp_path, "fasterrcnn_resnet50_fpn", theirs.state_dict())
    ours = our_model("faster_rcnn", theirs, tmp_path)
    load_initial_weights(ours, "torchvision:fasterrcnn_resnet50_fpn")
    with torch.no_grad():
        assert all(level.isfinite().all() for level in ours.backbone(torch.stack(scene(1)[0])))


def small(name: str = "faster_rcnn", **settings: Any) -> Any:
    return build(name, num_classes=3, backbone="test_resnet", channels=32, **settings)


@pytest.mark.parametrize("model", OTHER_ARCHITECTURES)
def test_models_of_another_architecture_are_refused(model):
    with pytest.raises(WeightsError, match=rf"got torchvision:{model}, which has another architecture \(.+; use torch"):
        load_initial_weights(small(), f"torchvision:{model}")


@pytest.mark.parametrize(
    ("name", "init", "message"),
    [
        ("atss", "torchvision:retinanet_resnet50_fpn", "expected one of the detectors faster_rcnn, .* got ATSS; start"),
        (
            "faster_rcnn",
            "torchvision:maskrcnn_resnet50_fpn",
            "which fits --detector.name mask_rcnn; use torchv",
        ),
        ("faster_rcnn", "torchvision:fasterrcn_resnet50", 'the nearest is "fasterrcnn_resnet50_fpn"'),
        ("faster_rcnn", "torchvision:missing.safetensors", "or an existing .safetensors file, got missing.safetensors"),
    ],
)
def test_other_sources_are_refused(name, init, message):
    with pytest.raises(WeightsError, match=message) as caught:
        load_initial_weights(small(name), init)
    assert "\n" not in str(caught.value)


def test_a_pickle_is_not_read(tmp_path):
    file = tmp_path / "state.safetensors"
    torch.save({"weight": torch.ones(1)}, file)
    with pytest.raises(WeightsError, match=r"expected a \.safetensors file, got .*; convert a file you trust with"):
        load_initial_weights(small(), f"torchvision:{file}")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "dtype", "rows"])
def test_tensors_of_another_architecture_are_refused(change, tmp_path):
    state = torchvision_model("faster_rcnn").state_dict()
    file = tmp_path / "state.safetensors"
    if change == "missing":
        del state["rpn.head.conv.0.0.weight"]
    elif change == "unknown":
        state["roi_heads.box_head.fc8.weight"] = torch.ones(1)
    elif change == "shape":
        state["roi_heads.box_head.fc6.weight"] = torch.ones(2, 3)
    elif change == "dtype":
        state["roi_heads.box_head.fc6.weight"] = state["roi_heads.box_head.fc6.weight"].int()
    else:
        state["roi_heads.box_predictor.bbox_pred.weight"] = torch.ones(3, 24)
    save_file(state, file)
    ours: Any = build("faster_rcnn", num_classes=3, backbone="resnet18", channels=16, hidden=24, loss="ce")
    before = ours.backbone.body.conv1.weight.clone()
    with pytest.raises(WeightsError, match=r"of which 1 tensors are missing, .*; build the detector like that model: "):
        load_initial_weights(ours, f"torchvision:{file}")
    torch.testing.assert_close(ours.backbone.body.conv1.weight, before, rtol=0, atol=0)


def test_the_published_roi_align_is_refused(tmp_path):
    """The heads of torchvision's weights were trained with another RoIAlign."""
    file = tmp_path / "state.safetensors"
    save_file(torchvision_model("faster_rcnn").state_dict(), file)
    ours: Any = build("faster_rcnn", num_classes=3, backbone="resnet18", channels=16, hidden=24, loss="ce")
    with pytest.raises(WeightsError, match=r"got published; add --detector\.roi_align torchvision"):
        load_initial_weights(ours, f"torchvision:{file}")


def test_retinanets_message_names_its_settings(tmp_path):
    file = tmp_path / "state.safetensors"
    save_file(torchvision_model("retinanet").state_dict(), file)
    with pytest.raises(WeightsError, match=r"--detector\.scales 3 --detector\.extra_levels p5_relu"):
        load_initial_weights(build("retinanet", num_classes=3, backbone="resnet18", channels=16), f"torchvision:{file}")


def test_without_a_connection_one_line_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    monkeypatch.setattr(torchvision_download, "is_reachable", lambda _: False)
    with pytest.raises(ConnectionError, match=r"init: the COCO weights of fasterrcnn_resnet50_fpn cannot be") as caught:
        load_initial_weights(small(), "torchvision:fasterrcnn_resnet50_fpn")
    message = str(caught.value)
    assert "\n" not in message
    assert "https://download.pytorch.org/models/fasterrcnn_resnet50_fpn_coco-258fb6c6.pth" in message
    assert message.endswith("or start from a run with --init FILE.safetensors, or without --init")


def test_a_damaged_file_in_the_cache_is_named(tmp_path, monkeypatch):
    file = in_hub_cache(monkeypatch, tmp_path, "fasterrcnn_resnet50_fpn", {})
    file.write_bytes(b"not a checkpoint")
    with pytest.raises(ConnectionError, match="the COCO weights of fasterrcnn_resnet50_fpn cannot be read"):
        load_initial_weights(small(), "torchvision:fasterrcnn_resnet50_fpn")
