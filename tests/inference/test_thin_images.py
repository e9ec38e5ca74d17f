"""Thin images are accepted by check-data, and used by train, eval and predict."""

import json
from pathlib import Path

import pytest

from bucketrank.cli import main
from bucketrank.data import find_splits, write_shapes
from tests.data.small_folders import write_image
from tests.training import tiny

SIZES = {"wide": (3000, 2), "tall": (1, 3000)}  # width and height


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of drawn shapes with two thin images in each split, each with an object."""
    folder = write_shapes(tmp_path_factory.mktemp("data") / "shapes", train=6, val=2, size=64, seed=0)
    for split in find_splits(folder):
        assert split is not None
        document = json.loads(split.annotations.read_text())
        for number, (name, (width, height)) in enumerate(SIZES.items(), start=9001):
            file_name = f"{split.annotations.stem}-{name}.png"
            write_image(split.images / file_name, width=width, height=height)
            document["images"].append({"id": number, "file_name": file_name, "width": width, "height": height})
            category = document["categories"][0]["id"]
            box = [0, 0, max(1, width // 3), max(1, height // 3)]
            document["annotations"].append({"id": number, "image_id": number, "category_id": category, "bbox": box})
        split.annotations.write_text(json.dumps(document))
    return folder


@pytest.mark.slow
def test_thin_images_from_check_data_to_predict(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-data", str(data)]) == 0
    tiny.run(tmp_path / "run", data, "--schedule.epochs 1 --schedule.milestones []")
    weights = str(tmp_path / "run" / "weights.safetensors")
    assert main(["eval", weights, str(data)]) == 0
    assert "4 images" in capsys.readouterr().out
    assert main(["predict", weights, str(data / "images"), "--out", str(tmp_path / "out"), "--batch", "4"]) == 0
    predicted = json.loads((tmp_path / "out" / "predictions.json").read_text())["images"]
    assert len(predicted) == len(list((data / "images").rglob("*.png"))) == 12
