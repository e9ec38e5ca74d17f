"""Recipes: each one builds its detector and agrees with the paper; a mistake names the nearest setting."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from bucketrank.cli import main
from bucketrank.errors import RecipeError, UsageError
from bucketrank.settings import detector_spec, from_dict, load_recipe, parse_flags, recipe_names, recipe_to_yaml
from bucketrank.settings.choices import Augmentation, LayoutName
from bucketrank.settings.detector_specs import SWIN_NAMES
from bucketrank.settings.paper import paper_row, paper_rows
from bucketrank.settings.recipe import differences, recipe_text, require_init
from bucketrank.weights.load import build_detector
from docs.figures.recipe_tables import markdown

from ..training import tiny

SMALL = {
    "channels": 32,
    "hidden": 32,
    "queries": 20,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "feedforward": 32,
    "heads": 4,
    "auxiliary_queries": 20,
}


OUR_RECIPES = [name for name in recipe_names() if load_recipe(name).backbone_name is not None]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", OUR_RECIPES)
def test_every_recipe_builds_its_detector(name):
    recipe = load_recipe(name)
    backbone = replace(recipe.backbone, weights=None)
    if not backbone.deformable_groups:  # which the tiny one cannot have
        backbone = replace(backbone, name="test_resnet")
    else:
        backbone = replace(backbone, name="resnet18")
    own: dict[str, Any] = {key: value for key, value in SMALL.items() if hasattr(recipe.detector, key)}
    model = build_detector(replace(recipe, detector=replace(recipe.detector, **own), backbone=backbone), num_classes=2)
    assert model.training
    assert type(model) is detector_spec(recipe.detector.name).load()


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_opens_with_its_command_and_the_papers_numbers(name):
    command, *notes = [line.removeprefix("# ") for line in recipe_text(name).splitlines() if line.startswith("#")]
    assert command.startswith(f"bucketrank train {name} --data ")
    words = command.split()[3:]
    flags = [word for word in words if word.startswith("--") and "." in word]
    load_recipe(name, parse_flags([part for flag in flags for part in (flag, words[words.index(flag) + 1])]))
    row = paper_row(name)
    if name.endswith(("laptop", "coco")):
        purpose = "For a laptop" if name.endswith("laptop") else "From COCO weights"
        assert notes[0] == f"{purpose}. Not from the paper."
        assert row is None
        return
    assert row is not None
    accuracy = ", ".join(f"{key} {value}" for key, value in row.texts().items() if key in ("AP", "AP50", "AP75"))
    metric = f"{row.metric} " if row.detector == "mask_rcnn" else ""
    # The paper did not run the exact loss, so its time is not that of an exact recipe.
    timed = "seconds" in row.numbers and name != row.exact_recipe
    seconds = f"{row.texts()['seconds']} s/iteration" if timed else ""
    numbers = ", ".join(part for part in (f"{metric}{accuracy}" if accuracy else "", seconds) if part)
    assert notes[0] == f"Paper: {row.place}, {row.title(name)}{f': {numbers}' if numbers else ''}."
    assert notes[1] == f"Hardware of the paper: {row.hardware}."
    recipe = load_recipe(name)
    assert recipe.detector.name == row.detector
    # The loss of the recipe is the loss of the row; an exact recipe may replace a bucketed loss.
    expected = {
        "BRS": ("rs", "bucketed"),
        "BAP": ("ap", "bucketed"),
        "RS": ("rs", "pairwise"),
        "AP": ("ap", "pairwise"),
    }
    actual = getattr(recipe.loss, "method", None)
    loss, method = expected.get(row.loss, (row.loss.lower(), actual))
    assert (recipe.loss.name, actual) == (loss, "exact" if name == row.exact_recipe else method)


def test_the_papers_tables_are_complete():
    with_recipe = [row.table for row in paper_rows() if row.recipe]
    # Rows that are not repeated from an earlier table; those of table 6 are detectors of others.
    assert {table: with_recipe.count(table) for table in set(with_recipe)} == {
        1: 14,
        2: 4,
        3: 4,
        4: 2,
        5: 6,
        7: 2,
        8: 5,
        None: 1,  # from the text: RS in Co-DETR
    }
    recipes = [name for row in paper_rows() for name in (row.recipe, row.exact_recipe) if name]
    with_row = [name for name in recipe_names() if not name.endswith(("laptop", "coco"))]
    assert sorted(recipes) == with_row, "each recipe has one row"


def test_published_schedules():
    atss, faster = load_recipe("atss-r50-brs"), load_recipe("faster-rcnn-r101-dcn-brs")
    assert (atss.schedule.lr, atss.schedule.epochs, atss.schedule.milestones) == (0.008, 12, (8, 11))
    assert (atss.data.batch_size, atss.schedule.warmup_steps, atss.schedule.warmup_factor) == (16, 500, 0.001)
    assert (faster.schedule.lr, faster.schedule.epochs, faster.schedule.milestones) == (0.012, 36, (27, 33))
    assert faster.inputs.min_size[-1] == 800  # type: ignore[index]
    assert (
        load_recipe("mask-rcnn-r50-lvis-rs").data.repeat_threshold,
        load_recipe("mask-rcnn-r50-cityscapes-rs").data.repeat,
    ) == (
        0.001,
        8,
    )


def test_cityscapes_draws_any_size_and_starts_from_coco():
    recipe = load_recipe("mask-rcnn-r50-cityscapes-brs")
    assert recipe.inputs.sizes == tuple(range(800, 1025))
    with pytest.raises(
        RecipeError, match=r"mine: init: expected the weights of a mask_rcnn trained on COCO.*--init RUN"
    ):
        require_init(recipe, "mine")
    require_init(load_recipe("mask-rcnn-r50-cityscapes-brs", {"init": "runs/coco/weights.safetensors"}), "mine")
    require_init(load_recipe("mask-rcnn-r50-cityscapes-brs", {"init": None}), "mine")


def test_swins_are_those_of_the_backbone():
    from bucketrank.detectors.backbone import SWIN

    assert tuple(SWIN) == SWIN_NAMES


def test_flags_set_anything():
    flags = (
        "--loss.delta 0.25 --loss ap --inputs.min_size 320,480 --inputs.max-size=640 --data.jitter --schedule.lr 1e-4"
    )
    words = [*flags.split(), "--schedule.factors", "{sampling_offsets: 0.1}", "--loss.box_loss", "null"]
    recipe = load_recipe("atss-r50-rs", parse_flags(words))
    assert (recipe.loss.name, recipe.flat()["loss.delta"], recipe.loss.box_loss) == ("ap", 0.25, None)
    assert (recipe.inputs.min_size, recipe.inputs.max_size) == ((320, 480), 640)
    assert recipe.data.jitter
    assert (recipe.schedule.lr, recipe.schedule.factors) == (1e-4, {"sampling_offsets": 0.1})


@pytest.mark.parametrize("folder", ["2024-11-01", "2024-13-45", "1.5", "010x", "true", "[a]", "runs/a: b"])
def test_a_text_is_kept_whatever_yaml_reads_in_it(folder):
    assert load_recipe("atss-laptop", parse_flags(["--init", folder])).init == folder
    assert load_recipe("atss-laptop", parse_flags(["--init", "null"])).init is None
    with pytest.raises(RecipeError, match=r"--schedule\.epochs: expected a whole number"):
        load_recipe("atss-laptop", parse_flags(["--schedule.epochs", folder]))


def test_digits_in_a_text_stay_as_they_are():
    """YAML reads 010 as the number 8."""
    assert load_recipe("atss-laptop", parse_flags(["--init", "010"])).init == "010"


def test_a_value_means_the_same_from_a_file_a_flag_and_python(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: atss-laptop\nschedule: {lr: 1e-4, milestones: [3, 5]}\ndata: {augment: [blur]}\n")
    flags = ["--schedule.lr", "1e-4", "--schedule.milestones", "3,5", "--data.augment", "blur"]
    changes = {"schedule.lr": 1e-4, "schedule.milestones": (3, 5), "data.augment": ["blur"]}
    groups = {"schedule": {"lr": 1e-4, "milestones": [3, 5]}, "data": {"augment": ("blur",)}}
    expected = load_recipe(path)
    assert (expected.schedule.lr, expected.schedule.milestones, expected.data.augment) == (1e-4, (3, 5), ("blur",))
    for given in (parse_flags(flags), changes, groups):
        assert load_recipe("atss-laptop", given) == expected


def test_flags_are_texts_until_the_recipe_converts_them():
    assert parse_flags(["--loss.delta=wide", "--loss.delta", "0.5"]) == {"loss.delta": "0.5"}, "the last one counts"
    assert parse_flags(["--trainer.seed", "many"]) == {"trainer.seed": "many"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss.dleta": 0.25}, 'atss-laptop with --loss.dleta 0.25: there is no setting "loss.dleta"; .*"loss.delta"'),
        ({"schedule.lr": "fast"}, "atss-laptop with --schedule.lr fast: schedule.lr: expected a number, got 'fast'"),
        ({"schedule.lr": -1}, "schedule.lr: expected a number above 0, got -1.0"),
        ({"schedule.lr": 10**400}, "schedule.lr: expected a number, got 1000"),
        ({"data.augment": ["blur", "zom_out"]}, "data.augment: expected one of .*got 'zom_out'; .*\"zoom_out\""),
    ],
)
def test_wrong_changes_are_named(changes, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("atss-laptop", changes)


def test_the_names_of_data_and_training_are_those_of_the_settings():
    from bucketrank.data.layouts import LAYOUTS
    from bucketrank.data.transforms import AUGMENTATIONS

    assert tuple(AUGMENTATIONS) == get_args(Augmentation)
    assert tuple(LAYOUTS) == get_args(LayoutName)


def test_spaces_after_commas_are_ignored():
    flags = ["--data.augment", "blur, rotation", "--inputs.min_size", "320, 480"]
    recipe = load_recipe("atss-r50-rs", parse_flags(flags))
    assert (recipe.data.augment, recipe.inputs.min_size) == (("blur", "rotation"), (320, 480))


def test_help_shows_factors_as_they_are_given(capsys):
    with pytest.raises(SystemExit):
        main(["train", "atss-laptop", "--help"])
    assert '--schedule.factors "{NAME: NUMBER}"' in capsys.readouterr().out
    recipe = load_recipe("brs-detr-laptop", parse_flags(["--schedule.factors", "{sampling_offsets: 0.5}"]))
    assert recipe.schedule.factors == {"sampling_offsets": 0.5}


def test_help_shows_the_values_of_a_recipe_file(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("base: retinanet-laptop\nschedule: {epochs: 123}")
    with pytest.raises(SystemExit):
        main(["train", str(path), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "[123]" in text
    assert "--detector.positive_iou" in text
    assert "those of the recipe" in text
    assert main(["train", str(tmp_path / "none.yaml"), "--help"]) == 2
    assert "none.yaml: there is no such file" in capsys.readouterr().err


def test_a_recipe_survives_yaml(tmp_path):
    recipe = load_recipe("mask-rcnn-r50-lvis-brs")
    (tmp_path / "mine.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(tmp_path / "mine.yaml") == recipe
    assert differences(recipe, load_recipe("mask-rcnn-r50-lvis-rs")) == {"loss.method": ("bucketed", "exact")}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss.dleta 0.25", 'no flag "--loss.dleta"; the nearest is "--loss.delta"'),
        ("--detector.chanels 64", 'the nearest is "--detector.channels"'),
        ("--loss.delta wide", "--loss.delta: expected a number or null, got 'wide'"),
        ("--schedule.epochs 1.5", "--schedule.epochs: expected a whole number, got 1.5"),
        ("--schedule.epochs", "--schedule.epochs: expected a whole number after it, got nothing"),
        ("--schedule.milestones 8,x", "expected a list of whole numbers, got '8,x'"),
        ("--loss brs", "loss.name: expected one of rs, ap, .*got 'brs'; the nearest is \"rs\""),
        ("--loss.method bucketted", "got 'bucketted'; the nearest is \"bucketed\""),
        ("--detector at", "got 'at'; the nearest is \"atss\""),
        ("--schedule.optimiser adam", "got 'adam'; the nearest is \"adamw\""),
        ("--schedule.milestones 11,8", r"expected rising epochs from 1, got \(11, 8\)"),
        ("--data.batch_size 0", "data.batch_size: expected at least 1, or -1, got 0"),
        ("--inputs.min_size 2000", "inputs.min_size: expected one or more sizes between 1 and max_size"),
        ("--trainer.devices two", "trainer.devices: expected a number of at least 1, or auto, got 'two'"),
        ("--trainer.devices 0", "trainer.devices: expected a number of at least 1, or auto, got '0'"),
        ("--trainer.precision bf16-true", "trainer.precision: expected one of 32-true, .*got 'bf16-true'"),
        ("--data.repeat 1000000000", "data.repeat: expected 1 to 10,000, got 1000000000"),
        ("--detector.nms 60", "detector.nms: expected a number from 0 to 1, got 60"),
        ("--detector.nms nan", "detector.nms: expected a number from 0 to 1, got nan"),
        ("--detector.score_threshold 5", "detector.score_threshold: expected a number from 0 to 1, got 5"),
        ("--detector.topk 0", "detector.topk: expected a number from 1 to 1,000,000, got 0"),
        (
            "--detector retinanet --detector.positive_iou 0.3",
            "negative_iou: expected at most detector.positive_iou, 0.3",
        ),
        (
            "--detector cascade_rcnn --detector.stage_ious 50,60,70",
            "detector.stage_ious: expected a number from 0 to 1",
        ),
        ("--detector co_detr --detector.class_cost nan", "detector.class_cost: expected a finite number of at least 0"),
        ("--detector co_detr --detector.auxiliary_weight -3", "detector.auxiliary_weight: expected a finite number of"),
        ("loss.delta 3", 'there is no flag "loss.delta"'),
    ],
)
def test_wrong_flags_name_the_right_ones(flags, message):
    with pytest.raises((RecipeError, UsageError), match=message):
        load_recipe("atss-r50-rs", parse_flags(flags.split()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("detector: {name: atss}\nlos: {delta: 1}", 'mine.yaml: there is no group "los"; the nearest is "loss"'),
        ("detector: {name: atss}\nloss: {dleta: 1}", 'mine.yaml: there is no setting "loss.dleta"; .*"loss.delta"'),
        ("detector: {name: atss, proposals: 3}", 'mine.yaml: there is no setting "detector.proposals"'),
        ("detector: atss", "mine.yaml: expected settings under 'detector', got 'atss'"),
        ("loss: {delta: 1}", "mine.yaml: expected detector.name, one of faster_rcnn"),
        ("- 1", "mine.yaml: expected groups of settings"),
        ("a: [", "mine.yaml: not YAML"),
        ("base: atss-r5-rs", 'no recipe "atss-r5-rs"; the nearest is "atss-r50-rs"'),
        ("base: {self}", "is its own base"),
        ("base: ../{folder}/mine.yaml", "is its own base"),
        ("base: [atss-laptop]", r"mine.yaml: base: expected the name or file of a recipe, got \['atss-laptop'\]"),
        ("base: 5", "mine.yaml: base: expected the name or file of a recipe, got 5"),
        ("schedule: {epochs: 2026-13-45}", "mine.yaml: not YAML: month must be in 1..12"),
        ("!!python/object/apply:os.system ['true']", "mine.yaml: not YAML"),
    ],
)
def test_wrong_files_are_named(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("{self}", str(path)).replace("{folder}", tmp_path.name))
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


def test_settings_of_another_loss_are_accepted_and_not_kept():
    """A recipe with a loss.delta still works with --loss focal, and recipes written with all settings still load."""
    recipe = load_recipe("atss-laptop", {"loss.delta": 0.25, "loss.name": "focal"})
    assert "loss.delta" not in recipe.flat()
    everything: dict[str, Any] = {
        "name": "rs",
        "method": "exact",
        "delta": None,
        "interpolate": False,
        "balance_period": None,
    }
    everything |= {"focal_alpha": 0.25, "focal_gamma": 2.0, "box_loss": None, "box_weight": None}
    assert from_dict({"detector": {"name": "atss"}, "loss": everything}) == from_dict({"detector": {"name": "atss"}})
    with pytest.raises(RecipeError, match=r"loss\.focal_gamma: expected a number, got 'high'"):
        from_dict({"detector": {"name": "atss"}, "loss": {"focal_gamma": "high"}})


def test_a_recipe_that_is_not_there():
    with pytest.raises(RecipeError, match='no recipe "atss-r50-sr"; the nearest is "atss-r50-'):
        load_recipe("atss-r50-sr")
    with pytest.raises(RecipeError, match="there is no such file"):
        load_recipe("somewhere/mine.yaml")
    with pytest.raises(RecipeError, match=r"detector\.name: expected one of"):
        from_dict({})


def test_the_tables_of_the_documentation_are_those_of_the_recipes():
    page = Path(__file__).parents[2] / "docs/recipes.md"
    text = page.read_text(encoding="utf-8")
    for table in markdown().split("\n\n"):
        assert table.strip() in text, "write the tables again: python -m docs.figures.recipe_tables"


def test_recipes_need_no_torch():
    code = "import sys; from bucketrank.cli import main; main(['recipes']); main(['recipes', 'atss-r50-rs']); "
    code += "print([name for name in ('torch', 'numpy', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "[]"
    assert "  lr: 0.008" in lines
    assert sum(line.startswith("  atss-r50-") for line in lines) >= 8


def test_alrp_balances_once_an_epoch_of_coco_unless_told_otherwise():
    recipe = tiny.recipe("--loss alrp")
    assert build_detector(recipe, num_classes=1).criterion.period == 7330  # type: ignore[union-attr]
    assert torch.is_tensor(build_detector(recipe, num_classes=1).criterion.balance)  # type: ignore[union-attr]


def test_a_base_file_is_looked_for_beside_its_recipe(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "common.yaml").write_text("base: atss-laptop\nloss: {delta: 0.25}")
    (folder / "mine.yaml").write_text("base: common.yaml")
    (tmp_path / "common.yaml").write_text("base: atss-laptop\nloss: {delta: 7.0}")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("recipes/mine.yaml").loss == load_recipe(folder / "common.yaml").loss
    assert load_recipe("recipes/mine.yaml").to_dict()["loss"]["delta"] == 0.25


BOMB = ["&a0 [x, x]", *(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))]


@pytest.mark.parametrize(
    "place",
    [
        "detector: *a8",
        "detector: {name: *a8}",
        "base: *a8",
        "detector: {name: atss}\nloss: {name: *a8}",
        "detector: {name: atss}\nloss: {delta: *a8}",
        "detector: {name: atss}\nloss: {method: *a8}",
        "detector: {name: atss}\nschedule: {factors: *a8}",
        "detector: {name: atss}\ndata: {augment: *a8}",
        "detector: {name: atss}\ninit: *a8",
    ],
)
def test_aliases_of_aliases_make_no_long_message(place, tmp_path):
    """The group holds 86 million strings, of which a message quotes a few."""
    path = tmp_path / "mine.yaml"
    path.write_text(f"trainer: {{loggers: [{', '.join(BOMB)}]}}\n{place}")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
@pytest.mark.parametrize("command", ["recipes", "train"])
def test_a_recipe_in_another_encoding_is_a_message(command, encoding, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("# für Käfer\nbase: atss-laptop\n", encoding=encoding)
    assert main([command, str(path), *(["--data", str(tmp_path)] if command == "train" else [])]) == 2
    message = capsys.readouterr().err
    assert f"{path}: expected UTF-8, got another encoding" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("depth", [5_000, 200_000])
def test_a_recipe_of_nested_lists_is_a_message(depth, tmp_path):
    """libyaml overflows the stack at 100,000 levels."""
    path = tmp_path / "mine.yaml"
    path.write_text("base: atss-laptop\ninit: " + "[" * depth + "]" * depth)
    with pytest.raises(RecipeError, match=r"nested too deeply|init: expected text or null"):  # without or with libyaml
        load_recipe(path)


def test_a_long_chain_of_bases_is_refused(tmp_path):
    for number in range(1200):
        (tmp_path / f"{number}.yaml").write_text(f"base: {number + 1}.yaml")
    (tmp_path / "1200.yaml").write_text("base: atss-laptop")
    with pytest.raises(RecipeError, match=r"20\.yaml: expected at most 20 recipes that build on one another"):
        load_recipe(tmp_path / "0.yaml")
    assert load_recipe(tmp_path / "1190.yaml") == load_recipe("atss-laptop")
