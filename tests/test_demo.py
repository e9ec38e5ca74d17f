"""The demo at a tiny size: everything is shown and written, and both sides get the same."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

from bucketrank.cli import main
from bucketrank.data import DataError
from bucketrank.demo.contest import LOSSES, Contender, Settings, batches, mirrored, prepare, recipe_of
from bucketrank.demo.run import run
from bucketrank.demo.terminal import bar
from bucketrank.training.recipe import differences
from bucketrank.training.weights import load_model

TINY = Settings(steps=5, every=2, pictures=10, new_pictures=6, side=64, batch=2, backbone="test_resnet")


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("demo") / "shapes", TINY)


@pytest.mark.parametrize("terminal", [False, True])
def test_everything_is_shown_and_written(terminal, tmp_path):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=140, color_system="truecolor", _environ={})
    ranking, focal = run(TINY, tmp_path, console)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["demo.json", "demo.png", "detections.png", "focal.safetensors", "ranking.safetensors", "shapes"]
    for name in ("demo.png", "detections.png"):
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 600
    assert [point.step for point in ranking.curve] == [point.step for point in focal.curve] == [2, 4, 5]
    assert len(ranking.durations) == len(focal.durations) == 5
    text = shown.getvalue()
    for words in ("Rank & Sort, exact", "focal loss", "AP75", "s/step", "One seed (0)", "found, ", "demo.png"):
        assert words in text
    assert ("\N{UPPER HALF BLOCK}" in text) is terminal

    document = json.loads((tmp_path / "demo.json").read_text())
    assert document["contenders"]["ranking"]["curve"][-1]["metrics"]["AP50"] == ranking.curve[-1].metrics["AP50"]
    assert str(tmp_path) not in (tmp_path / "demo.json").read_text()
    model, meta = load_model(tmp_path / "ranking.safetensors")
    torch.testing.assert_close(dict(model.state_dict()), dict(ranking.model.state_dict()))
    assert meta.threshold == ranking.threshold
    assert meta.classes == ["circle", "square", "triangle", "star"]


def test_only_the_loss_differs():
    recipes = [recipe_of(loss, Settings()) for loss in LOSSES]
    assert set(differences(*recipes)) == {"loss.name", "loss.box_loss", "loss.box_weight"}


def test_both_start_from_the_same(material):
    one, other = (Contender(loss, recipe_of(loss, TINY), TINY, material) for loss in LOSSES)
    torch.testing.assert_close(dict(one.model.state_dict()), dict(other.model.state_dict()))
    criteria: list[Any] = [one.model.criterion, other.model.criterion]
    assert [criterion.box_loss for criterion in criteria] == ["giou", "giou"]
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    one.warm_up()
    torch.testing.assert_close(dict(one.model.state_dict()), before, msg="warming up changes nothing")
    for mine, theirs in islice(zip(one.batches, other.batches, strict=True), 7):
        torch.testing.assert_close(mine, theirs)


def test_the_seed_decides(material):
    def first(seed):
        settings = Settings(seed=seed, batch=4)
        return torch.stack(next(batches(material.train, settings))[0])

    torch.testing.assert_close(first(0), first(0))
    assert (first(0) != first(1)).any()


def test_every_picture_comes_once_in_a_round(material):
    seen = [int(target["image_id"]) for _, targets in islice(batches(material.train, TINY), 5) for target in targets]
    assert sorted(seen) == list(range(1, 11))


@pytest.mark.parametrize(("across", "down"), [(False, False), (True, False), (False, True), (True, True)])
def test_boxes_are_mirrored_with_the_picture(across, down):
    image = torch.zeros(3, 10, 20)
    image[:, 2:5, 3:9] = 1
    turned, target = mirrored(image, {"boxes": torch.tensor([[3.0, 2, 9, 5]])}, across=across, down=down)
    x1, y1, x2, y2 = target["boxes"][0].int().tolist()
    assert turned[:, y1:y2, x1:x2].sum() == turned.sum() == 3 * 3 * 6


def test_pictures_of_another_demo_are_refused(tmp_path):
    prepare(tmp_path / "shapes", TINY)
    prepare(tmp_path / "shapes", TINY)
    with pytest.raises(DataError, match="give a new folder by --out"):
        prepare(tmp_path / "shapes", Settings(pictures=11, new_pictures=6))


def test_bars_grow():
    assert [bar(share).rstrip() for share in (0, 0.25, 1)] == ["", "██▌", "██████████"]
    assert len({len(bar(share / 100)) for share in range(101)}) == 1


@pytest.mark.parametrize(
    ("words", "message"), [(["--steps", "0"], "--steps: expected at least 1, got 0"), (["--seed", "-1"], "--seed: ")]
)
def test_wrong_values_name_the_flag(words: list[str], message: str, tmp_path: Path, capsys) -> None:
    assert main(["demo", "--out", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
