"""Losses and detectors of other people: registered at run time, or by the entry points of another distribution."""

import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch

from bucketrank.cli import main
from bucketrank.detectors import build
from bucketrank.detectors.atss import ATSS
from bucketrank.detectors.criterion import HeadRecipe, build_criterion
from bucketrank.detectors.criterion.ranked import Ranked
from bucketrank.errors import RecipeError, WeightsError
from bucketrank.settings import (
    DetectorSpec,
    LossSettings,
    LossSpec,
    detector_spec,
    load_recipe,
    loss_names,
    loss_settings,
    loss_spec,
    losses,
    parse_flags,
    register_detector,
    register_loss,
)
from bucketrank.settings.loss_specs import BUILT_IN_LOSSES, QUALITY_SCORED, ScoreBasedSettings
from bucketrank.settings.registry import DETECTORS, LOSSES
from bucketrank.weights import load_model

from ..training import tiny

# A distribution with a loss and a detector of its own, as another project would ship it.
PLUGIN = '''
from dataclasses import dataclass
from typing import Annotated

from bucketrank.settings import DetectorSpec, LossSettings, LossSpec
from bucketrank.settings.detector_specs import ATSSSettings


@dataclass(frozen=True)
class HingeSettings(LossSettings):
    """Settings of the hinge loss."""

    name: Annotated[str, "the loss that trains the detector"] = "hinge"
    margin: Annotated[float, "distance wanted between positives and negatives"] = 1.0


HINGE = LossSpec("hinge", "hinge_plugin.parts:Hinge", HingeSettings, title="hinge loss")
TALL = DetectorSpec("tall_atss", "hinge_plugin.parts:TallATSS", ATSSSettings, title="Tall ATSS")
'''
PARTS = '''
import torch

from bucketrank.detectors.atss import ATSS
from bucketrank.detectors.criterion.ranked import Ranked


class Hinge(Ranked):
    """The mean hinge between positives and the hardest negatives."""

    def loss(self, logits, targets, errors):
        positives, negatives = logits[targets > 0], logits[targets == 0]
        if not len(positives):
            return (logits.sum() * 0,)
        hardest = negatives.topk(min(100, len(negatives))).values
        return (torch.relu(self.settings.margin + hardest - positives[:, None]).mean(),)


class TallATSS(ATSS):
    """ATSS under another name."""
'''
ENTRY_POINTS = """
[bucketrank.losses]
hinge = hinge_plugin:HINGE

[bucketrank.detectors]
tall_atss = hinge_plugin:TALL
"""


@dataclass(frozen=True)
class WideSettings(LossSettings):
    name: Annotated[str, "the loss that trains the detector"] = "wide"
    width: Annotated[float, "how wide it is"] = 2.0


class Wide(Ranked):
    settings: WideSettings

    def loss(self, logits, targets, errors):
        positives, negatives = logits[targets > 0], logits[targets == 0]
        if not len(positives):
            return (logits.sum() * 0,)
        return (torch.sigmoid((negatives.topk(20).values - positives[:, None]) / self.settings.width).mean(),)


class Named(ATSS):
    pass


@pytest.fixture
def registered():
    with LOSSES.restored(), DETECTORS.restored():
        register_loss(LossSpec("wide", Wide, WideSettings, title="wide loss", gradient_note="Wide pushes wide."))
        register_detector(DetectorSpec("named", Named, detector_spec("atss").settings, losses=("wide", "rs")))
        yield
    assert "wide" not in losses()


@pytest.mark.slow
def test_a_registered_loss_and_detector_work_from_the_recipe_to_the_report(registered, shapes, tmp_path, capsys):
    model: Any = build("named", num_classes=2, backbone="test_resnet", loss="wide", width=3.0, channels=32)
    assert model.criterion.settings.width == 3.0
    assert type(model) is Named
    folder = tmp_path / "run"
    flags = "--detector named --loss wide --loss.width 4 --schedule.epochs 1"
    with pytest.MonkeyPatch.context() as patch:
        tiny.stop_in(patch, step=1)
        words = [
            "train",
            "atss-laptop",
            "--data",
            str(shapes),
            "--out",
            str(folder),
            *tiny.USUAL.split(),
            *flags.split(),
        ]
        assert main(words) == 130
    assert main(["train", "--resume", "--out", str(folder)]) == 0
    assert load_recipe(folder / "recipe.yaml").loss == WideSettings(width=4.0)
    weights = folder / "weights.safetensors"
    model, _ = load_model(weights)
    assert type(model) is Named
    image = next((shapes / "images").iterdir())
    assert main(["predict", str(weights), str(image), "--out", str(tmp_path / "predictions")]) == 0
    assert (
        main(["report", str(folder), "--out", str(tmp_path / "report.html"), "--max-images", "2", "--images", "1"]) == 0
    )
    page = (tmp_path / "report.html").read_text()
    assert "wide loss" in page
    assert "Wide pushes wide." in page
    capsys.readouterr()
    assert main(["train", "atss-laptop", "--data", "x", "--loss.widht", "4"]) == 2
    assert 'the nearest is "--loss.width"' in capsys.readouterr().err


def test_a_loss_that_the_detector_does_not_take_is_refused(registered):
    with pytest.raises(ValueError, match="expected one of wide, rs, got 'ap'"):
        build("named", num_classes=2, backbone="test_resnet", loss="ap", channels=32)


