"""A detector that is saved, loaded and uploaded detects the same, to the last bit."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import hub_mixin
from PIL import Image
from safetensors.torch import save_file
from torch.testing import assert_close

import bucketrank
from bucketrank.cli import main
from bucketrank.detectors import Detector, build
from bucketrank.errors import DataError, RecipeError, WeightsError
from bucketrank.evaluation.calibration import Calibration
from bucketrank.inference import TrainedDetector, calibrate_weights, predict
from bucketrank.settings import from_dict
from bucketrank.weights import Meta, load_model, save_weights
from bucketrank.weights.load import build_detector, load_matching_weights, without_weights
from tests.data.small_folders import write_image
from tests.detectors.tiny_models import transformers_folder, use_tiny_torchvision
from tests.inference.hub_server import serving, use_hub
from tests.inference.untrained_weights import CATEGORIES, CLASSES, randomised, write_weights

pytestmark = pytest.mark.usefixtures("one_thread")

CALIBRATION = Calibration(
    method="platt",
    target="match",
    a=(2.0,),
    b=(1.0,),
    d_ece=(0.3, 0.01),
    la_ece=(0.4, 0.02),
    images=12,
    detections=99,
    right=40,
    best_threshold=0.6,
)


@pytest.fixture
def trained(tmp_path: Path) -> TrainedDetector:
    return TrainedDetector.from_pretrained(write_weights(tmp_path / "first.safetensors")[1])


def require_same_detections(one: Detector, other: Detector) -> None:
    images = [torch.rand(3, 90, 110, generator=torch.Generator().manual_seed(2))]
    for first, second in zip(predict(one, images), predict(other, images), strict=True):
        assert first.keys() == second.keys()
        assert len(first["boxes"])
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)


@pytest.mark.parametrize("count", [1, 3])
def test_the_card_shows_detections_in_the_images_given(count: int, trained: TrainedDetector, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = [generator.integers(0, 256, (90, 120, 3), dtype=np.uint8) for _ in range(count)]
    folder = tmp_path / "saved"
    for _ in range(2):  # the same again is no conflict
        trained.save_pretrained(folder, images=images if count > 1 else images[0])
    assert "](detections.jpg)" in (folder / "README.md").read_text()
    with Image.open(folder / "detections.jpg") as picture:
        assert max(picture.size) <= 1600
        assert picture.format == "JPEG"
    trained.save_pretrained(tmp_path / "without")
    assert "detections.jpg" not in (tmp_path / "without" / "README.md").read_text()
    assert not (tmp_path / "without" / "detections.jpg").exists(), "only images that the owner names are published"


def test_a_picture_of_others_is_not_replaced(trained: TrainedDetector, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "detections.jpg")
    with pytest.raises(DataError, match="was not written by bucketrank"):
        trained.save_pretrained(tmp_path, images=torch.rand(3, 90, 120))
    with pytest.raises(ValueError, match="expected 1 to 4 images, got 5"):
        trained.save_pretrained(tmp_path / "new", images=torch.rand(5, 3, 90, 120))


@pytest.mark.parametrize("name", ["atss", "mask_rcnn"])
def test_a_saved_folder_detects_the_same_and_has_the_same_description(name: str, tmp_path: Path) -> None:
    model, path = write_weights(tmp_path / "w.safetensors", name=name, threshold=0.01)
    detector = bucketrank.from_pretrained(path)
    assert detector.save_pretrained(tmp_path / "saved") is None
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    loaded = bucketrank.from_pretrained(tmp_path / "saved")
    assert loaded.meta == detector.meta
    assert loaded.classes == CLASSES
    assert not loaded.model.training
    model.stored_threshold = 0.01
    require_same_detections(model, loaded.model)


def test_a_calibrated_detector_keeps_its_calibration(trained: TrainedDetector, tmp_path: Path) -> None:
    meta = replace(trained.meta.calibrated(CALIBRATION), images={"train": 12, "val": 3})
    TrainedDetector(trained.model, meta).save_pretrained(tmp_path / "saved")
    loaded = TrainedDetector.from_pretrained(tmp_path / "saved")
    assert loaded.meta == meta
    assert loaded.meta.calibration == CALIBRATION
    assert loaded.model.stored_threshold == CALIBRATION.score_map.threshold(0.02)
    require_same_detections(trained.model, loaded.model)


@pytest.mark.parametrize("library", ["torchvision", "transformers"])
def test_models_of_other_libraries(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_torchvision(monkeypatch)
    name = "retinanet_resnet50_fpn" if library == "torchvision" else str(transformers_folder("rt_detr", tmp_path))
    settings = {"name": f"{library}/{name}", "weights": None, "score_threshold": 0.0}
    recipe = from_dict({"detector": settings, "loss": {"name": "own"}})
    torch.manual_seed(0)
    model = randomised(build_detector(recipe, num_classes=3))
    recipe = without_weights(replace(recipe, detector=model.complete_settings(recipe.detector)))
    detector = TrainedDetector(model, Meta(CLASSES, CATEGORIES, 0.0, recipe.to_dict()))
    detector.save_pretrained(tmp_path / "saved")
    require_same_detections(model, bucketrank.from_pretrained(tmp_path / "saved").model)
    card = (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    assert "with backbone" not in card, "these models bring their own"


def test_a_file_without_numbers_of_images_is_read(trained: TrainedDetector) -> None:
    """Files of version 0.1.0.dev0 before sharing have no such entry."""
    assert trained.meta.images == {}


def test_a_run_folder_is_read_and_never_written_to(trained: TrainedDetector, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_weights(run / "weights.safetensors", trained.model, trained.meta)
    assert bucketrank.from_pretrained(run).meta == trained.meta
    with pytest.raises(WeightsError, match="got a run folder; choose another"):
        trained.save_pretrained(run)
    assert [file.name for file in run.iterdir()] == ["weights.safetensors"]


def test_a_card_that_was_edited_is_not_replaced(trained: TrainedDetector, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path / "saved", license="mit")
    trained.save_pretrained(tmp_path / "saved", license="mit")
    before = (tmp_path / "saved" / "model.safetensors").read_bytes()
    (tmp_path / "saved" / "README.md").write_text("mine")
    with pytest.raises(WeightsError, match="delete it to have a new one written"):
        trained.save_pretrained(tmp_path / "saved", license="mit")
    assert (tmp_path / "saved" / "README.md").read_text() == "mine"
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == before


def test_what_does_not_belong_together_is_refused(trained: TrainedDetector) -> None:
    with pytest.raises(ValueError, match="expected as many classes in both, got 3 of the model and 1"):
        TrainedDetector(trained.model, replace(trained.meta, classes=["cat"]))
    with pytest.raises(RecipeError, match="TrainedDetector"):
        TrainedDetector(trained.model, replace(trained.meta, recipe={"detector": {"name": "no-such-detector"}}))


@pytest.mark.parametrize("command", ["predict", "eval"])
def test_commands_take_a_saved_folder(
    command: str, trained: TrainedDetector, shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    categories = {each["id"]: each["name"] for each in json.loads((shapes / "val.json").read_text())["categories"]}
    model = build_detector(from_dict(trained.meta.recipe), num_classes=len(categories))
    meta = replace(trained.meta, classes=list(categories.values()), category_ids=list(categories))
    TrainedDetector(model, meta).save_pretrained(tmp_path / "saved")
    write_image(tmp_path / "a.png", width=96, height=96)
    words = {
        "predict": [tmp_path / "a.png", "--out", tmp_path / "predictions"],
        "eval": [shapes, "--max-images", "1"],
    }[command]
    assert main([command, str(tmp_path / "saved"), *map(str, words)]) == 0, capsys.readouterr().err


def test_a_folder_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(tmp_path), str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"bucketrank: {tmp_path}: expected weights.safetensors of a run or model.safetensors of save_pretrained in the "
        "folder, got neither; choose the folder of a finished run, or a weights file\n"
    )
    (tmp_path / "best.safetensors").touch()
    assert main(["predict", str(tmp_path), str(tmp_path)]) == 1
    assert f"or a weights file ({tmp_path / 'best.safetensors'})\n" in capsys.readouterr().err


def test_calibrate_replaces_files_only(trained: TrainedDetector, shapes: Path, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path / "saved")
    with pytest.raises(WeightsError, match="expected a weights file to replace, got no such file"):
        calibrate_weights(tmp_path / "saved", shapes)


class RecordingApi:
    """Take the place of the hub's API: keep what is uploaded."""

    calls: list[tuple[str, dict[str, Any]]]
    uploads: Path

    def __init__(self, token: str | None = None) -> None:
        self.calls.append(("token", {"token": token}))

    def create_repo(self, **options: Any) -> SimpleNamespace:
        self.calls.append(("create_repo", options))
        return SimpleNamespace(repo_id=options["repo_id"])

    def upload_folder(self, **options: Any) -> str:
        self.calls.append(("upload_folder", options))
        target = self.uploads / options["repo_id"]
        target.parent.mkdir(parents=True)
        Path(options["folder_path"]).rename(target)
        return "https://huggingface.co/me/cats/commit/1"


