"""Models of transformers as detectors of this package: from local folders with random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants

from bucketrank.detectors import build
from bucketrank.detectors.transformers import CLASS_LAYERS, FAMILIES, SquareTransform
from bucketrank.errors import WeightsError
from bucketrank.integrations.transformers.adapter import FAMILY_LOSSES
from bucketrank.settings import from_dict
from bucketrank.weights.files import Meta, save_weights
from bucketrank.weights.load import build_detector, load_model, without_weights

from ..integrations.transformers_models import MODELS
from .tiny_models import squares, transformers_folder

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY_FAMILY = list(MODELS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def small(name: str, folders: Path, **settings: Any) -> Any:
    torch.manual_seed(0)
    return build(f"transformers/{transformers_folder(name, folders)}", num_classes=2, **{"min_size": 64, **settings})


def evil_folder(folder: Path) -> Path:
    """Write a model whose configuration is Python code, which leaves a file when it runs."""
    folder.mkdir(parents=True)
    content = {"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}
    (folder / "config.json").write_text(json.dumps(content))
    code = f"""from pathlib import Path
from transformers import PretrainedConfig
Path({str(folder.resolve() / "executed")!r}).touch()
class EvilConfig(PretrainedConfig):
    model_type = "evil"
"""
    (folder / "configuration_evil.py").write_text(code)
    return folder


def test_the_families_are_those_of_the_adapter():
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES
    assert {mapping[name] for name in FAMILIES} == set(FAMILY_LOSSES)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_all_but_the_class_layers_come_from_the_folder(name, folders):
    model = small(name, folders).model
    stored = transformers.AutoModelForObjectDetection.from_pretrained(transformers_folder(name, folders)).state_dict()
    tensors = model.state_dict()
    assert tensors.keys() == stored.keys()
    new = {key for key in tensors if tensors[key].shape != stored[key].shape}
    assert new
    assert all(any(layer in key for layer in CLASS_LAYERS) for key in new)
    assert all(torch.equal(tensors[key], stored[key]) for key in tensors if key not in new)
    biases = [tensors[key] for key in new if key.endswith("bias")]
    assert all((bias < 0).all() for bias in biases), "a prior for few positives"


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", EVERY_FAMILY)
@pytest.mark.parametrize("loss", ["own", "rs"])
def test_one_step_and_detections(name, loss, folders):
    detector = small(name, folders, loss=loss)
    images, targets = squares(2, side=80)
    losses = detector(images, targets)
    assert all(term.isfinite() and term.dim() == 0 for term in losses.values())
    sum(losses.values()).backward()
    assert any(p.grad is not None and p.grad.any() for p in detector.parameters())
    with torch.no_grad():
        results = detector.eval()(images)
    for result in results:
        assert set(result) == {"boxes", "labels", "scores"}
        assert set(result["labels"].tolist()) <= {1, 2}
        assert 0 <= result["boxes"].min() <= result["boxes"].max() <= 80
        assert (result["scores"].diff() <= 0).all()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_a_stored_recipe_rebuilds_the_model_without_folder_and_hub(name, folders, monkeypatch):
    detector = small(name, folders).eval()
    recipe = from_dict({"detector": {"name": "transformers/gone/away"}, "inputs": {"min_size": 64}})
    recipe = replace(recipe, detector=detector.complete_settings(recipe.detector))
    stored = from_dict(json.loads(json.dumps(without_weights(recipe).to_dict())))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was opened"))
    again = build_detector(stored, num_classes=2).eval()
    assert again.complete_settings(stored.detector) == stored.detector
    again.load_state_dict(detector.state_dict())
    images, _ = squares(1)
    with torch.no_grad():
        torch.testing.assert_close(again(images), detector(images), rtol=0, atol=0)


def test_boxes_are_relative_to_the_image_and_not_to_the_padded_batch(folders):
    detector = small("deformable_detr", folders, min_size=32, max_size=128)
    calls: list[dict[str, Any]] = []
    detector.model.register_forward_pre_hook(lambda _, __, arguments: calls.append(arguments), with_kwargs=True)
    target = {"boxes": torch.tensor([[0.0, 16, 24, 64]]), "labels": torch.tensor([2])}
    detector([torch.rand(3, 64, 48), torch.rand(3, 64, 128)], [target, target])
    (call,) = calls
    assert call["pixel_values"].shape == (2, 3, 42, 64)  # 32 x 42, and 64 x 32 with the padding of a batch
    assert call["pixel_mask"].sum((1, 2)).tolist() == [42 * 32, 32 * 64]
    expected = [[0.25, 0.625, 0.5, 0.75], [0.09375, 0.625, 0.1875, 0.75]]
    torch.testing.assert_close(torch.cat([each["boxes"] for each in call["labels"]]), torch.tensor(expected))
    assert [each["class_labels"].tolist() for each in call["labels"]] == [[1], [1]]


def test_images_are_prepared_as_the_folder_says(folders, tmp_path):
    source = transformers_folder("rt_detr", folders)
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    described = {
        "size": {"height": 96, "width": 96},
        "do_normalize": True,
        "image_mean": [0.1] * 3,
        "image_std": [2] * 3,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(described))
    detector: Any = build(f"transformers/{tmp_path}", num_classes=2)
    assert isinstance(detector.transform, SquareTransform)
    assert (detector.transform.min_size, detector.transform.image_mean) == ((96,), [0.1] * 3)
    batch, _ = detector.transform([torch.rand(3, 40, 60)])
    assert batch.tensors.shape == (1, 3, 96, 96)
    assert json.loads(detector.complete_settings(from_dict_settings(tmp_path)).processor) == described
    usual: Any = build(f"transformers/{source}", num_classes=2)
    assert (usual.transform.min_size, usual.transform.image_std) == ((640,), [1.0] * 3)


@pytest.mark.parametrize(
    ("name", "described", "shorter", "longest"),
    [("deformable_detr", {"size": 60, "max_size": 100}, 60, 100), ("rt_detr", {"size": 96}, 96, 96)],
)
def test_a_size_may_be_a_number_as_older_versions_wrote_it(name, described, shorter, longest, folders, tmp_path):
    for file in transformers_folder(name, folders).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(described))
    detector: Any = build(f"transformers/{tmp_path}", num_classes=2)
    assert (detector.transform.min_size, detector.transform.max_size) == ((shorter,), longest)


def from_dict_settings(folder: Path) -> Any:
    return from_dict({"detector": {"name": f"transformers/{folder}"}}).detector


def test_one_size_is_drawn_for_a_batch(folders):
    torch.manual_seed(0)
    detector: Any = build(f"transformers/{transformers_folder('rt_detr', folders)}", num_classes=2, min_size=(64, 96))
    images = [torch.rand(3, 40, 60), torch.rand(3, 70, 30)]
    shapes = {tuple(detector.transform(images)[0].tensors.shape) for _ in range(20)}
    assert shapes == {(2, 3, 64, 64), (2, 3, 96, 96)}
    detector.eval()
    assert detector.transform(images)[0].tensors.shape[-1] == 96


def test_settings_reach_the_model(folders):
    detector = small("deimv2", folders, freeze_backbone=True, class_cost=4.0, detections=5, score_threshold=0.001)
    names = [name for name, _ in detector.named_parameters() if name.startswith(detector.backbone_prefix)]
    assert names
    assert {name for name, p in detector.named_parameters() if not p.requires_grad} >= set(names)
    with torch.no_grad():
        assert len(detector.eval()(squares(1)[0])[0]["boxes"]) <= 5


@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("rt_detr", {"min_size": 70}, ValueError, "multiples of 32 .*of rt_detr, got 70; the nearest is 64"),
        ("rf_detr", {"min_size": 72}, ValueError, "multiples of 16 .*rf_detr, got 72; the nearest is 64"),
        ("lw_detr", {"min_size": 56}, ValueError, "multiples of 16 .*lw_detr, got 56"),
        ("rt_detr", {"max_size": 90}, ValueError, "max_size: expected null for a model with square inputs"),
        ("rt_detr", {"size_divisor": 64}, ValueError, "size_divisor: expected null for a model with square inputs"),
        ("rt_detr", {"loss": "ce"}, ValueError, "expected one of own, rs, ap, got 'ce'"),
        ("rt_detr", {"loss": "own", "class_cost": 2.0}, ValueError, "class_cost: expected null with the model's own"),
        ("rt_detr", {"weights": "coco"}, ValueError, "detector.weights: expected one of pretrained, got 'coco'"),
    ],
)
def test_what_cannot_be_built(name, settings, error, message, folders):
    with pytest.raises(error, match=message):
        small(name, folders, **settings)


def test_models_that_no_adapter_knows(tmp_path):
    config = transformers.DetrConfig(backbone_config=transformers.ResNetConfig(), d_model=32)
    config.architectures = ["DetrForObjectDetection"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"expected a detector of type deformable_detr, .*got detr in .*softmax"):
        build(f"transformers/{tmp_path}", num_classes=2)


def test_weights_that_do_not_fit(folders, tmp_path):
    for file in transformers_folder("rt_detr", folders).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = transformers_folder("deformable_detr", folders) / "model.safetensors"
    (tmp_path / "model.safetensors").write_bytes(weights.read_bytes())
    with pytest.raises(ValueError, match=r"expected weights that fit the config\.json of .*tensors"):
        build(f"transformers/{tmp_path}", num_classes=2)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"cannot be read \(.*model\.safetensors.*give a folder"):
        build(f"transformers/{tmp_path}", num_classes=2)


def test_without_a_connection(monkeypatch, tmp_path):
    monkeypatch.setattr("bucketrank.weights.sources.is_reachable", lambda address: False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConnectionError, match=r"nobody/has-this cannot be downloaded \(no connection .*give a folder"):
        build("transformers/nobody/has-this", num_classes=2)
    with pytest.raises(FileNotFoundError, match="expected a folder or a name on the hub, got"):
        build("transformers/./has-not-this", num_classes=2)
    with pytest.raises(ValueError, match="expected transformers/MODEL, like transformers/PekingU"):
        build("transformers", num_classes=2)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", ValueError, "detector.config: expected JSON"),
        ("[1]", TypeError, "expected a JSON object"),
        ('{"model_type": "gpt2"}', ValueError, "expected a model_type among deformable_detr"),
    ],
)
def test_stored_configurations_are_checked(text, error, message):
    with pytest.raises(error, match=message):
        build("transformers/a/b", num_classes=2, weights=None, config=text)


def test_private_settings_of_a_configuration_are_dropped(folders):
    from bucketrank.detectors.transformers import parse_config

    hostile = '{"model_type": "rt_detr", "_attn_implementation": "hub/kernel", "backbone_config": {"auto_map": {}}}'
    assert parse_config("config", hostile) == {"model_type": "rt_detr", "backbone_config": {}}


def test_code_in_a_folder_is_never_run(tmp_path, monkeypatch):
    folder = evil_folder(tmp_path / "x" / "evil")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the answer to transformers' question
    with pytest.raises(
        ValueError, match=r"detector.name: expected a model built into transformers, got .* Python code"
    ):
        build(f"transformers/{folder}", num_classes=2)
    assert not (folder / "executed").exists()


def test_a_weights_file_reads_neither_a_folder_nor_the_hub(tmp_path, monkeypatch):
    """The author of the file chose the name of its detector, so that name must not be looked up."""
    monkeypatch.chdir(tmp_path)
    folder = evil_folder(Path("x/evil"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was opened"))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("a name was read"))
    recipe = from_dict({"detector": {"name": "transformers/x/evil"}}).to_dict()
    meta = Meta(classes=["cat"], category_ids=[1], threshold=0.1, recipe=recipe)
    save_weights("w.safetensors", {"weight": torch.zeros(1)}, meta)
    message = "w.safetensors: detector.config: expected the configuration of transformers/x/evil in the recipe inside"
    with pytest.raises(WeightsError, match=message):
        load_model("w.safetensors")
    assert not (folder / "executed").exists()


@pytest.mark.parametrize("backbone", ["hf-hub:evil/model", "local-dir:x/evil", "x/evil", 3])
@pytest.mark.parametrize("nested", [True, False])
def test_a_stored_configuration_names_no_backbone_elsewhere(backbone, nested, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was opened"))
    settings: dict[str, Any] = {"backbone": backbone}
    if nested:
        settings = {"backbone_config": {"model_type": "timm_backbone", **settings}}
    config = json.dumps({"model_type": "conditional_detr", **settings})
    with pytest.raises(ValueError, match=r"detector.config: expected the name of a timm model as backbone, got"):
        build("transformers/a/b", num_classes=2, weights=None, config=config)
