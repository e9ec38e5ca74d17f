"""``bucketrank calibrate`` on weights whose own detections are the ground truth, so that there is something to fit."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from bucketrank.cli import main
from bucketrank.data import CocoDataset, eval_transform, find_splits, write_shapes
from bucketrank.data import checks as checking
from bucketrank.inference import evaluation as calibrated_weights
from bucketrank.inference.evaluation import evaluate
from bucketrank.weights import load_model, read_weights
from bucketrank.weights.files import save_weights
from tests.inference.untrained_weights import CATEGORIES, CLASSES, write_weights


def annotate(folder: Path, weights: Path) -> None:
    """Replace the annotations by detections: of the best of an image most, of the others few."""
    model, _ = load_model(weights)
    generator = torch.Generator().manual_seed(0)
    for name in ("train", "val"):
        split = getattr(find_splits(folder), name)
        document = split.read()
        annotations: list[dict[str, object]] = []
        for image, target in CocoDataset(split, transform=eval_transform()):  # type: ignore[attr-defined]
            with torch.no_grad():
                (detections,) = model([image])
            for rank, (box, label) in enumerate(zip(detections["boxes"], detections["labels"], strict=True)):
                if float(torch.rand((), generator=generator)) < (0.8 if rank < 8 else 0.05):
                    x1, y1, x2, y2 = box.tolist()
                    entry = {"id": len(annotations) + 1, "image_id": int(target["image_id"]), "iscrowd": 0}
                    place = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}
                    annotations.append({**entry, **place, "category_id": CATEGORIES[int(label) - 1]})
        document["annotations"] = annotations
        document["categories"] = [{"id": i, "name": n} for i, n in zip(CATEGORIES, CLASSES, strict=True)]
        split.annotations.write_text(json.dumps(document), encoding="utf-8")


def test_lvis_rules_on_data_without_frequencies_are_one_line(
    weights_and_data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, data = weights_and_data
    model, meta = load_model(weights)
    recipe = {**meta.recipe, "data": {**meta.recipe.get("data", {}), "style": "lvis"}}
    save_weights(tmp_path / "lvis.safetensors", model, replace(meta, recipe=recipe))
    assert main(["eval", str(tmp_path / "lvis.safetensors"), str(data)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "val.json: " in line
    assert "expected the frequency of every category" in line


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_one_line(
    workers: int,
    weights_and_data: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of many images only the headers are read before the evaluation."""
    weights, data = weights_and_data
    copy = shutil.copytree(data, tmp_path / "data")
    split = find_splits(copy).val
    assert split is not None
    broken = split.image_path(split.read()["images"][2])
    broken.write_bytes(broken.read_bytes()[:-40])
    monkeypatch.setattr(checking, "FEW_IMAGES", 1)
    assert main(["eval", str(weights), str(copy), "--workers", str(workers)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{broken}: the image cannot be decoded" in line


@pytest.fixture(scope="module")
def weights_and_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("calibrate")
    _, weights = write_weights(folder / "weights.safetensors", name="retinanet", threshold=0.012)
    data = write_shapes(folder / "data", train=12, val=6, size=96, seed=3)
    annotate(data, weights)
    return weights, data


def test_the_command_writes_calibrated_weights(
    weights_and_data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, data = weights_and_data
    out = tmp_path / "calibrated.safetensors"
    content = weights.read_bytes()
    assert main(["calibrate", str(weights), str(data), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "p = sigmoid(" in printed
    assert "D-ECE" in printed
    assert f"wrote {out}" in printed.replace("\n", "")
    assert weights.read_bytes() == content
    before, after = evaluate(weights, data), evaluate(out, data)
    assert after.errors.d_ece < 0.5 * before.errors.d_ece
    assert_close(after.boxes.metrics, before.boxes.metrics, atol=1e-4, rtol=0.0, equal_nan=True)
    assert after.meta.calibration is not None
    assert after.meta.calibration.images == 12
    model, _ = load_model(out)
    assert model.stored_threshold == after.meta.threshold == after.meta.calibration.threshold(0.012)


def test_eval_and_predict_say_whether_scores_are_calibrated(
    weights_and_data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, data = weights_and_data
    out = tmp_path / "calibrated.safetensors"
    assert main(["calibrate", str(weights), str(data), "--out", str(out), "--target", "iou", "--max-images", "9"]) == 0
    image = next((data / "images").rglob("*.png"), None) or next((data / "images").rglob("*.jpg"))
    for path, text in [
        (weights, "Scores are not calibrated: bucketrank calibrate"),
        (out, "to the expected IoU, on 9 images: "),
    ]:
        for words in (["eval", str(path), str(data)], ["predict", str(path), str(image), "--out", str(tmp_path / "p")]):
            capsys.readouterr()
            assert main(words) == 0
            assert text in capsys.readouterr().out.replace("\n", " ")


def test_the_file_is_replaced_by_default_and_may_be_calibrated_again(
    weights_and_data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, data = weights_and_data
    own = tmp_path / "weights.safetensors"
    own.write_bytes(weights.read_bytes())
    assert main(["calibrate", str(own), str(data)]) == 0
    first = read_weights(own)[1].calibration
    capsys.readouterr()
    assert main(["calibrate", str(own), str(data)]) == 0
    assert "scores unchanged" in capsys.readouterr().out
    assert main(["calibrate", str(own), str(data), "--per-class"]) == 0
    again = read_weights(own)[1].calibration
    assert first is not None
    assert again is not None
    assert again.d_ece[0] == first.d_ece[0], "the error of the trained scores, as a and b start from them"
    assert len(again.a) == len(CLASSES)
    trained, now = read_weights(weights)[0], read_weights(own)[0]
    factors = torch.tensor(again.a).repeat(len(trained["head.classes.bias"]) // len(CLASSES))
    expected = trained["head.classes.weight"] * factors[:, None, None, None]
    assert_close(now["head.classes.weight"], expected)  # a and b are relative to the trained weights


def test_score_thresholds_of_the_recipe_are_mapped(weights_and_data: tuple[Path, Path], tmp_path: Path) -> None:
    _, data = weights_and_data
    own = tmp_path / "weights.safetensors"
    write_weights(own, name="retinanet", score_threshold=0.005)
    evaluate(own, data, detections=tmp_path / "d.json")
    records = json.loads((tmp_path / "d.json").read_text())
    assert main(["calibrate", str(own), str(data)]) == 0
    meta = read_weights(own)[1]
    assert meta.calibration is not None
    assert meta.recipe["detector"]["score_threshold"] == pytest.approx(meta.calibration.score_map.threshold(0.005))
    evaluate(own, data, detections=tmp_path / "d.json")
    assert len(json.loads((tmp_path / "d.json").read_text())) == len(records) > 0


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--max-images", "0"], 2, "--max-images: expected at least 1, got 0"),
        (["--method", "isotonic"], 2, "isotonic"),
        (["--method", "temperature"], 1, "expected a softmax over the classes, got sigmoid scores; choose platt"),
        (["--method", "temperature", "--per-class"], 2, "--per-class: expected --method platt"),
        (["--split", "test"], 2, "--split: expected one of train, val, got 'test'"),
    ],
)
def test_wrong_use_is_one_line(
    words: list[str],
    status: int,
    message: str,
    weights_and_data: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights, data = weights_and_data
    out = tmp_path / "out.safetensors"
    assert main(["calibrate", str(weights), str(data), "--out", str(out), *words]) == status
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_files_of_others_are_not_overwritten(
    weights_and_data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, data = weights_and_data
    notes = tmp_path / "notes.txt"
    notes.write_text("hello")
    for command in (["calibrate", str(weights), str(data)], ["convert-weights", str(weights)]):
        assert main([*command, "--out", str(notes)]) == 1
        assert f"{notes}: expected a new file or bucketrank weights, got another file" in capsys.readouterr().err
        assert main([*command, "--out", str(tmp_path)]) == 1
        assert "expected a file to write, got a folder" in capsys.readouterr().err
    assert notes.read_text() == "hello"


def test_softmax_weights_name_the_temperature(
    weights_and_data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bucketrank.settings import from_dict
    from bucketrank.weights.files import Meta, save_weights
    from bucketrank.weights.load import build_detector

    _, data = weights_and_data
    recipe = from_dict(
        {
            "detector": {"name": "faster_rcnn", "channels": 32, "hidden": 32},
            "backbone": {"name": "test_resnet"},
            "inputs": {"min_size": 96, "max_size": 128},
            "loss": {"name": "ce"},
        }
    )
    path = tmp_path / "ce.safetensors"
    save_weights(path, build_detector(recipe, num_classes=3), Meta(CLASSES, CATEGORIES, 0.0, recipe.to_dict()))
    assert main(["calibrate", str(path), str(data)]) == 1
    error = capsys.readouterr().err
    assert "share a softmax" in error
    assert "method temperature" in error


@pytest.mark.parametrize("content", ["[]", "{}", '{"a": [0.0]}', "3", '{"method": "platt"}'])
def test_a_damaged_calibration_in_a_file_is_one_line(
    content: str, weights_and_data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    weights, data = weights_and_data
    with safe_open(weights, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = {**file.metadata(), "calibration": content}
    save_file(tensors, tmp_path / "w.safetensors", metadata)
    assert main(["eval", str(tmp_path / "w.safetensors"), str(data)]) == 1
    assert "the description inside cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["prepare_evaluation", "calibrate"])
def test_a_signal_keeps_the_weights_as_they_were(
    place: str,
    number: signal.Signals,
    weights_and_data: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights, data = weights_and_data
    own = Path(shutil.copy(weights, tmp_path / "own.safetensors"))
    usual = getattr(calibrated_weights, place)

    def stopped(*arguments: object, **settings: object) -> object:
        result = usual(*arguments, **settings)
        signal.raise_signal(number)
        return result

    monkeypatch.setattr(calibrated_weights, place, stopped)
    assert main(["calibrate", str(own), str(data)]) == 130
    assert capsys.readouterr().err == "bucketrank: interrupted\n"
    assert own.read_bytes() == weights.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["own.safetensors"]
