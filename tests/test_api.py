"""Train, load and report in Python."""

from __future__ import annotations

import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import bucketrank
from bucketrank.api import Run
from bucketrank.errors import BucketrankError, FileError, OutOfMemoryError
from bucketrank.inference import Detections
from bucketrank.settings import parse_flags
from bucketrank.training import run as training
from tests.training import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

# The settings of tests/training/tiny.py, apart from those that have a short name.
SHORT = {"schedule.epochs", "data.batch_size", "data.workers", "schedule.lr", "schedule.milestones"}
TINY = {key: value for key, value in parse_flags(tiny.USUAL.split()).items() if key not in SHORT}


@pytest.fixture(scope="module")
def run(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    short: dict[str, Any] = {"epochs": 1, "batch": 4, "lr": 1e-3, "workers": 0}
    out = tmp_path_factory.mktemp("project") / "first"
    return bucketrank.train("atss-laptop", shapes, **short, loss="ap", out=out, quiet=True, settings=TINY)


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Record the recipe of each run instead of training, in an empty working folder."""
    given: list[Any] = []

    def record(recipe: Any, data: Path, out: Path, **_: Any) -> training.RunResult:
        given.append(recipe)
        return training.RunResult(out, {}, out / "weights.safetensors", 0)

    monkeypatch.setattr(training, "train", record)
    monkeypatch.chdir(tmp_path)
    return given


def test_a_run_has_metrics_a_folder_and_a_detector(run: Run, shapes: Path) -> None:
    assert 0 <= run.metrics["boxes/AP"] <= 1
    assert run.steps == 3, "12 images in batches of 4"
    detector = bucketrank.load(run.folder)
    assert detector.meta.recipe["loss"]["name"] == "ap"
    image = next((shapes / "images").iterdir())
    (expected,) = run.predict(image, threshold=0.0, device="cpu")
    assert len(expected["scores"])
    assert expected.names == [run.model.classes[label - 1] for label in expected["labels"]]
    with Image.open(image) as opened:
        pixels = np.asarray(opened.convert("RGB"))
        tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
        for same in (str(image), [image], opened, pixels, pixels[None], tensor):
            (found,) = detector.predict(same, threshold=0.0, device="cpu")
            assert isinstance(found, Detections)
            torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)
    assert len(detector.predict([image, image], device="cpu")) == 2


def test_a_quiet_run_prints_nothing(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    again = bucketrank.train(run.folder, resume=True, quiet=True)
    assert again.metrics == pytest.approx(run.metrics, nan_ok=True)
    page = again.report(images=1, device="cpu")
    assert page == run.folder / "report.html"
    assert page.stat().st_size > 10_000
    other = run.folder.parent / "both.html"
    assert run.report(again, out=other, images=1, device="cpu") == other
    assert capfd.readouterr() == ("", "")


def test_settings_have_the_names_of_the_command_line(recipes: list[Any]) -> None:
    short: dict[str, Any] = {"epochs": 20, "batch": 4, "imgsz": 640, "lr": 1, "device": "cpu", "workers": 2}
    delta: dict[str, Any] = {"loss.delta": 0.5}
    run = bucketrank.train("atss-r50-rs", "my-data", **short, loss="ap", **delta)
    assert run.folder == Path("runs/atss-r50-rs")
    bucketrank.train("atss-r50-rs", data="my-data", settings={"loss": {"delta": 0.5}, "init": "runs/first"})
    bucketrank.train("atss-r50-rs", data="my-data", loss="ap", settings={"loss": {"delta": 0.25}})
    first, second, third = recipes
    assert (third.loss.name, third.loss.delta) == ("ap", 0.25), "settings and names of the same group"
    assert (first.schedule.epochs, first.schedule.milestones, first.schedule.lr) == (20, (13, 18), 1.0)
    assert (first.inputs.min_size, first.inputs.max_size, first.data.workers) == (640, 1066, 2)
    assert (first.loss.name, first.loss.delta, second.loss.name, second.loss.delta) == ("ap", 0.5, "rs", 0.5)
    assert second.init == "runs/first"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected a data set after the recipe (data)"),
        ({"data": "d", "batch": 0}, "batch: expected at least 1, or -1, got 0"),
        ({"data": "d", "epochs": "few"}, "epochs: expected a whole number or null, got 'few'"),
        ({"data": "d", "epoch": 3}, 'there is no setting "epoch"; the nearest is "schedule.epochs"'),
        ({"data": "d", "loss": "focsl"}, "the nearest is"),
        ({"data": "d", "loss.delta": "wide"}, "loss.delta: expected a number"),
        ({"data": "d", "batch": 2, "data.batch_size": 3}, "give one of them"),
        ({"data": "nowhere"}, "nowhere"),
    ],
)
def test_mistakes_are_exceptions(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BucketrankError, match=re.escape(message)):
        bucketrank.train("atss-laptop", **options)


def test_wrong_types_are_named(run: Run) -> None:
    wrong: list[dict[str, Any]] = [{"data": 5}, {"data": ["my-data"]}, {"data": "d", "out": 3}]
    for options in wrong:
        with pytest.raises(TypeError, match=r"train: \w+: expected a path or text, got (int|list)"):
            bucketrank.train("atss-laptop", **options)
    with pytest.raises(TypeError, match="load: weights: expected a path or text, got NoneType"):
        bucketrank.load(None)  # type: ignore[arg-type]
    assert bucketrank.load(run) is run.model
    with pytest.raises(TypeError, match=r"got TrainedDetector; pass its \.model"):
        bucketrank.calibrate(run.model, "my-data")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (OSError(5, "Input/output error", "a.jpg"), FileError, "a.jpg"),
        (MemoryError(), OutOfMemoryError, "use smaller images or batches"),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemoryError, "Start a new run with a smaller --batch"),
    ],
)
def test_errors_of_the_machine_are_ours(
    raised: Exception, expected: type[Exception], message: str, recipes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(training, "train", fail)
    with pytest.raises(expected, match=message):
        bucketrank.train("atss-laptop", "my-data")


def test_a_bug_keeps_its_exception(recipes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(training, "train", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        bucketrank.train("atss-laptop", "my-data")


def test_a_stopped_run_says_how_to_continue(recipes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(recipe: Any, data: Any, out: Path, **_: Any) -> None:
        out.mkdir(parents=True)
        (out / "recipe.yaml").touch()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(training, "train", stopped)
    with pytest.raises(KeyboardInterrupt, match="resume with: bucketrank train runs/atss-laptop --resume"):
        bucketrank.train("atss-laptop", "my-data")


PY = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # code in docs that tests/test_docs.py does not run


@pytest.mark.parametrize(
    ("page", "call"),
    [
        pytest.param("getting-started", "bucketrank.train(", marks=pytest.mark.slow),
        ("deploy", "bucketrank.load("),
        ("sharing", "save_pretrained("),
    ],
)
def test_code_in_docs_that_needs_a_run(
    page: str, call: str, run: Run, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    shutil.copytree(run.folder, tmp_path / "runs" / "first")
    (tmp_path / "my-data").symlink_to(shapes)
    with Image.open(next((shapes / "images").iterdir())) as image:
        image.save(tmp_path / "street.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bucketrank, "train", partial(bucketrank.train, settings=TINY, workers=0, quiet=True))
    text = (Path(__file__).parents[1] / "docs" / f"{page}.md").read_text(encoding="utf-8")
    (code,) = (block for block in PY.findall(text) if call in block)
    before = set(tmp_path.rglob("*"))
    exec(compile(code, page, "exec"), {"bucketrank": bucketrank, "detector": run.model})
    assert set(tmp_path.rglob("*")) > before, "each of them writes files"
