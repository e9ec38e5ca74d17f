"""Published checkpoints: what is recognised, what is refused, and which class rows a new detector takes."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models import swin_t
from torchvision.ops import deform_conv2d

from bucketrank.cli import main
from bucketrank.detectors import build
from bucketrank.detectors.backbone import SWIN as SWIN_SETTINGS
from bucketrank.errors import WeightsError
from bucketrank.weights import load_model, read_weights
from bucketrank.weights.atomic import write_tensors
from bucketrank.weights.load import load_initial_weights
from bucketrank.weights.published import convert_published
from bucketrank.weights.published_file import Checkpoint, Inert, read_checkpoint
from bucketrank.weights.published_recognition import coco_classes, recognise
from bucketrank.weights.published_table import (
    LAST_NORM,
    MMDET_SWIN,
    RESNET,
    SWIN,
    UNUSED,
    original_merging,
)
from bucketrank.weights.tensor_table import translate

from .published_cases import CASES, FOLDER, Case

EMPTY = torch.zeros(())


def shapes(name: str) -> dict[str, list[int]]:
    """Return the published keys and shapes of a model, with or without reference outputs."""
    if name in CASES:
        return dict(json.loads(str(Case.read(name).arrays["state_dict"])))
    found: dict[str, list[int]] = json.loads((FOLDER / f"{name}.json").read_text())["state_dict"]
    return found


def hollow(name: str) -> dict[str, Tensor]:
    """Return tensors of zeros that take no memory, under the published keys."""
    integers = ("num_batches_tracked", "relative_position_index")
    return {
        key: (EMPTY.long() if key.endswith(integers) else EMPTY).expand(shape) for key, shape in shapes(name).items()
    }


def write(path: Path, state: dict[str, Tensor], **meta: Any) -> Path:
    torch.save({"meta": meta, "state_dict": OrderedDict(state)}, path)
    return path


@pytest.mark.parametrize(
    ("name", "detector", "backbone", "loss"),
    [
        ("atss_brs", "atss", "resnet50", "rs"),
        ("atss_focal", "atss", "resnet50", "focal"),
        ("paa_brs", "paa", "resnet50", "rs"),
        ("paa_focal", "paa", "resnet50", "focal"),
        ("retinanet_focal", "retinanet", "resnet50", "focal"),
        ("faster_rcnn_brs", "faster_rcnn", "resnet50", "rs"),
        ("faster_rcnn_ce", "faster_rcnn", "resnet50", "ce"),
        ("faster_rcnn_brs_r101_dcn", "faster_rcnn", "resnet101", "rs"),
        ("cascade_rcnn_brs", "cascade_rcnn", "resnet50", "rs"),
        ("cascade_rcnn_ce", "cascade_rcnn", "resnet50", "ce"),
        ("mask_rcnn_brs", "mask_rcnn", "resnet50", "rs"),
        ("mask_rcnn_ce", "mask_rcnn", "resnet50", "ce"),
        ("co_deformable_detr_brs", "co_detr", "resnet50", "rs"),
        ("co_deformable_detr_focal", "co_detr", "resnet50", "focal"),
        ("co_deformable_detr_brs_swin_tiny", "co_detr", "swin_tiny", "rs"),
        ("co_dino_5scale_r50", "co_dino", "resnet50", "qfl"),
        ("co_dino_5scale_swin_l", "co_dino", "swin_large", "qfl"),
    ],
)
def test_detectors_are_recognised_from_their_keys(name, detector, backbone, loss):
    checkpoint = Checkpoint(Path(f"{name}.pth"), hollow(name), None, "")
    source = recognise(checkpoint)
    assert (source.detector, source.recipe["backbone"]["name"], source.recipe["loss"]["name"], source.num_classes) == (
        detector,
        backbone,
        loss,
        80,
    )
    translated = translate(checkpoint.state, source.table)
    assert translated.unknown == []
    assert source.recipe["backbone"].get("deformable_groups", 0) == (4 if "dcn" in name else 0)


# Those without reference outputs; test_published_parity converts the others.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "paa_focal",
        "cascade_rcnn_ce",
        "mask_rcnn_ce",
        "faster_rcnn_brs_r101_dcn",
        "co_deformable_detr_focal",
        "co_deformable_detr_brs_swin_tiny",
    ],
)
def test_every_key_has_a_place_and_every_tensor_is_filled(name, tmp_path):
    converted = convert_published(write(tmp_path / f"{name}.pth", hollow(name)))
    parameters = json.loads((FOLDER / f"{name}.json").read_text())["parameters"]
    unused = sum(
        p.numel() for key, p in converted.model.named_parameters() if "swin.layernorm" in key or "stage1" in key
    )
    assert sum(each.numel() for each in converted.model.parameters()) - unused == parameters
    assert converted.keys == len(shapes(name))


@pytest.mark.slow
def test_the_model_file_is_complete(tmp_path, capsys):
    """The command writes a file that loads as the detector, with the names, ids, thresholds and origin."""
    checkpoint = Case.read("atss_focal").checkpoint(tmp_path, CLASSES=tuple(coco_classes()[0]), mmdet_version="2.25.3")
    out = tmp_path / "model.safetensors"
    assert main(["convert-weights", str(checkpoint), "--out", str(out)]) == 0
    assert "atss with resnet50, trained with focal; 369 of 369 keys, 80 classes" in capsys.readouterr().out
    model, meta = load_model(out)
    assert meta.classes[:2] + meta.classes[-1:] == ["person", "bicycle", "toothbrush"]
    assert meta.category_ids[:2] + meta.category_ids[-1:] == [1, 2, 90]
    assert meta.threshold == model.stored_threshold == 0.3
    assert meta.origin["file"] == "atss_focal.pth"
    assert meta.origin["mmdet_version"] == "2.25.3"
    assert len(meta.origin["sha256"]) == 64
    assert meta.recipe["detector"]["score_threshold"] == 0.05
    assert read_weights(out)[1] == meta
    with torch.no_grad():
        (found,) = model([torch.rand(3, 64, 96)])
    assert set(found) == {"boxes", "labels", "scores"}


class TestFiles:
    """Formats of MMDetection 2 and 3, and files that are refused."""

    def test_class_names_of_both_versions(self, tmp_path):
        state = hollow("retinanet_focal")
        described: list[dict[str, Any]] = [
            {"CLASSES": ("cat", "dog")},
            {"dataset_meta": {"classes": ("cat", "dog")}},
            {"dataset_meta": {"CLASSES": ["cat", "dog"]}},
        ]
        for number, meta in enumerate(described):
            assert read_checkpoint(write(tmp_path / f"{number}.pth", state, **meta)).classes == ["cat", "dog"]
        assert read_checkpoint(write(tmp_path / "none.pth", state)).classes is None
        assert read_checkpoint(write(tmp_path / "one.pth", state, CLASSES="cat")).classes == ["cat"]

    def test_a_wrapped_model_and_a_bare_state(self, tmp_path):
        state = hollow("retinanet_focal")
        torch.save({f"module.{key}": tensor for key, tensor in state.items()}, tmp_path / "bare.pth")
        assert read_checkpoint(tmp_path / "bare.pth").state.keys() == state.keys()

    def test_the_format_of_older_versions_of_torch(self, tmp_path):
        """Checkpoints of 2020 are no archives."""
        content = {"meta": {"CLASSES": ("cat",)}, "state_dict": OrderedDict(x=torch.arange(3.0))}
        torch.save(content, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
        checkpoint = read_checkpoint(tmp_path / "old.pth")
        assert checkpoint.classes == ["cat"]
        assert checkpoint.state["x"].tolist() == [0, 1, 2]

    def test_a_checkpoint_given_as_weights_is_told_how_to_become_some(self, tmp_path):
        file = write(tmp_path / "brs_atss.pth", {"x": torch.ones(1)})
        with pytest.raises(
            WeightsError, match=r"MMDetection checkpoint with: bucketrank convert-weights .*brs_atss\.pth"
        ):
            load_model(file)

    def test_averaged_copies(self, tmp_path):
        plain = {"backbone.conv1.weight": torch.zeros(2), "backbone.bn1.num_batches_tracked": torch.tensor(3)}
        file = write(tmp_path / "ema.pth", plain | {"ema_backbone_conv1_weight": torch.ones(2)})
        assert read_checkpoint(file).state.keys() == plain.keys()
        assert read_checkpoint(file).state["backbone.conv1.weight"].tolist() == [0, 0]
        averaged = read_checkpoint(file, ema=True).state
        assert averaged["backbone.conv1.weight"].tolist() == [1, 1]
        assert averaged["backbone.bn1.num_batches_tracked"] == 3
        with pytest.raises(WeightsError, match="expected copies with the prefix ema_, got none; leave out --ema"):
            read_checkpoint(write(tmp_path / "plain.pth", plain), ema=True)

    def test_histories_of_mmengine_are_ignored(self, tmp_path, monkeypatch):
        """mmengine pickles the history of every loss, with arrays of numpy and methods by name."""
        module = types.ModuleType("mmengine.logging.history_buffer")
        source = (
            "class HistoryBuffer:\n"
            "    def mean(self): return 0\n"
            "    def __getstate__(self): return self.__dict__ | {'statistics_methods': {'mean': HistoryBuffer.mean}}\n"
        )
        exec(source, module.__dict__)
        for name in ("mmengine", "mmengine.logging"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        buffer = module.HistoryBuffer()
        buffer.history = np.arange(3.0)
        content = {
            "meta": {"dataset_meta": {"classes": ("cat",)}},
            "state_dict": {"backbone.conv1.weight": torch.ones(2)},
            "message_hub": {"log_scalars": {"loss": buffer, "last": np.float64(1.5)}},
        }
        torch.save(content, tmp_path / "new.pth")
        for name in ("mmengine", "mmengine.logging", module.__name__):
            monkeypatch.delitem(sys.modules, name)
        checkpoint = read_checkpoint(tmp_path / "new.pth")
        assert checkpoint.classes == ["cat"]
        assert checkpoint.state["backbone.conv1.weight"].tolist() == [1, 1]

    @pytest.mark.parametrize("form", ["zip", "plain pickle", "in the metadata"])
    @pytest.mark.parametrize("function", [os.system, exec, eval, open, __import__])
    def test_a_pickle_that_would_run_code_is_refused(self, form, function, tmp_path):
        marker = tmp_path / "executed"
        arguments = {
            os.system: (f"touch {marker}",),
            exec: (f"open({str(marker)!r}, 'w')",),
            eval: (f"open({str(marker)!r}, 'w')",),
            open: (str(marker), "w"),
            __import__: ("antigravity",),
        }[function]

        class Trap:
            def __reduce__(self):
                return function, arguments

        file = tmp_path / "trap.pth"
        if form == "plain pickle":
            file.write_bytes(pickle.dumps({"state_dict": Trap()}))
        else:
            state = {"backbone.conv1.weight": torch.ones(2)}
            torch.save(
                {"state_dict": Trap()} if form == "zip" else {"state_dict": state, "meta": {"config": Trap()}}, file
            )
        with pytest.raises(WeightsError) as caught:
            convert_published(file)
        assert not marker.exists()
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(f"{file}: expected ")

    def test_the_stand_ins_cannot_reach_a_function(self, tmp_path):
        """``getattr`` is allowed in name only: what it returns is inert and cannot be called."""

        class Reach:
            def __reduce__(self):
                return getattr, (OrderedDict, "fromkeys")

        torch.save({"state_dict": {"x": torch.ones(1)}, "meta": {"found": Reach()}}, tmp_path / "reach.pth")
        assert read_checkpoint(tmp_path / "reach.pth").state.keys() == {"x"}
        assert not callable(Inert(OrderedDict, "fromkeys"))

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
    def test_truncated_files(self, share, tmp_path):
        file = write(tmp_path / "whole.pth", {"backbone.conv1.weight": torch.rand(64, 64)})
        content = file.read_bytes()
        cut = tmp_path / "cut.pth"
        cut.write_bytes(content[: int(share * len(content))])
        with pytest.raises(WeightsError, match=r"got a truncated, damaged or other file; download it again$") as caught:
            read_checkpoint(cut)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([1, 2], "expected a checkpoint with a state_dict, got none"),
            ({"state_dict": {}}, "expected a checkpoint with a state_dict, got none"),
            (
                {"state_dict": {"model.0.weight": torch.ones(1)}},
                "expected a ResNet-50, -101 or -152 or a Swin as backbone",
            ),
            ({"state_dict": {"bbox_head.gfl_cls.weight": torch.ones(1)}}, "got GFL; choose another checkpoint"),
        ],
    )
    def test_other_content(self, content, message, tmp_path):
        torch.save(content, tmp_path / "file.pth")
        with pytest.raises(WeightsError, match=message):
            convert_published(tmp_path / "file.pth")

    @pytest.mark.parametrize(
        ("tensor", "message"),
        [
            (EMPTY.expand(2**20, 2**20), "expected at most 1,073,741,824 numbers, got 1,099,511,627,776"),
            (torch.empty(3, device="meta"), "expected dense tensors, got another kind in 'backbone.conv1.weight'"),
        ],
    )
    def test_tensors_that_are_not_there(self, tensor, message, tmp_path):
        """A file of a few hundred bytes can describe a tensor of terabytes."""
        with pytest.raises(WeightsError, match=message):
            read_checkpoint(write(tmp_path / "file.pth", {"backbone.conv1.weight": tensor}))

    def test_a_missing_file(self, tmp_path, capsys):
        assert main(["convert-weights", str(tmp_path / "none.pth"), "--out", str(tmp_path / "model.safetensors")]) == 1
        assert "none.pth: expected a checkpoint of MMDetection, got no such file; correct" in capsys.readouterr().err
        with pytest.raises(WeightsError, match="expected a checkpoint of MMDetection, got a folder"):
            read_checkpoint(tmp_path)

    def test_a_file_that_needs_no_conversion(self, tmp_path):
        write_tensors(tmp_path / "ours.safetensors", {"x": torch.ones(1)}, {"bucketrank": "1"})
        with pytest.raises(WeightsError, match="is already a bucketrank model file; use it as it is"):
            read_checkpoint(tmp_path / "ours.safetensors")


class TestRefusals:
    """Checkpoints of the right form whose tensors do not fit."""

    def source(self, state, name="file_atss_.pth", config="", classes=None):
        return recognise(Checkpoint(Path(name), state, classes, config))

    def test_atss_and_paa_need_a_hint(self):
        state = hollow("atss_focal")
        assert self.source(state, "paa_r50_fpn_1x_coco_20200821-936edec3.pth").detector == "paa"
        assert (
            self.source(state, "x.pth", config="model = dict(type='PAA', bbox_head=dict(type='PAAHead'))").detector
            == "paa"
        )
        assert recognise(Checkpoint(Path("x.pth"), state, None, ""), detector="atss").detector == "atss"
        with pytest.raises(WeightsError, match=r"tells ATSS from PAA.*; add --detector atss or --detector paa"):
            self.source(state, "best.pth")

    def test_other_backbones(self):
        state = hollow("retinanet_focal")
        with pytest.raises(WeightsError, match="PyTorch's style, got Caffe's"):
            self.source(state, "retinanet_r50_caffe_fpn_1x_coco.pth")
        dcn = hollow("faster_rcnn_brs_r101_dcn")
        dcn |= {
            key: EMPTY.expand(18, *each.shape[1:]) for key, each in dcn.items() if key.endswith("conv_offset.weight")
        }
        with pytest.raises(WeightsError, match="got DCNv1"):
            self.source(dcn)

    def test_class_names_must_fit(self, tmp_path):
        file = write(tmp_path / "retinanet.pth", hollow("retinanet_focal"), CLASSES=("cat", "dog"))
        with pytest.raises(
            WeightsError, match="expected the names of 80 classes, got 2; give them in order with --classes"
        ):
            convert_published(file)

    def test_sizes_that_build_no_detector(self, tmp_path):
        state = hollow("retinanet_focal")
        state["bbox_head.retina_reg.weight"] = EMPTY.expand(4 * 3000, 1, 1, 1)
        state["bbox_head.retina_cls.weight"] = EMPTY.expand(80 * 3000, 1, 1, 1)
        with pytest.raises(WeightsError, match=r"got sizes that build none \(it has many more") as caught:
            convert_published(write(tmp_path / "retinanet.pth", state))
        assert "\n" not in str(caught.value)

    @pytest.mark.slow
    def test_missing_unknown_and_broken_tensors(self, tmp_path):
        state = hollow("retinanet_focal")
        del state["neck.lateral_convs.1.conv.bias"]
        state["bbox_head.extra.weight"] = EMPTY.expand(3)
        state["backbone.bn1.weight"] = EMPTY.expand(32)
        state["backbone.bn1.bias"] = torch.full((64,), torch.nan)
        with pytest.raises(WeightsError) as caught:
            convert_published(write(tmp_path / "retinanet.pth", state))
        message = str(caught.value)
        assert "1 unknown (bbox_head.extra.weight), 1 missing (neck.pyramid.inner_blocks.1.0.bias)" in message
        assert "1 of another shape (backbone.body.bn1.weight), 1 not finite (backbone.body.bn1.bias)" in message
        assert message.endswith("; the file is incomplete or of another architecture")


def test_deformable_convolutions_are_halved():
    """Published: sigmoid(m) w. Ours: 2 sigmoid(m) w / 2."""
    torch.manual_seed(0)
    state = {
        "backbone.layer2.0.conv2.weight": torch.randn(128, 128, 3, 3),
        "backbone.layer2.0.conv2.conv_offset.weight": 0.1 * torch.randn(108, 128, 3, 3),
        "backbone.layer2.0.conv2.conv_offset.bias": torch.randn(108),
    }
    translated = translate(state, RESNET).state
    model: Any = build("faster_rcnn", num_classes=1, backbone="resnet50", deformable_groups=4)
    layer = model.backbone.body.layer2[0].conv2
    start = "backbone.body.layer2.0.conv2."
    layer.load_state_dict({key.removeprefix(start): tensor for key, tensor in translated.items()})
    layer.stride = layer.predictor.stride = (1, 1)
    feature = torch.randn(1, 128, 7, 9)
    weight, offset_weight, bias = state.values()
    first, second, mask = F.conv2d(feature, offset_weight, bias, padding=1).chunk(3, 1)
    expected = deform_conv2d(feature, torch.cat([first, second], 1), weight, padding=1, mask=mask.sigmoid())
    torch.testing.assert_close(layer(feature), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["paper", "mmdet"])
def test_swin_against_torchvision(layout):
    """torchvision's Swin-T has the layout of the paper's code under other names."""
    torch.manual_seed(0)
    theirs: Any = swin_t(weights=None).eval()
    for name, parameter in theirs.named_parameters():
        if "norm" in name or name.endswith(("bias", "bias_table")):
            torch.nn.init.normal_(parameter, mean=float(name.endswith("norm1.weight")), std=0.5)
    state, norms = {}, {f"norm{i}": torch.nn.LayerNorm(96 * 2**i) for i in range(4)}
    for name, tensor in theirs.features.state_dict().items():
        stage, rest = name.split(".", 1)
        number = int(stage)
        if number == 0:
            head = "proj" if rest.startswith("0") else "norm"
            state[f"backbone.patch_embed.{head}.{rest.rpartition('.')[2]}"] = tensor
        elif number % 2:
            block, part = rest.split(".", 1)
            part = part.replace("mlp.0", "mlp.fc1").replace("mlp.3", "mlp.fc2")
            state[f"backbone.layers.{number // 2}.blocks.{block}.{part}"] = tensor
        else:
            state[f"backbone.layers.{number // 2 - 1}.downsample.{rest}"] = tensor
    state |= {f"backbone.{name}.{key}": each for name, norm in norms.items() for key, each in norm.state_dict().items()}
    if layout == "mmdet":
        state = {
            mmdet_name(key): unfold_order(tensor) if "downsample" in key else tensor for key, tensor in state.items()
        }
    translated = translate(state, SWIN if layout == "paper" else MMDET_SWIN)
    assert translated.unknown == []
    ours = build(
        "co_detr", num_classes=1, backbone="swin_tiny", channels=32, auxiliary=(), encoder_layers=1
    ).backbone.eval()
    own = {name.removeprefix("backbone."): tensor for name, tensor in translated.state.items()}
    report = ours.load_state_dict(own, strict=False)
    assert report.unexpected_keys == []
    assert {key.removesuffix(".weight").removesuffix(".bias") for key in report.missing_keys} == {"body.swin.layernorm"}

    image = torch.randn(1, 3, 252, 276)  # torchvision does not shift windows as large as the map
    with torch.no_grad():
        hidden, expected = image, []
        for number, module in enumerate(theirs.features):
            hidden = module(hidden)
            if number % 2:
                expected.append(norms[f"norm{number // 2}"](hidden).permute(0, 3, 1, 2))
        for feature, reference in zip(ours(image), expected, strict=True):
            assert reference.abs().mean() > 0.1
            torch.testing.assert_close(feature, reference, rtol=1e-4, atol=1e-4)


def mmdet_name(key: str) -> str:
    changes = (
        ("layers.", "stages."),
        ("attn.", "attn.w_msa."),
        ("mlp.fc1", "ffn.layers.0.0"),
        ("mlp.fc2", "ffn.layers.1"),
    )
    for old, new in (*changes, ("patch_embed.proj.", "patch_embed.projection.")):
        key = key.replace(old, new)
    return key


def unfold_order(weight: Tensor) -> Tensor:
    """Return a weight for the merged tokens in the order in which Unfold merges them."""
    channels = weight.shape[-1] // 4
    # Entry k of the paper's order, at neighbour (y, x) and channel c, is found by unfolding an image of numbers.
    y, x = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    numbers = torch.empty(1, channels, 2, 2)
    for neighbour in range(4):
        numbers[0, :, y[neighbour], x[neighbour]] = torch.arange(channels) + neighbour * channels
    order = F.unfold(numbers, 2, stride=2)[0, :, 0].long()
    torch.testing.assert_close(original_merging(order), torch.arange(4 * channels))
    return weight[..., order]


def test_swin_large_has_the_same_layout():
    """From the keys of Swin-T: twice the width, 18 blocks in the third stage, windows of 12."""
    from transformers import SwinBackbone, SwinConfig

    tiny = {
        key: shape for key, shape in shapes("co_deformable_detr_brs_swin_tiny").items() if key.startswith("backbone.")
    }
    large = {}
    for key, shape in tiny.items():
        blocks = range(6, 18, 2) if ".layers.2.blocks.0." in key or ".layers.2.blocks.1." in key else ()
        wide = [size if size in (3, 4) and "proj.weight" in key else 2 * size for size in shape]
        if key.endswith("relative_position_bias_table"):
            wide = [23 * 23, 2 * shape[1]]
        elif key.endswith("relative_position_index"):
            wide = [144, 144]
        large[key] = wide
        for block in blocks:
            number = block + int(".blocks.1." in key)
            large[key.replace(".blocks.0.", f".blocks.{number}.").replace(".blocks.1.", f".blocks.{number}.")] = wide
    heads = {key: each for key, each in hollow("co_deformable_detr_brs_swin_tiny").items() if key not in tiny}
    state = {key: EMPTY.expand(shape) for key, shape in large.items()}
    source = recognise(Checkpoint(Path("x.pth"), state | heads, None, ""))
    assert source.recipe["backbone"]["name"] == "swin_large"
    translated = translate(state, SWIN)
    assert translated.unknown == []
    with torch.device("meta"):
        body = SwinBackbone(
            SwinConfig(**SWIN_SETTINGS["swin_large"], out_features=["stage1", "stage2", "stage3", "stage4"])
        )
    expected = {f"backbone.body.{key}": each.shape for key, each in body.state_dict().items()}
    ours = {key: each.shape for key, each in translated.state.items()}
    assert {key: shape for key, shape in expected.items() if not re.fullmatch(UNUSED, key)} == ours


def test_co_dino_with_swin_large_fills_every_tensor():
    """Its auxiliary heads have the keys of ResNet-50, which test_published_parity converts."""
    state, other = hollow("co_dino_5scale_swin_l"), shapes("co_dino_5scale_r50")
    heads = ("rpn_head.", "roi_head.", "bbox_head.", "query_head.transformer.aux_", "query_head.downsample.")
    for key, shape in other.items():
        assert not key.startswith(heads) or list(state[key].shape) == shape
    source = recognise(Checkpoint(Path("x.pth"), state, None, ""))
    assert source.recipe["detector"]["levels"] == 5
    assert "inputs" not in source.recipe
    large = recognise(Checkpoint(Path("co_dino_5scale_swin_large_16e_o365tococo-614254c9.pth"), state, None, ""))
    assert large.recipe["inputs"] == {"min_size": 1280, "max_size": 2048}
    translated = translate(state, source.table)
    assert translated.unknown == []
    assert len(state) == 713
    with torch.device("meta"):
        model: Any = build("co_dino", num_classes=80, backbone="swin_large", loss="qfl", auxiliary=())
    ours = {key: each.shape for key, each in translated.state.items() if not key.startswith(("auxiliary", "fifth."))}
    expected = {key: each.shape for key, each in model.state_dict().items() if not re.fullmatch(LAST_NORM, key)}
    assert ours == expected


@pytest.mark.slow
class TestClassRows:
    """``--init mmdet:FILE`` with fewer classes and with another loss."""

    def numbered(self, name: str, keys: dict[str, int], folder: Path) -> Path:
        """Write a checkpoint in which the rows of ``keys`` hold their number."""
        state = hollow(name)
        for key in keys:
            rows = len(state[key])
            state[key] = torch.arange(float(rows)).reshape(rows, *[1] * (state[key].dim() - 1)).expand(state[key].shape)
        return write(folder / f"{name}.pth", state)

    def test_faster_rcnn_with_a_ranking_loss(self, tmp_path):
        keys = dict.fromkeys(
            ["roi_head.bbox_head.fc_cls.bias", "roi_head.bbox_head.fc_reg.bias", "rpn_head.rpn_reg.bias"], 0
        )
        file = self.numbered("faster_rcnn_ce", keys, tmp_path)
        model: Any = build("faster_rcnn", num_classes=2, loss="rs")
        assert load_initial_weights(model, f"mmdet:{file}", classes=["dog", "person"]) == []
        # COCO's 80 classes: person is number 0, dog 16; the background is 80.
        assert model.box_head.classes.bias.tolist() == [16 - 80, 0 - 80]
        assert model.box_head.boxes.bias.tolist() == [64, 65, 66, 67, 0, 1, 2, 3]
        assert model.rpn.head.bbox_pred.bias[:8].tolist() == [0, 10, 10, 15, 40, 50, 30, 35]
        other: Any = build("faster_rcnn", num_classes=2, loss="ce")
        skipped = load_initial_weights(other, f"mmdet:{file}", classes=["dog", "unicorn"])
        assert set(skipped) == {
            f"box_head.{layer}.{kind}" for layer in ("classes", "boxes") for kind in ("weight", "bias")
        }

    def test_dense_heads(self, tmp_path):
        file = self.numbered("atss_brs", {"bbox_head.atss_cls.bias": 0}, tmp_path)
        model: Any = build("atss", num_classes=2, loss="rs")
        assert load_initial_weights(model, f"mmdet:{file}", classes=["dog", "person"]) == []
        assert model.head.classes.bias.tolist() == [16, 0, 96, 80, 176, 160]  # three anchors
        with pytest.raises(WeightsError, match="init: expected weights of retinanet, got those of atss"):
            load_initial_weights(build("retinanet", num_classes=2), f"mmdet:{file}", classes=["dog", "person"])

    def test_co_detr(self, tmp_path):
        keys = {f"query_head.cls_branches.{i}.bias": 0 for i in (5, 6)}
        file = self.numbered("co_deformable_detr_focal", keys, tmp_path)
        model: Any = build("co_detr", num_classes=2, loss="rs")
        assert load_initial_weights(model, f"mmdet:{file}", classes=["dog", "person"]) == []
        assert model.decoder.classes[5].bias.tolist() == [16, 0]
        assert model.proposer.classes.bias.tolist() == [0]  # one class of objects, the first row

    def test_co_dino(self, tmp_path):
        keys = {f"query_head.cls_branches.{i}.bias": 0 for i in (5, 6)}
        keys |= {"query_head.dn_generator.label_embedding.weight": 0, "roi_head.0.bbox_head.fc_cls.bias": 0}
        file = self.numbered("co_dino_5scale_r50", keys, tmp_path)
        model: Any = build("co_dino", num_classes=2, loss="rs")
        assert load_initial_weights(model, f"mmdet:{file}", classes=["dog", "person"]) == []
        assert model.decoder.classes[5].bias.tolist() == model.proposer.classes.bias.tolist() == [16, 0]
        assert model.denoising.labels.weight[:, 0].tolist() == [16, 0]
        assert model.auxiliary["faster_rcnn"].roi.classes.bias.tolist() == [16 - 80, 0 - 80]
        plain: Any = build("co_dino", num_classes=80, loss="mal", denoising=0)
        assert load_initial_weights(plain, f"mmdet:{file}", classes=None) == []
        with pytest.raises(WeightsError, match="init: expected weights of co_detr, got those of co_dino"):
            load_initial_weights(build("co_detr", num_classes=2), f"mmdet:{file}", classes=["dog", "person"])

    def test_co_dino_with_missing_and_unknown_tensors(self, tmp_path):
        state = hollow("co_dino_5scale_r50")
        del state["query_head.dn_generator.label_embedding.weight"]
        state["query_head.transformer.pos_trans.weight"] = EMPTY.expand(512, 512)  # Co-DETR's
        with pytest.raises(WeightsError) as caught:
            convert_published(write(tmp_path / "co_dino.pth", state))
        message = str(caught.value)
        assert "1 unknown (selected.encoding.project.weight), 1 missing (denoising.labels.weight)" in message
        assert "\n" not in message
        del state["query_head.transformer.query_embed.weight"]
        with pytest.raises(WeightsError, match=r"got a checkpoint without 'query_head\.transformer\.query_embed"):
            recognise(Checkpoint(Path("x.pth"), state, None, ""))