@pytest.fixture
def recording_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[RecordingApi]:
    monkeypatch.setattr(RecordingApi, "calls", [], raising=False)
    monkeypatch.setattr(RecordingApi, "uploads", tmp_path / "uploads", raising=False)
    monkeypatch.setattr(hub_mixin, "HfApi", RecordingApi)
    return RecordingApi


def test_from_an_upload_to_a_download(
    trained: TrainedDetector, recording_api: type[RecordingApi], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "uploads") as address:
        use_hub(monkeypatch, address, tmp_path / "cache")
        image = torch.rand(3, 90, 120)
        url = trained.push_to_hub("me/cats", license="cc-by-4.0", images=image, private=True, token="secret")
        assert url == "https://huggingface.co/me/cats/commit/1"
        (_, token), (_, created), (_, uploaded) = recording_api.calls
        assert (token["token"], created["private"], uploaded["repo_type"]) == ("secret", True, "model")
        files = sorted(file.name for file in (tmp_path / "uploads" / "me" / "cats").iterdir())
        assert files == ["README.md", "config.json", "detections.jpg", "model.safetensors"]
        card = (tmp_path / "uploads" / "me" / "cats" / "README.md").read_text()
        assert 'bucketrank.from_pretrained("me/cats")' in card
        assert "license: cc-by-4.0" in card
        assert "](detections.jpg)" in card

        monkeypatch.chdir(tmp_path)
        loaded = bucketrank.from_pretrained("me/cats")
        assert loaded.meta == trained.meta
        require_same_detections(trained.model, loaded.model)
        for revision, message in [("main", None), ("no-such-branch", "choose another revision")]:
            if message is None:
                bucketrank.from_pretrained("me/cats", revision=revision)
            else:
                with pytest.raises(WeightsError, match=message):
                    bucketrank.from_pretrained("me/cats", revision=revision)
        write_image(tmp_path / "a.png", width=96, height=96)
        assert main(["predict", "me/cats", "a.png", "--out", "predictions"]) == 0
        model = build("atss", num_classes=5, backbone="test_resnet", channels=32, min_size=96, max_size=128)
        skipped = load_matching_weights(model, "me/cats")
        assert skipped == ["head.classes.weight", "head.classes.bias"], "as --init does"
        trained.save_pretrained(tmp_path / "saved", license="mit", push_to_hub=True, repo_id="you/dogs")
        assert "license: mit" in (tmp_path / "uploads" / "you" / "dogs" / "README.md").read_text()

    # The server has stopped: the cache answers, and a folder of that name comes first.
    require_same_detections(trained.model, bucketrank.from_pretrained("me/cats").model)
    TrainedDetector(trained.model, replace(trained.meta, threshold=0.5)).save_pretrained("me/cats")
    assert bucketrank.from_pretrained("me/cats").meta.threshold == 0.5


