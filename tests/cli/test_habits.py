"""Commands as users of other detection tools type them. The work itself is replaced, so that only the words count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bucketrank.cli import main
from bucketrank.inference import evaluation
from bucketrank.training import run as training


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Record the arguments of each run instead of training, in an empty working folder."""
    runs: list[dict[str, Any]] = []

    def record(recipe: Any, data: Path | None, out: Path, **options: Any) -> None:
        runs.append({"recipe": recipe, "data": data, "out": out, **options})

    monkeypatch.setattr(training, "train", record)
    monkeypatch.chdir(tmp_path)
    return runs


@pytest.mark.parametrize(
    "words",
    [
        ["atss-laptop", "my-data"],
        ["atss-laptop", "--data", "my-data"],
        ["--data=my-data", "atss-laptop"],
        ["atss-laptop", "--schedule.epochs", "2", "my-data"],
        ["--schedule.epochs", "2", "atss-laptop", "my-data"],
    ],
)
def test_train_takes_the_data_with_or_without_a_flag(words: list[str], trained: list[dict[str, Any]]) -> None:
    assert main(["train", *words]) == 0
    (run,) = trained
    assert run["data"] == Path("my-data")
    assert run["recipe"].detector.name == "atss"


@pytest.mark.parametrize("command", ["eval", "calibrate"])
@pytest.mark.parametrize(
    "words",
    [
        ["RUN", "my-data"],
        ["RUN", "--data", "my-data"],
        ["--data=my-data", "RUN"],
        ["RUN", "--device", "cpu", "my-data"],
    ],
)
def test_eval_and_calibrate_take_the_data_with_or_without_a_flag(
    command: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[tuple[Any, ...]] = []

    def record(weights: Path, data: Path, *_: Any, **__: Any) -> str:
        given.append((weights, data))
        return "done"

    monkeypatch.setattr(evaluation, "evaluate", record)
    monkeypatch.setattr(evaluation, "print_evaluation", lambda *_: None)
    monkeypatch.setattr(evaluation, "calibrate_weights", record)
    assert main([command, *words]) == 0, capsys.readouterr().err
    assert given == [(Path("RUN"), Path("my-data"))]


def test_check_data_and_split_take_the_data_with_or_without_a_flag(shapes: Path, tmp_path: Path) -> None:
    assert main(["check-data", str(shapes)]) == 0
    assert main(["check-data", "--data", str(shapes)]) == 0
    assert main(["split", str(shapes), str(tmp_path / "one")]) == 0
    assert main(["split", "--data", str(shapes), str(tmp_path / "two")]) == 0
    assert (tmp_path / "one" / "val.json").read_text() == (tmp_path / "two" / "val.json").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check-data"], "check-data: the following arguments are required: data"),
        (["check-data", "--data"], "check-data: --data: expected a path after it, got nothing"),
        (["check-data", "--data", "one", "two"], "check-data: unrecognized arguments: two"),
        (["train", "atss-laptop"], "train: expected the folder of the data set after the recipe, or as --data"),
    ],
)
def test_data_given_wrongly(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"bucketrank: {message}\n"


@pytest.mark.parametrize("command", ["train", "eval", "calibrate", "check-data", "split"])
def test_help_says_that_data_may_be_a_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "(also as --data)" in " ".join(capsys.readouterr().out.split())
