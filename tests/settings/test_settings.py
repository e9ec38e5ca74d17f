"""Every setting is declared once, with a type, a default and a help text."""

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from PIL import Image

import bucketrank
from bucketrank.settings import Settings, describe, detectors, libraries, loss_settings, losses
from bucketrank.settings.choices import DEFAULT_DELTAS, MAX_PIXELS
from bucketrank.settings.detector_specs import InputSettings
from bucketrank.settings.fields import choices_of
from bucketrank.settings.recipe import SHARED_GROUPS, settings_by_key

SOURCE = Path(__file__).parents[2] / "src/bucketrank"
GROUPS: list[type[Settings]] = [*(spec.settings for spec in losses().values()), *SHARED_GROUPS]
GROUPS += {group: None for spec in (*detectors().values(), *libraries().values()) for group in spec.groups}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_setting_has_a_help_text(group):
    for setting in describe(group):
        assert len(setting.help) >= 8, f"{group.__name__}.{setting.name}"
        assert not setting.help.endswith("."), "help texts are not sentences"
        assert setting.help == setting.help.strip()


def test_every_flag_of_a_command_line_has_its_help_text():
    done = subprocess.run(
        [sys.executable, "-m", "bucketrank.cli", "train", "brs-detr-laptop", "--help"],
        check=True,
        capture_output=True,
        text=True,
        env={"COLUMNS": "10000", "PATH": "", "PYTHONPATH": str(SOURCE.parent)},
    )
    shown = {text.split()[0]: " ".join(text.split()) for text in re.split(r"\n  (?=--)|\n\n", done.stdout) if text}
    recipe_flags = {f"--{key}": setting for key, setting in settings_by_key("co_detr", "rs").items()}
    common = set(shown) & set(recipe_flags)
    assert {"--detector.auxiliary_weight", "--loss.delta", "--trainer.seed", "--init"} <= common
    assert "--loss.focal_gamma" not in common, "a setting of another loss"
    for flag in common:
        assert re.search(r"\[.*\]$", shown[flag]), f"{flag} does not show its value"
        assert recipe_flags[flag].help in shown[flag]


def test_a_field_without_a_help_text_is_refused():
    @dataclass(frozen=True)
    class Bare(Settings):
        group: ClassVar[str] = "bare"
        size: int = 3

    with pytest.raises(TypeError, match=r"Bare\.size: expected Annotated\[type, 'help text'\]"):
        describe(Bare)


def test_a_choice_is_checked_wherever_settings_are_made():
    assert choices_of(Literal["a", "b"] | None) == ("a", "b")
    with pytest.raises(ValueError, match=r'loss\.method: expected one of .*got \'exakt\'; the nearest is "exact"'):
        loss_settings("rs", method="exakt")

    @dataclass(frozen=True)
    class Colour(Settings):
        group: ClassVar[str] = "colour"
        tone: Annotated[Literal["red", "blue"] | None, "the tone of it"] = None

    assert Colour().tone is None
    with pytest.raises(ValueError, match=r"colour\.tone: expected one of red, blue, got 'bleu'"):
        Colour(tone="bleu")  # type: ignore[arg-type]


def test_settings_need_no_torch():
    code = "import sys; from bucketrank.settings import *; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False False\n"


LOSS_FILES = {"settings/loss_specs.py", "detectors/criterion/ranked.py", "detectors/criterion/scored.py"}


def lookups(text: str) -> list[str]:
    """Return what the catalogue replaces: parsed source, evaluated texts, compared names of losses."""
    names = {*losses(), *detectors(), *libraries()}
    offences = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec", "ast.parse", "inspect.getsource"):
            offences.append(ast.unparse(node.func))
        if isinstance(node, ast.Compare) and re.search(r"\.name$|\bname$", ast.unparse(node.left)):
            compared = [each for each in node.comparators if isinstance(each, ast.Constant)]
            offences += [ast.unparse(node) for each in compared if each.value in names]
        if isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant) and node.value.value in names:
            offences.append(f"case {node.value.value}")
    return offences


def test_nobody_parses_source_or_compares_the_names_of_losses():
    offenders = {
        str(path.relative_to(SOURCE)): lookups(path.read_text(encoding="utf-8"))
        for path in SOURCE.rglob("*.py")
        if str(path.relative_to(SOURCE)) not in LOSS_FILES
    }
    assert {path: found for path, found in offenders.items() if found} == {}


@pytest.mark.parametrize(
    "planted",
    ["eval('int')", "ast.parse(text)", "if loss.name == 'rs': pass", "match x:\n    case 'focal': pass"],
)
def test_that_test_bites(planted):
    assert lookups(planted)


def test_inputs_may_be_as_large_as_pillow_decodes():
    assert Image.MAX_IMAGE_PIXELS is not None
    assert 2 * Image.MAX_IMAGE_PIXELS - 1 <= MAX_PIXELS <= 2 * Image.MAX_IMAGE_PIXELS
    for aerial in ({"min_size": 10_000, "max_size": 10_000}, {"min_size": (800, 2000), "max_size": 80_000}):
        InputSettings(**aerial)
    for sizes in ({"min_size": 14_000, "max_size": 14_000}, {"min_size": (800, 3000), "max_size": 80_000}):
        with pytest.raises(ValueError, match=r"178,956,970 pixels, got \d+ \(min_size\) x \d+; lower one of the two"):
            InputSettings(**sizes)


@pytest.mark.parametrize("name", [name for name, spec in losses().items() if spec.function is not None])
def test_the_defaults_of_a_loss_are_those_of_its_function(name):
    spec = losses()[name]
    parameters = inspect.signature(spec.load_function()).parameters
    assert spec.settings().arguments == {key: parameters[key].default for key in spec.settings().arguments}
    assert {*spec.settings().arguments} == {*parameters} - {"logits", "targets", "reduction"}


@pytest.mark.parametrize(("name", "function"), [("rs", "rank_sort_loss"), ("ap", "ap_loss"), ("alrp", "alrp_loss")])
def test_the_default_delta_of_a_loss_is_that_of_its_function(name, function):
    default = inspect.signature(getattr(bucketrank, function)).parameters["delta"].default
    assert loss_settings(name).effective_delta == default == DEFAULT_DELTAS[name]  # type: ignore[attr-defined]


def test_a_loss_without_a_function_says_so():
    with pytest.raises(ValueError, match="expected a loss with a function, got 'rs'"):
        losses()["rs"].load_function()
