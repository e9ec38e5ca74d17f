"""Weights files of backbones: loaded whole, or refused."""

import pickle
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bucketrank.detectors.backbone import build_backbone
from bucketrank.settings import BackboneSettings

from ..shared_data import shared
from .backbone_checks import assert_identical, norms_in_training, random_images, trainable

pytestmark = pytest.mark.usefixtures("one_thread")


def test_weights_of_a_timm_model_round_trip(resnet18_file):
    backbone = build_backbone(BackboneSettings("resnet18", weights=str(resnet18_file)))
    assert norms_in_training(backbone) == set()  # "auto" with weights
    assert not any(name.startswith(("body.conv1", "body.bn1", "body.layer1")) for name in trainable(backbone))
    assert any(name.startswith("body.layer2") for name in trainable(backbone))
    state = load_file(resnet18_file)
    for name, value in backbone.body.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    whole: Any = timm.create_model("resnet18")
    whole.load_state_dict(state)
    with torch.no_grad():
        expected = whole.eval().forward_intermediates(random_images(), intermediates_only=True)[1:]
        assert_identical(backbone.eval()(random_images()), expected)


@pytest.mark.slow
def test_the_classifier_may_differ_or_be_absent(resnet18_file, tmp_path):
    state = load_file(resnet18_file)
    expected = build_backbone(BackboneSettings("resnet18", weights=str(resnet18_file)))(random_images())
    for head in ({}, {"fc.weight": torch.zeros(7, 512), "fc.bias": torch.zeros(7)}):
        path = tmp_path / "other.safetensors"
        save_file({k: v for k, v in state.items() if not k.startswith("fc.")} | head, path)
        assert_identical(build_backbone(BackboneSettings("resnet18", weights=str(path)))(random_images()), expected)


def test_a_published_file_fits():
    path = shared("data/weights/tf_efficientnet_lite0.safetensors")
    backbone = build_backbone(BackboneSettings("tf_efficientnet_lite0", weights=str(path)))
    state = load_file(path)
    for name, value in backbone.body.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    assert len(backbone.frozen) > 0


def old_name(name: str) -> str:
    """Return the name of a Swin's tensor in the files on the hub, which are older than transformers 5."""
    for new, old in [
        ("attention.q_proj", "attention.self.query"),
        ("attention.k_proj", "attention.self.key"),
        ("attention.v_proj", "attention.self.value"),
        ("attention.o_proj", "attention.output.dense"),
        (
            "attention.relative_position_bias.relative_position_bias_table",
            "attention.self.relative_position_bias_table",
        ),
        ("mlp.fc1", "intermediate.dense"),
        ("mlp.fc2", "output.dense"),
    ]:
        name = name.replace(new, old)
    return name


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", ["new", "old", "folder"])
def test_weights_of_swin_round_trip(swin_tiny, layout, tmp_path):
    path = tmp_path / "swin.safetensors"
    state = {name: value.clone() for name, value in swin_tiny.body.state_dict().items()}
    if layout == "folder":
        path = tmp_path / "swin"
        swin_tiny.body.save_pretrained(path)
    elif layout == "old":  # a classifier, without the norms after the stages
        state = {old_name(name): value for name, value in state.items() if not name.startswith("hidden_states_norms")}
        save_file(state | {"classifier.weight": torch.zeros(9, 768), "classifier.bias": torch.zeros(9)}, path)
    else:
        save_file(state, path)
    backbone = build_backbone(BackboneSettings("swin_tiny", weights=str(path)))
    if layout == "old":
        norms: Any = backbone.body.hidden_states_norms
        for norm in norms.values():  # they start as ones and zeros
            assert norm.weight.eq(1).all()
            assert norm.bias.eq(0).all()
        norms.load_state_dict(swin_tiny.get_submodule("body.hidden_states_norms").state_dict())
    swin_tiny.eval()
    with torch.no_grad():
        assert_identical(backbone.eval()(random_images()), swin_tiny(random_images()))


def test_a_file_that_does_not_fit_is_refused(resnet18_file, tmp_path):
    def message(**changes: Tensor | None) -> str:
        path = tmp_path / "changed.safetensors"
        state = load_file(resnet18_file) | {name.replace("__", "."): value for name, value in changes.items()}
        save_file({name: value for name, value in state.items() if value is not None}, path)
        with pytest.raises(
            ValueError, match=r"backbone\.weights: expected weights that fit resnet18, got .*changed"
        ) as caught:
            build_backbone(BackboneSettings("resnet18", weights=str(path)))
        return str(caught.value)

    assert 'Missing key(s) in state_dict: "layer3.0.conv1.weight"' in message(layer3__0__conv1__weight=None)
    assert 'Unexpected key(s) in state_dict: "layer5.weight"' in message(layer5__weight=torch.zeros(3))
    assert "size mismatch for layer2.0.bn1.bias" in message(layer2__0__bn1__bias=torch.zeros(3))


def test_a_file_of_another_model_is_refused_with_a_short_message(resnet18_file):
    for name, key in [("resnet50", "layer1.0.conv3.weight"), ("swin_tiny", "bn1.bias")]:
        with pytest.raises(ValueError, match=f"expected weights that fit {name}, got .*resnet18.safetensors") as caught:
            build_backbone(BackboneSettings(name, weights=str(resnet18_file)))
        assert key in str(caught.value)
        assert len(str(caught.value)) < 1500


def test_a_swin_with_missing_tensors_is_refused(swin_tiny, tmp_path):
    path = tmp_path / "half.safetensors"
    state = {name: value.clone() for name, value in swin_tiny.body.state_dict().items()}
    missing = "swin.encoder.layers.0.blocks.0.attention.q_proj.bias"
    shrunk = "swin.encoder.layers.1.blocks.0.attention.q_proj.bias"
    del state[missing]
    state[shrunk] = torch.zeros(3)
    save_file(state, path)
    with pytest.raises(ValueError, match=r"half\.safetensors: 1 missing \(swin.*; 1 of another shape \(swin") as caught:
        build_backbone(BackboneSettings("swin_tiny", weights=str(path)))
    assert missing in str(caught.value)
    assert shrunk in str(caught.value)


class Trap:
    """An object that fails the test if it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was read",)


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny"])
@pytest.mark.parametrize("file", ["weights.pth", "weights.safetensors"])
def test_a_pickle_is_refused_unread(name, file, tmp_path):
    (tmp_path / file).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(
        ValueError, match=r"backbone\.weights: expected a \.safetensors file, got .*weights.*; convert a file you trust"
    ):
        build_backbone(BackboneSettings(name, weights=str(tmp_path / file)))


def test_files_without_weights_are_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"backbone\.weights: expected .* existing \.safetensors file, got .*none\.safetensors"
    ):
        build_backbone(BackboneSettings("resnet18", weights=str(tmp_path / "none.safetensors")))
    save_file({}, tmp_path / "empty.safetensors")  # timm would download other weights
    with pytest.raises(
        ValueError, match=r"backbone\.weights: expected a file with tensors, got .*empty\.safetensors without any"
    ):
        build_backbone(BackboneSettings("resnet18", weights=str(tmp_path / "empty.safetensors")))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"backbone\.weights: expected a folder with model\.safetensors"):
        build_backbone(BackboneSettings("swin_tiny", weights=str(tmp_path)))