@dataclass(frozen=True)
class BrierSettings(ScoreBasedSettings):
    name: Annotated[str, "the loss that trains the detector"] = "brier"
    brier_power: Annotated[float, "brier: exponent of the difference between score and IoU"] = 2.0


def brier_loss(logits, targets, *, power, reduction):
    assert reduction == "sum"
    used = targets >= 0
    return (logits[used].sigmoid() - targets[used]).abs().pow(power).sum()


@pytest.mark.parametrize("detector", ["atss", "co_detr"])
def test_a_score_based_loss_is_a_function_and_a_specification(detector):
    with LOSSES.restored():
        register_loss(LossSpec("brier", QUALITY_SCORED, BrierSettings, function=brier_loss))
        assert "brier" in loss_names(detector)
        criterion = build_criterion(loss_settings("brier", brier_power=3.0), HeadRecipe())
    # One positive of IoU 0.5 and one negative, both with a score of 0.5; the third is ignored.
    logits, targets = torch.zeros(3), torch.tensor([1.0, 0.0, -1.0])
    torch.testing.assert_close(criterion.list_loss(logits, targets), torch.tensor(0.5**3 + 0.5**3))


def test_what_cannot_be_registered():
    with LOSSES.restored():
        with pytest.raises(ValueError, match=r"register_loss: a loss named 'rs' already exists; .*replace=True"):
            register_loss(LossSpec("rs", Wide))
        register_loss(LossSpec("rs", Wide, WideSettings), replace=True)
        assert loss_spec("rs").load() is Wide
    assert loss_spec("rs").load() is not Wide
    with pytest.raises(TypeError, match="register_loss: expected a LossSpec, got type"):
        register_loss(Wide)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected settings that subclass LossSettings"):
        register_loss(LossSpec("x", Wide, detector_spec("atss").settings))  # type: ignore[arg-type]


def test_an_unknown_name_says_how_to_add_it(tmp_path):
    with pytest.raises(RecipeError, match=r"got 'hinge'; register_loss adds others"):
        load_recipe("atss-laptop", {"loss.name": "hinge"})


def test_weights_of_a_loss_that_is_not_registered(registered, tmp_path):
    from bucketrank.weights import Meta, save_weights

    recipe = load_recipe("atss-laptop", parse_flags(["--loss", "wide", *tiny.USUAL.split()]))
    model = build(recipe.detector, num_classes=1, backbone="test_resnet", loss=recipe.loss, inputs=recipe.inputs)
    save_weights(tmp_path / "w.safetensors", model, Meta(["a"], [1], 0.5, recipe.to_dict()))
    load_model(tmp_path / "w.safetensors")
    with LOSSES.restored():
        LOSSES._specs.pop("wide")
        with pytest.raises(WeightsError, match=r"expected one of .*got 'wide'"):
            load_model(tmp_path / "w.safetensors")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder for the path with a small distribution in it."""
    package, info = tmp_path / "site/hinge_plugin", tmp_path / "site/hinge_plugin-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(PLUGIN)
    (package / "parts.py").write_text(PARTS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hinge-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return package.parent


def in_new_process(code: str, site: Path) -> subprocess.CompletedProcess[str]:
    prelude = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    command = [sys.executable, "-c", prelude + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_entry_points_are_read_without_torch(site):
    done = in_new_process(
        """
        import json
        from bucketrank.settings import detectors, losses
        from bucketrank.settings import load_recipe
        recipe = load_recipe("atss-laptop", {"detector.name": "tall_atss", "loss.name": "hinge", "loss.margin": 0.5})
        titles = [losses()["hinge"].title, detectors()["tall_atss"].title]
        print(json.dumps([*titles, recipe.loss.margin, "torch" in sys.modules]))
        """,
        site,
    )
    assert json.loads(done.stdout) == ["hinge loss", "Tall ATSS", 0.5, False], done.stderr


@pytest.mark.slow
def test_a_distribution_adds_a_loss_and_a_detector(site, shapes, tmp_path):
    words = ["train", "atss-laptop", "--data", str(shapes), "--out", str(tmp_path / "run"), *tiny.USUAL.split()]
    words += ["--detector", "tall_atss", "--loss", "hinge", "--loss.margin", "0.5", "--schedule.epochs", "1"]
    weights = str(tmp_path / "run/weights.safetensors")
    done = in_new_process(
        f"""
        from bucketrank.cli import main
        assert main({words!r}) == 0
        assert main(["eval", {weights!r}, {str(shapes)!r}, "--max-images", "1"]) == 0
        """,
        site,
    )
    assert done.returncode == 0, done.stderr
    assert "tall_atss with test_resnet, loss hinge" in done.stdout


def test_a_broken_entry_point_is_left_out_and_named(site):
    (site / "hinge_plugin/__init__.py").write_text("HINGE = 3\nraise RuntimeError('no luck')\n")
    done = in_new_process("from bucketrank.settings import losses; print(list(losses()))", site)
    assert done.stdout.strip() == str([spec.name for spec in BUILT_IN_LOSSES])
    assert "leaves out the entry point hinge_plugin:HINGE" in done.stderr
    assert "RuntimeError: no luck" in done.stderr
