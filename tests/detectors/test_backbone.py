"""Backbones with random weights, and with weights saved and loaded."""

import pickle
import socket
import time
from pathlib import Path
from typing import Any, TypeVar

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bucketrank.catalogue import BackboneSettings
from bucketrank.detectors import backbone as module
from bucketrank.detectors.backbone import Backbone, build_backbone
from bucketrank.detectors.deformable import DeformableConv2d

from ..shared_data import shared

CHANNELS = {
    "resnet18": [64, 128, 256, 512],
    "resnet50": [256, 512, 1024, 2048],
    "swin_tiny": [96, 192, 384, 768],
    "tf_efficientnet_lite0": [24, 40, 112, 320],
}
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Module = TypeVar("Module", bound=nn.Module)
pytestmark = pytest.mark.usefixtures("one_thread")
every_model = pytest.mark.parametrize("name", CHANNELS)


@pytest.fixture(scope="module")
def resnet18(tmp_path_factory) -> Path:
    """A whole random classifier, all its tensors random, in a file."""
    torch.manual_seed(0)
    path: Path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
    save_file(shaken(timm.create_model("resnet18")).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def swin_tiny() -> Backbone:
    torch.manual_seed(0)
    return shaken(build_backbone(BackboneSettings("swin_tiny")))


def shaken(model: Module) -> Module:
    """The model with noise on all that starts as ones or zeros: these would hide mistakes and stop gradients."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.eq(parameter.flatten()[0]).all() and "predictor" not in name:
                parameter.uniform_(0.5, 1.5)
        for part in model.modules():
            if isinstance(part, _BatchNorm) and part.running_mean is not None and part.running_var is not None:
                part.running_mean.normal_(std=0.1)
                part.running_var.uniform_(0.5, 1.5)
    return model


def images(height: int = 64, width: int = 96, count: int = 1) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))


def total(maps: list[Tensor]) -> Tensor:
    """A number whose gradient reaches every cell; a plain sum would not get through a layer norm."""
    generator = torch.Generator().manual_seed(2)
    return torch.stack([(m * torch.randn(m.shape, generator=generator)).mean() for m in maps]).sum()


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def with_gradient(backbone: nn.Module) -> set[str]:
    return {name for name, parameter in backbone.named_parameters() if parameter.grad is not None}


def trainable(backbone: nn.Module) -> set[str]:
    return {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}


def norms_in_training(backbone: nn.Module) -> set[str]:
    return {name for name, part in backbone.named_modules() if isinstance(part, _BatchNorm) and part.training}


@every_model
def test_four_maps_at_any_size(name):
    backbone = build_backbone(BackboneSettings(name)).eval()
    assert backbone.channels == CHANNELS[name]
    assert backbone.strides == [4, 8, 16, 32]
    assert (backbone.mean, backbone.std) == (((0.5,) * 3, (0.5,) * 3) if "lite" in name else IMAGENET)
    for height, width in [(97, 131), (64, 96), (32, 32)]:
        with torch.no_grad():
            maps = backbone(images(height, width, 2))
        cells = [(-(-height // stride), -(-width // stride)) for stride in backbone.strides]
        wanted = [(2, channels, *size) for channels, size in zip(CHANNELS[name], cells, strict=True)]
        assert [tuple(m.shape) for m in maps] == wanted


@every_model
def test_without_weights_all_is_trained(name):
    backbone = build_backbone(BackboneSettings(name))
    assert backbone.training
    total(backbone(images(count=2))).backward()
    assert with_gradient(backbone) == trainable(backbone)
    left_out = {"body.swin.layernorm.weight", "body.swin.layernorm.bias"} if name == "swin_tiny" else set()
    assert {name for name, _ in backbone.named_parameters()} - trainable(backbone) == left_out
    norms = {name for name, part in backbone.named_modules() if isinstance(part, _BatchNorm)}
    assert norms_in_training(backbone) == norms


@pytest.mark.parametrize("stages", [0, 1, 2, 3, 4])
def test_frozen_stages_take_the_stem_with_them(stages):
    backbone = build_backbone(BackboneSettings("resnet18", frozen_stages=stages, batch_norm="trained"))
    parts = ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4"]
    frozen = parts[: stages + 2] if stages else []
    wanted = {name for name, _ in backbone.named_parameters() if name.split(".")[1] not in frozen}
    backbone.requires_grad_(True)
    for _ in range(2):
        backbone.eval().train()
        assert trainable(backbone) == wanted
        assert {name.split(".")[1] for name in norms_in_training(backbone)} == set(parts) - {*frozen, "conv1"}
    if stages < 4:
        total(backbone(images(count=2))).backward()
    assert with_gradient(backbone) == wanted


def test_frozen_stages_of_swin_have_no_drop_path():
    backbone = build_backbone(BackboneSettings("swin_tiny", frozen_stages=2))
    stages = [any(n.startswith(f"body.swin.encoder.layers.{i}.blocks.") for n in trainable(backbone)) for i in range(4)]
    assert stages == [False, False, True, True]
    assert "body.swin.encoder.layers.1.downsample.reduction.weight" in trainable(backbone)
    first, second = backbone(images()), backbone(images())
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, True, False, False]


def test_frozen_batch_norm_keeps_its_statistics_and_trains_its_affine():
    backbone = build_backbone(BackboneSettings("resnet18", batch_norm="frozen"))
    before = {name: value.clone() for name, value in backbone.named_buffers()}
    assert backbone.training
    assert norms_in_training(backbone) == set()
    total(backbone(images(count=2))).backward()
    assert_same(list(before.values()), [value for _, value in backbone.named_buffers()])
    norm = backbone.get_submodule("body.layer3.0.bn1")
    assert norm.weight.grad is not None
    assert norm.weight.requires_grad


def test_trained_batch_norm_learns_its_statistics():
    backbone = build_backbone(BackboneSettings("resnet18", batch_norm="trained"))
    before = backbone.get_buffer("body.bn1.running_mean").clone()
    backbone(images(count=2))
    assert not torch.equal(before, backbone.get_buffer("body.bn1.running_mean"))


def test_weights_make_the_round_trip(resnet18):
    backbone = build_backbone(BackboneSettings("resnet18", weights=str(resnet18)))
    assert norms_in_training(backbone) == set()  # "auto" with weights
    assert not any(name.startswith(("body.conv1", "body.bn1", "body.layer1")) for name in trainable(backbone))
    assert any(name.startswith("body.layer2") for name in trainable(backbone))
    state = load_file(resnet18)
    for name, value in backbone.body.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    whole: Any = timm.create_model("resnet18")
    whole.load_state_dict(state)
    with torch.no_grad():
        wanted = whole.eval().forward_intermediates(images(), intermediates_only=True)[1:]
        assert_same(backbone.eval()(images()), wanted)


def test_the_classifier_may_be_another_or_absent(resnet18, tmp_path):
    state = load_file(resnet18)
    wanted = build_backbone(BackboneSettings("resnet18", weights=str(resnet18)))(images())
    for head in ({}, {"fc.weight": torch.zeros(7, 512), "fc.bias": torch.zeros(7)}):
        path = tmp_path / "other.safetensors"
        save_file({k: v for k, v in state.items() if not k.startswith("fc.")} | head, path)
        assert_same(build_backbone(BackboneSettings("resnet18", weights=str(path)))(images()), wanted)


def test_a_published_file_fits():
    path = shared("data/weights/tf_efficientnet_lite0.safetensors")
    backbone = build_backbone(BackboneSettings("tf_efficientnet_lite0", weights=str(path)))
    state = load_file(path)
    for name, value in backbone.body.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    assert len(backbone.frozen) > 0


def old_name(name: str) -> str:
    """The name of a Swin's tensor in the files on the hub, which are older than transformers 5."""
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


@pytest.mark.parametrize("layout", ["new", "old", "folder"])
def test_weights_of_swin_make_the_round_trip(swin_tiny, layout, tmp_path):
    path = tmp_path / "swin.safetensors"
    state = {name: value.clone() for name, value in swin_tiny.body.state_dict().items()}
    if layout == "folder":
        path = tmp_path / "swin"
        swin_tiny.body.save_pretrained(path)
    elif layout == "old":  # a classifier, without the norms behind the stages
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
        assert_same(backbone.eval()(images()), swin_tiny(images()))


def test_a_file_that_does_not_fit_is_refused(resnet18, tmp_path):
    def message(**changes: Tensor | None) -> str:
        path = tmp_path / "changed.safetensors"
        state = load_file(resnet18) | {name.replace("__", "."): value for name, value in changes.items()}
        save_file({name: value for name, value in state.items() if value is not None}, path)
        with pytest.raises(ValueError, match=r"expected weights that fit resnet18, got .*changed") as e:
            build_backbone(BackboneSettings("resnet18", weights=str(path)))
        return str(e.value)

    assert 'Missing key(s) in state_dict: "layer3.0.conv1.weight"' in message(layer3__0__conv1__weight=None)
    assert 'Unexpected key(s) in state_dict: "layer5.weight"' in message(layer5__weight=torch.zeros(3))
    assert "size mismatch for layer2.0.bn1.bias" in message(layer2__0__bn1__bias=torch.zeros(3))


def test_a_file_of_another_model_is_refused_in_few_words(resnet18):
    for name, key in [("resnet50", "layer1.0.conv3.weight"), ("swin_tiny", "bn1.bias")]:
        with pytest.raises(ValueError, match=f"expected weights that fit {name}, got .*resnet18.safetensors") as caught:
            build_backbone(BackboneSettings(name, weights=str(resnet18)))
        assert key in str(caught.value)
        assert len(str(caught.value)) < 1500


def test_a_half_empty_swin_is_refused(swin_tiny, tmp_path):
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
    """Unpickling it is noticed."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was read",)


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny"])
@pytest.mark.parametrize("file", ["weights.pth", "weights.safetensors"])
def test_a_pickle_is_refused_unread(name, file, tmp_path):
    (tmp_path / file).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"expected weights in a \.safetensors file, got .*weights.*convert it"):
        build_backbone(BackboneSettings(name, weights=str(tmp_path / file)))


def test_no_weights_where_they_should_be(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"BackboneSettings: expected weights .*none\.safetensors"):
        build_backbone(BackboneSettings("resnet18", weights=str(tmp_path / "none.safetensors")))
    save_file({}, tmp_path / "empty.safetensors")  # timm would go and download others
    with pytest.raises(ValueError, match="got a file without tensors"):
        build_backbone(BackboneSettings("resnet18", weights=str(tmp_path / "empty.safetensors")))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"expected weights in a folder with model\.safetensors"):
        build_backbone(BackboneSettings("swin_tiny", weights=str(tmp_path)))


def deformable_resnet18(**settings: object) -> Backbone:
    torch.manual_seed(0)
    backbone = build_backbone(BackboneSettings("resnet18", deformable_groups=4, **settings))  # type: ignore[arg-type]
    return shaken(backbone)


def test_deformable_layer_starts_as_the_plain_one():
    torch.manual_seed(0)
    plain = nn.Conv2d(8, 6, 3, stride=2, padding=2, dilation=2, groups=2)
    layer = DeformableConv2d(plain, offset_groups=4)
    features = torch.randn(2, 8, 9, 12)
    torch.testing.assert_close(layer(features), plain(features))
    layer(features).square().sum().backward()
    gradient = layer.predictor.weight.grad
    assert gradient is not None
    offsets, logits = gradient.split([72, 36])
    assert offsets.flatten(1).any(1).all()
    assert logits.flatten(1).any(1).all()


def test_deformable_layer_samples_where_the_offsets_say():
    plain = nn.Conv2d(2, 1, 3, padding=1, bias=False)
    layer = DeformableConv2d(plain, offset_groups=2)
    predicted = layer.predictor.get_parameter("bias")
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:, :, 1, 1] = 1  # passes the middle of both channels
        bias = predicted[:36].view(2, 9, 2)  # group, cell, (y, x)
        bias[0, 4, 0] = 1  # the first channel is read one row below,
        bias[1, 4, 1] = 0.5  # the second half a column to the right
        predicted[36:].view(2, 9)[1, 4] = -30  # and then left out
    features = torch.rand(1, 2, 4, 5)
    below = nn.functional.pad(features[:, :1], (0, 0, 0, 1))[:, :, 1:]
    torch.testing.assert_close(layer(features), below)  # the mask of the first is 2 sigmoid(0) = 1
    with torch.no_grad():
        predicted[36:] = 0
    right = nn.functional.pad(features[:, 1:], (0, 1))[..., 1:]
    torch.testing.assert_close(layer(features), below + (features[:, 1:] + right) / 2)


def test_deformable_network_starts_as_the_plain_one(resnet18):
    plain = build_backbone(BackboneSettings("resnet18", weights=str(resnet18)))
    deformable = build_backbone(BackboneSettings("resnet18", weights=str(resnet18), deformable_groups=4))
    for got, wanted in zip(deformable(images()), plain(images()), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "per_block"), [("resnet18", ["conv1", "conv2"]), ("resnet50", ["conv2"])])
def test_which_layers_are_deformable(name, per_block):
    backbone = build_backbone(BackboneSettings(name, deformable_groups=4))
    depths = {"resnet18": [2, 2, 2], "resnet50": [4, 6, 3]}[name]
    wanted = [
        f"body.layer{stage}.{block}.{layer}"
        for stage, depth in zip([2, 3, 4], depths, strict=True)
        for block in range(depth)
        for layer in per_block
    ]
    layers = {name: part for name, part in backbone.named_modules() if isinstance(part, DeformableConv2d)}
    assert list(layers) == wanted
    assert {layer.predictor.out_channels for layer in layers.values()} == {3 * 4 * 9}


def test_deformable_offsets_are_trained():
    backbone = deformable_resnet18(batch_norm="frozen")
    total(backbone(images())).backward()
    predictors = {name: p for name, p in backbone.named_parameters() if ".predictor." in name}
    assert len(predictors) == 24
    assert [name for name, p in predictors.items() if p.grad is None or not p.grad.any()] == []
    assert with_gradient(backbone) == trainable(backbone)


def test_deformable_state_makes_the_round_trip():
    first, second = (
        deformable_resnet18().eval(),
        build_backbone(BackboneSettings("resnet18", deformable_groups=4)).eval(),
    )
    for part in first.modules():
        if isinstance(part, DeformableConv2d):
            nn.init.normal_(part.predictor.get_parameter("bias"), std=0.5)
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        assert_same(second(images()), first(images()))


def test_deformable_under_autocast():
    backbone = deformable_resnet18().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        half = backbone(images())
    with torch.no_grad():
        full = backbone(images())
    for got, wanted in zip(half, full, strict=True):
        assert (got.float() - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny"])
@pytest.mark.parametrize("frozen_stages", [0, 1])
def test_checkpointing_changes_no_gradient(name, frozen_stages):
    gradients: list[list[Tensor]] = []
    stored: list[int] = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        settings = BackboneSettings(name, frozen_stages=frozen_stages, batch_norm="frozen", checkpointing=checkpointing)
        backbone = shaken(build_backbone(settings))
        torch.manual_seed(3)  # drop path
        kept: list[Tensor] = []

        def keep(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = total(backbone(images(32, 64)))
        stored.append(sum(tensor.numel() for tensor in kept if not tensor.is_leaf))
        loss.backward()
        assert with_gradient(backbone) == trainable(backbone)
        gradients.append([p.grad for p in backbone.parameters() if p.grad is not None])
    assert stored[1] < 0.7 * stored[0]
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_checkpointing_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.delattr(timm.models._features.FeatureDictNet, "set_grad_checkpointing")
    with pytest.raises(ValueError, match="BackboneSettings: expected checkpointing=False for 'resnet18'"):
        build_backbone(BackboneSettings("resnet18", checkpointing=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "resnet5o"}, r"expected name .*, got 'resnet5o'; the nearest names are .*resnet50"),
        ({"name": "swin_tinny"}, r"got 'swin_tinny'; the nearest names are swin_tiny"),
        ({"name": "?"}, r"got '\?'; see timm.list_models"),
        ({"batch_norm": "x"}, "expected batch_norm to be one of auto, frozen, trained, got 'x'"),
        ({"frozen_stages": 5}, "expected frozen_stages from 0 to 4 or None, got 5"),
        ({"deformable_groups": -1}, "expected deformable_groups of at least 0, got -1"),
        ({"name": "swin_tiny", "deformable_groups": 4}, "expected deformable_groups=0 for swin_tiny, got 4"),
        ({"weights": ""}, "expected weights to be None, 'pretrained' or a path, got ''"),
    ],
)
def test_settings_name_what_is_wrong(settings, message):
    with pytest.raises(ValueError, match=f"^BackboneSettings: .*{message}"):
        BackboneSettings(**settings).check_name()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "swin_tiny_patch4_window7_224"},
            "for images of any size, got .* for 224 x 224; for Swin take swin_tiny",
        ),
        (
            {"name": "regnety_002", "deformable_groups": 4},
            "expected deformable_groups=0, since name is not one of timm's",
        ),
        ({"name": "resnet18", "deformable_groups": 3}, "deformable_groups to divide the 64 channels .*layer2.*, got 3"),
    ],
)
def test_models_that_cannot_do_it_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"^BackboneSettings: .*{message}"):
        build_backbone(BackboneSettings(**settings))


def test_a_model_without_the_four_strides_is_refused():
    with pytest.raises(
        ValueError, match=r"maps at strides \[4, 8, 16, 32\], got 'vit' with \[16, 16\] and none at \[4,"
    ):
        module._positions("vit", [16, 16])
    assert module._positions("two maps at 8", [2, 4, 8, 8, 16, 32]) == [1, 3, 4, 5]


def test_maps_of_another_layout_are_refused():
    class ChannelsLast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(3, 7, stride, stride) for stride in (4, 8, 16, 32))

        def forward(self, images: Tensor) -> list[Tensor]:
            return [layer(images).permute(0, 2, 3, 1) for layer in self.layers]

    with pytest.raises(
        ValueError, match=r"Backbone: expected maps \(C, H, W\) of \[\(7, 8, 16\), .*got \[\(8, 16, 7\)"
    ):
        Backbone(ChannelsLast(), maps=[0, 1, 2, 3], channels=[7] * 4)


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No hub, and nothing in its cache."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.socket() as bound:  # bound, but not listening: whoever connects is refused
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{bound.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setitem(module.SWIN_HUB, "swin_tiny", "nobody/has-this")
        yield


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny"])
def test_without_a_network_it_is_said_at_once(name, nowhere, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(ConnectionError) as raised:
        build_backbone(BackboneSettings(name, weights="pretrained"))
    assert str(raised.value) == (
        f"the pretrained weights of {name} cannot be downloaded (no connection to 127.0.0.1); give a file by "
        "--backbone.weights FILE.safetensors, or start from random ones by --backbone.weights null"
    )
    assert waits == [], "the hub's library would try again, and again"
    assert not constants.HF_HUB_OFFLINE, "for others, as it was"


def test_without_a_network_the_cache_is_read(nowhere, monkeypatch):
    offline: list[bool] = []

    def create(name, **options):
        offline.append(constants.HF_HUB_OFFLINE)
        return usual(name, features_only=True)

    usual = timm.create_model
    monkeypatch.setattr(timm, "create_model", create)
    build_backbone(BackboneSettings("resnet18", weights="pretrained"))
    assert offline == [True]
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        build_backbone(BackboneSettings("resnet18", weights="pretrained"))
    assert offline == [True, False]


def test_a_proxy_may_know_the_way(nowhere, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    assert module._reachable(constants.ENDPOINT)
