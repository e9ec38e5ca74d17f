"""The demo at a tiny size: all output is printed and written, and both runs get the same data."""

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
from bucketrank.demo.runs import (
    LOSSES,
    DemoRun,
    DemoSettings,
    draw_or_read_shapes,
    mirrored,
    recipe_for,
    shuffled_batches,
)
from bucketrank.demo.show import bar, run_demo
from bucketrank.errors import DataError
from bucketrank.settings.recipe import differences
from bucketrank.weights.load import load_model

TINY = DemoSettings(
    steps=5, steps_per_turn=2, train_images=10, val_images=6, image_size=64, batch_size=2, backbone="test_resnet"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_or_read_shapes(tmp_path_factory.mktemp("demo") / "shapes", TINY)


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [False, True])
def test_all_output_is_printed_and_written(terminal, tmp_path):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=140, color_system="truecolor", _environ={})
    ranking, focal = run_demo(TINY, tmp_path, console)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["demo.json", "demo.png", "detections.png", "focal.safetensors", "ranking.safetensors", "shapes"]
    for name in ("demo.png", "detections.png"):
        with Image.open(tmp_path / name) as image:
            assert min(image.size) > 600
    assert [point.step for point in ranking.curve] == [point.step for point in focal.curve] == [2, 4, 5]
    assert len(ranking.durations) == len(focal.durations) == 5
    text = output.getvalue()
    for words in ("Rank & Sort, exact", "focal loss", "AP75", "s/step", "One seed (0)", " correct, ", "demo.png"):
        assert words in text

    document = json.loads((tmp_path / "demo.json").read_text())
    assert document["contenders"]["ranking"]["curve"][-1]["metrics"]["AP50"] == ranking.curve[-1].metrics["AP50"]
    assert DemoSettings(**document["settings"]) == TINY
    assert str(tmp_path) not in (tmp_path / "demo.json").read_text()
    model, meta = load_model(tmp_path / "ranking.safetensors")
    torch.testing.assert_close(dict(model.state_dict()), dict(ranking.model.state_dict()))
    assert meta.threshold == ranking.threshold
    assert meta.classes == ["circle", "square", "triangle", "star"]


def test_only_the_loss_differs():
    recipes = [recipe_for(loss, DemoSettings()) for loss in LOSSES]
    assert all(key.startswith("loss.") for key in differences(*recipes))
    assert recipes[0].loss.box_loss is None, "the ranking loss trains GIoU by default"
    assert recipes[1].loss.box_loss == "giou"


def test_both_runs_start_from_the_same_weights_and_data(data):
    one, other = (DemoRun(loss, recipe_for(loss, TINY), TINY, data) for loss in LOSSES)
    torch.testing.assert_close(dict(one.model.state_dict()), dict(other.model.state_dict()))
    criteria: list[Any] = [one.model.criterion, other.model.criterion]
    assert [criterion.box_loss for criterion in criteria] == ["giou", "giou"]
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    one.warm_up()
    torch.testing.assert_close(dict(one.model.state_dict()), before, msg="warming up changes nothing")
    for first, second in islice(zip(one.batches, other.batches, strict=True), 7):
        torch.testing.assert_close(first, second)


def test_the_seed_decides_the_batches(data):
    def first(seed):
        settings = DemoSettings(seed=seed, batch_size=4)
        return torch.stack(next(shuffled_batches(data.train, settings))[0])

    torch.testing.assert_close(first(0), first(0))
    assert (first(0) != first(1)).any()


def test_an_epoch_has_every_image_once(data):
    batches = islice(shuffled_batches(data.train, TINY), 5)
    image_ids = [int(target["image_id"]) for _, targets in batches for target in targets]
    assert sorted(image_ids) == list(range(1, 11))


@pytest.mark.parametrize(("horizontal", "vertical"), [(False, False), (True, False), (False, True), (True, True)])
def test_boxes_are_mirrored_with_the_image(horizontal, vertical):
    image = torch.zeros(3, 10, 20)
    image[:, 2:5, 3:9] = 1
    target = {"boxes": torch.tensor([[3.0, 2, 9, 5]])}
    flipped, target = mirrored(image, target, horizontal=horizontal, vertical=vertical)
    x1, y1, x2, y2 = target["boxes"][0].int().tolist()
    assert flipped[:, y1:y2, x1:x2].sum() == flipped.sum() == 3 * 3 * 6


def test_images_of_another_demo_are_refused(tmp_path):
    draw_or_read_shapes(tmp_path / "shapes", TINY)
    draw_or_read_shapes(tmp_path / "shapes", TINY)
    with pytest.raises(DataError, match=r"expected 11 training .* got 10 and 6; choose a new folder with --out"):
        draw_or_read_shapes(tmp_path / "shapes", DemoSettings(train_images=11, val_images=6))


def test_bars_grow():
    assert [bar(share).rstrip() for share in (0, 0.25, 1)] == ["", "██▌", "██████████"]
    assert len({len(bar(share / 100)) for share in range(101)}) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--steps", "0"], "--steps: expected at least 1, got 0"), (["--seed", "-1"], "--seed: expected at least 0")],
)
def test_wrong_values_name_the_flag(words: list[str], message: str, tmp_path: Path, capsys) -> None:
    assert main(["demo", "--out", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