def test_errors_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hub" / "me" / "other-model").mkdir(parents=True)
    (tmp_path / "hub" / "me" / "not-ours").mkdir()
    save_file({"weight": torch.zeros(3)}, tmp_path / "hub" / "me" / "not-ours" / "model.safetensors")
    write_image(tmp_path / "a.png", width=96, height=96)
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "hub") as address:
        use_hub(monkeypatch, address, tmp_path / "cache")
        for name, message in {
            "me/other-model": "expected model.safetensors in the repository on 127.0.0.1, got none; choose a "
            "repository that push_to_hub of a bucketrank detector wrote (pickles are never loaded)",
            "me/no-such-model": "expected a file, a folder or a repository on 127.0.0.1, got none of that name; check "
            "the name, and log in with hf auth login if the repository is private",
            "me/not--valid": "expected a file, a folder or a repository on 127.0.0.1, got none of that name",
            "gated/model": "expected access to the repository on 127.0.0.1, got none; ask for access on its page",
            "me/not-ours": "not bucketrank weights",
        }.items():
            assert main(["predict", name, "a.png"]) == 1
            assert message in capsys.readouterr().err


def test_without_a_connection(trained: TrainedDetector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # bound but not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        use_hub(monkeypatch, f"http://127.0.0.1:{bound.getsockname()[1]}", tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConnectionError) as raised:
            load_model("runs/first")
        assert str(raised.value) == (
            "runs/first: expected a file, a folder or a repository on 127.0.0.1; no such file exists, and a repository "
            "cannot be downloaded (no connection to 127.0.0.1); check the name and the connection"
        )
        with pytest.raises(ConnectionError) as raised:
            trained.push_to_hub("me/cats")
        assert str(raised.value) == (
            "me/cats: the detector cannot be uploaded (no connection to 127.0.0.1); check the name and the connection, "
            "and log in with: hf auth login"
        )


def test_one_image_or_many_in_every_form(trained: TrainedDetector, tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (60, 80, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    (expected,) = trained.predict([path], threshold=0.0, device="cpu")
    assert len(expected["scores"]) > 0
    forms: list[Any] = [str(path), path, Image.open(path), pixels, tensor, tensor.float() / 255]
    for one in forms:
        cases: list[tuple[Any, int]] = [(one, 1), ([one], 1), ((one, one), 2), (iter([one, one]), 2)]
        for images, count in cases:
            results = trained.predict(images, threshold=0.0, device="cpu")
            assert len(results) == count
            assert_close(results[-1], expected)
    for several in (np.stack([pixels, pixels]), torch.stack([tensor, tensor])):
        assert len(trained.predict(several, threshold=0.0, device="cpu")) == 2
    with pytest.raises(ValueError, match=r"expected an array \(H, W, 3\) of uint8, got \(60, 80\)"):
        trained.predict(pixels[:, :, 0], device="cpu")
