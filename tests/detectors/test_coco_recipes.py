"""The recipes that start from COCO weights run from end to end, with small models and random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bucketrank.cli import main
from bucketrank.weights import load_model

from ..shared_data import shared
from .coco_download import download
from .small_resnet import small_backbones
from .tiny_models import transformers_folder

__all__ = ["download", "small_backbones"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "small_backbones")]

TINY = "--data.batch_size 2 --data.workers 0 --schedule.epochs 1 --schedule.max_steps 2 --trainer.pictures 0 "
TINY += "--trainer.accelerator cpu --trainer.devices 1 --trainer.log_every 1"
SMALL_IMAGES = "--inputs.min_size 96 --inputs.max_size 128"
FEW_PROPOSALS = f"{SMALL_IMAGES} --detector.proposals 40"
RECIPES = {  # the data set, the model of transformers that stands for the one on the hub, and further flags
    "faster-rcnn-coco": ("bccd", None, FEW_PROPOSALS),
    "mask-rcnn-coco": ("nuclei", None, FEW_PROPOSALS),  # the blood cells have no masks
    "retinanet-coco": ("bccd", None, SMALL_IMAGES),
    "rt-detr-coco": ("bccd", "rt_detr_v2", "--inputs.min_size 64"),
    "d-fine-coco": ("bccd", "d_fine", "--inputs.min_size 64"),
    "rf-detr-coco": ("bccd", "rf_detr", "--inputs.min_size 64"),
}


def first_images(data: Path, folder: Path, *, train: int, val: int) -> Path:
    """Write a data set of the first images of another."""
    folder.mkdir()
    (folder / "images").symlink_to(data / "images")
    for name, count in {"train": train, "val": val}.items():
        content = json.loads((data / f"{name}.json").read_text())
        kept = content["images"][:count]
        ids = {image["id"] for image in kept}
        objects = [each for each in content["annotations"] if each["image_id"] in ids]
        (folder / f"{name}.json").write_text(json.dumps({**content, "images": kept, "annotations": objects}))
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipe_runs(recipe, tmp_path, download):
    name, stand_in, flags = RECIPES[recipe]
    data = first_images(shared(f"data/{name}").resolve(), tmp_path / name, train=4, val=1)
    if stand_in is not None:
        flags += f" --detector transformers/{transformers_folder(stand_in, tmp_path)}"
    words = ["train", recipe, "--data", str(data), "--out", str(tmp_path / "run"), *TINY.split(), *flags.split()]
    assert main(words) == 0
    assert (stand_in is None) == bool(download), "torchvision's weights are downloaded"
    model, meta = load_model(tmp_path / "run" / "weights.safetensors")
    assert model.num_classes == len(meta.classes)
    assert main(["eval", str(tmp_path / "run" / "weights.safetensors"), str(data)]) == 0
