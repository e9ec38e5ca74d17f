"""The model card: YAML that the hub reads, and text that says what is known and what is not."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from bucketrank.inference.hub import model_card
from bucketrank.settings import from_dict
from bucketrank.weights import Meta
from tests.inference.test_trained_detector import CALIBRATION

RECIPE = {"detector": {"name": "atss"}, "backbone": {"name": "resnet18"}, "loss": {"name": "rs", "delta": 0.25}}
METRICS = {"boxes/AP": 0.4214, "boxes/APs": math.nan, "boxes/oLRP": 0.6, "masks/AP": 0.35}
META = Meta(
    classes=["cat", "dog|wolf"],
    category_ids=[1, 2],
    threshold=0.3,
    recipe=from_dict(RECIPE).to_dict(),
    metrics=METRICS,
    versions={"bucketrank": "0.1.0", "torch": "2.15"},
    images={"train": 1200, "val": 30},
)


def parts(card: ModelCard) -> tuple[dict[str, Any], str]:
    """Return the YAML and the text of a card, read as the hub reads them."""
    match = re.fullmatch(r"---\n(.*?)\n---\n(.*)", str(card), re.DOTALL)
    assert match
    return yaml.safe_load(match[1]), match[2]


def test_everything_known_is_stated() -> None:
    front, text = parts(model_card(META, license="apache-2.0", dataset="me/cats-and-dogs", repository="me/my-model"))
    assert front["license"] == "apache-2.0"
    assert front["datasets"] == ["me/cats-and-dogs"]
    assert (front["library_name"], front["pipeline_tag"]) == ("bucketrank", "object-detection")
    (index,) = front["model-index"]
    assert index["name"] == "my-model"
    values = [metric["value"] for result in index["results"] for metric in result["metrics"]]
    assert values == [42.1, 35.0]
    for line in (
        "# my-model",
        "An object detector of the type atss with backbone resnet18, trained with the loss rs by bucketrank.",
        'detector = bucketrank.from_pretrained("me/my-model")',
        "| data set | me/cats-and-dogs |",
        "| training images | 1,200 |",
        "| validation images | 30 |",
        "| 2 classes | cat, dog\\|wolf |",
        "| AP | 42.1 | 35.0 |",
        "| APs | - | - |",
        "| oLRP | 60.0 | - |",
        "Score threshold: 0.3, chosen for the best F1. Detections below it are not reported.",
        "Scores are not calibrated: bucketrank calibrate makes them probabilities.",
        "Versions: bucketrank 0.1.0, torch 2.15.",
        "  delta: 0.25",
        "apache-2.0, as stated by whoever published these weights.",
    ):
        assert f"\n{line}\n" in text


def test_a_picture_is_shown_with_its_threshold() -> None:
    _, text = parts(model_card(META, picture=True))
    assert "\n![Detections in example images](detections.jpg)\n" in text
    assert "\nDetections with a score of at least 0.3 in example images; each class has its colour.\n" in text
    assert "detections.jpg" not in str(model_card(META))


def test_nothing_unknown_is_invented() -> None:
    bare = Meta(["cat"], [1], 0.0, from_dict(RECIPE).to_dict())
    front, text = parts(model_card(bare))
    assert front.keys() == {"library_name", "pipeline_tag", "tags"}
    for line in (
        "| data set | not stated |",
        "| training images | not recorded |",
        "The weights file holds no metrics.",
        "Score threshold: none; every detection is reported.",
        "Versions: not recorded.",
        "Not stated. Ask whoever published these weights before you use them.",
    ):
        assert f"\n{line}\n" in text


def test_an_ap_without_a_data_set_stays_out_of_the_hubs_index() -> None:
    front, text = parts(model_card(META))
    assert "model-index" not in front
    assert "| AP | 42.1 | 35.0 |" in text


def test_calibrated_scores_are_explained() -> None:
    _, text = parts(model_card(META.calibrated(CALIBRATION)))
    assert "Scores are calibrated to the probability of a match at IoU 0.5" in text
    assert "the calibration error (D-ECE) was 0.300 before and is 0.010 now." in text
    assert "| D-ECE" not in text, "said once"


@pytest.mark.parametrize("name", ["a\n# b", "\x1b[2J", "---", "`x`", "<b>", "![i](http://127.0.0.1)"])
def test_names_cannot_change_the_page(name: str) -> None:
    front, text = parts(model_card(replace(META, classes=["cat", name]), dataset=name, license="mit"))
    assert front["license"] == "mit"
    assert "\x1b" not in text
    assert not re.search(r"(?<!\\)[`<\[]", next(line for line in text.splitlines() if line.startswith("| 2 classes")))


def test_a_recipe_cannot_end_its_code_block() -> None:
    weights = "x\n\n``````\n\n# Injected\n\n<b>bold</b>"
    recipe = from_dict({**RECIPE, "backbone": {"name": "resnet18", "weights": weights}}).to_dict()
    _, text = parts(model_card(replace(META, recipe=recipe)))
    (opening,) = re.findall(r"^(`+)yaml$", text, re.MULTILINE)
    inside = text.partition(f"{opening}yaml\n")[2].partition(f"\n{opening}\n")[0]
    assert "# Injected" in inside
    assert not [line for line in inside.splitlines() if line.strip().startswith(opening)]


def test_many_classes_are_cut() -> None:
    names = [f"class {number}" for number in range(1203)]
    _, text = parts(model_card(replace(META, classes=names, category_ids=list(range(1203)))))
    assert "class 99 and 1,103 more, listed in config.json |" in text
