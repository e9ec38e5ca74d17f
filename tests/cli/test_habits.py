"""Commands as users of other detection tools type them. The work itself is replaced, so that only the words count."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bucketrank.cli import main
from bucketrank.data import find_splits
from bucketrank.evaluation.calibration import Calibration
from bucketrank.inference import evaluation
from bucketrank.settings import recipe_names
from bucketrank.training import run as training
from bucketrank.training.processes import pass_pid_to_children
from bucketrank.training.start import recipe_and_folder
from bucketrank.weights.files import Meta, describe_scores
from tests.training import tiny


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
        (["train", "atss-laptop"], "train: expected a data set after the recipe (data): its folder or data.yaml"),
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


def test_short_names_change_the_settings(trained: list[dict[str, Any]]) -> None:
    words = "train atss-r50-rs my-data --epochs 20 --batch 4 --imgsz 640 --lr 1e-3 --device cpu --workers 2"
    assert main(words.split()) == 0
    recipe = trained[0]["recipe"]
    assert (recipe.schedule.epochs, recipe.schedule.milestones) == (20, (13, 18)), "8 and 11 of 12"
    assert (recipe.data.batch_size, recipe.data.workers, recipe.schedule.lr) == (4, 2, 1e-3)
    assert (recipe.inputs.min_size, recipe.inputs.max_size) == (640, 1066), "800 and 1333"
    assert (recipe.trainer.accelerator, recipe.trainer.devices) == ("cpu", "1")


def test_what_only_scales_may_be_chosen(trained: list[dict[str, Any]]) -> None:
    words = "train atss-r50-rs my-data --epochs 1 --imgsz 256 --inputs.max_size 512 --device cuda --trainer.devices 2"
    assert main(words.split()) == 0
    assert main(["train", "atss-r50-rs", "my-data", "--epochs", "20", "--schedule.milestones", "5,6"]) == 0
    assert main(["train", "retinanet-coco", "my-data", "--imgsz", "640"]) == 0
    first, second, library = (run["recipe"] for run in trained)
    assert (first.schedule.epochs, first.schedule.milestones) == (1, (1,)), "which never comes"
    assert (first.inputs.min_size, first.inputs.max_size) == (256, 512)
    assert (first.trainer.accelerator, first.trainer.devices) == ("cuda", "2")
    assert second.schedule.milestones == (5, 6)
    assert (library.inputs.min_size, library.inputs.max_size) == (640, None), "the limit is the model's own"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "few"], "--epochs: expected a whole number, got 'few'"),
        (["--batch", "0"], "train: batch: expected at least 1, or -1, got 0"),
        (["--epochs", "9", "--time", "1h"], "time: expected to be given without epochs, got both"),
        (["--time", "2 hours"], "train: time: expected a time above 0 such as 2h, 90m or 45s, got '2 hours'"),
        (["--time", "-1h"], "--time: expected text after it, got nothing; if -1h is the value, write --time=-1h"),
        (["--epochs", "0"], "train: epochs: expected at least 1, got 0"),
        (["--imgsz", "5"], "train: imgsz: expected at least 32 pixels, got 5"),
        (["--lr", "-1"], "train: lr: expected a number above 0, got -1.0"),
        (["epochs=3"], "train: epochs=3: expected a flag; write --epochs 3"),
        (["--lr", "1", "data=my-data"], "train: data=my-data: expected a flag; write --data my-data"),
        (["--batch", "2", "--data.batch_size", "3"], "batch: is short for data.batch_size; give one of them"),
        (["--device", "cuda:3"], "device: expected auto, cpu, cuda or mps, got 'cuda:3'; choose a GPU with"),
    ],
)
def test_wrong_short_names_are_one_line(
    words: list[str], message: str, trained: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "atss-laptop", "my-data", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not trained


def test_a_forgotten_recipe_is_named(
    trained: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("my-data", "atss-laptop"):
        (tmp_path / folder).mkdir()
    for words in (["my-data"], ["my-data", "atss-laptop"], ["my-data/data.yaml"]):
        assert main(["train", *words]) == 2
        line = f"{words[0]}: expected a recipe, got a data set; put a recipe first: bucketrank train atss-laptop "
        assert line in capsys.readouterr().err
    assert main(["train", "--data", "my-data"]) == 2
    assert "expected a recipe (see bucketrank recipes), or a run folder with --resume" in capsys.readouterr().err
    assert main(["train", "atss-laptop", "my-data"]) == 0, "a folder with the name of a recipe"
    assert len(trained) == 1


def test_a_run_needs_a_folder_of_its_own(shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for out, got in ((tmp_path / "notes.txt", "a file"), (shapes, "the data set")):
        before = sorted(shapes.rglob("*"))
        assert main(["train", "atss-laptop", str(shapes), "--out", str(out)]) == 1
        assert f"{out}: expected a folder for the run, got {got}; choose another --out" in capsys.readouterr().err
        assert sorted(shapes.rglob("*")) == before


def test_train_help_shows_the_short_names_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    options = capsys.readouterr().out.partition("options:")[2]
    shown = [line.split()[0] for line in options.splitlines() if line.startswith("  --")]
    assert shown[:6] == ["--epochs", "--batch", "--imgsz", "--lr", "--device", "--workers"]


def test_a_resumed_run_takes_short_names(trained: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("base: atss-laptop\ndata: {batch_size: 7}\n")
    assert main(["train", "--resume", "--out", str(tmp_path), "--workers", "3"]) == 0
    assert (trained[0]["recipe"].data.batch_size, trained[0]["recipe"].data.workers) == (7, 3)


def begin(folder: str) -> None:
    Path(folder).mkdir(parents=True)
    Path(folder, "recipe.yaml").touch()


@pytest.mark.parametrize("words", [["RUN", "--resume"], ["--resume", "RUN"], ["--resume", "--out", "RUN"]])
def test_a_run_folder_is_resumed_by_its_name(words: list[str], trained: list[dict[str, Any]]) -> None:
    begin("RUN")
    assert main(["train", *words]) == 0
    (run,) = trained
    assert (run["recipe"], run["data"], run["out"], run["resume"]) == (None, None, Path("RUN"), True)


def test_a_run_folder_is_no_recipe(trained: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    begin("RUN")
    assert main(["train", "RUN", "my-data"]) == 2
    assert "RUN: expected a recipe, got a run; continue it with --resume" in capsys.readouterr().err
    assert main(["train", "RUN", "--resume", "--out", "other"]) == 2
    assert "RUN: expected the run to resume, got --out other too; remove one" in capsys.readouterr().err
    assert not trained


def test_the_same_recipe_again_gets_a_new_folder(trained: list[dict[str, Any]]) -> None:
    words = ["train", "atss-laptop", "my-data"]
    assert main(words) == 0
    begin("runs/atss-laptop")
    assert main(words) == 0
    begin("runs/atss-laptop-2")
    assert main(words) == 0
    assert main([*words, "--out", "runs/atss-laptop"]) == 0, "refused by the run itself"
    assert main([*words, "--resume"]) == 0
    folders = [run["out"].as_posix() for run in trained]
    assert folders == [f"runs/atss-laptop{end}" for end in ("", "-2", "-3", "", "")]


def test_the_processes_of_a_run_share_its_folder(
    trained: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin("runs/atss-laptop")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["train", "atss-laptop", "my-data"]) == 0, "started by torchrun, which does not say the folder"
    with pass_pid_to_children(Path("runs/atss-laptop-2")):
        begin("runs/atss-laptop-2")
        assert main(["train", "atss-laptop", "my-data"]) == 0
    assert [run["out"].as_posix() for run in trained] == ["runs/atss-laptop", "runs/atss-laptop-2"]


@pytest.fixture(scope="module")
def run_folder(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for one epoch, with a third of the training images held out."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    tiny.run(folder, shapes, "--schedule.epochs 1 --data.holdout 0.34")
    return folder


def test_a_run_is_evaluated_on_its_own_data(run_folder: Path, shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run_folder), "--device", "cpu"]) == 0
    assert "4 images; " in capsys.readouterr().out, "those that the run held out"
    assert main(["eval", str(run_folder / "weights.safetensors"), "--split", "train", "--device", "cpu"]) == 0
    assert "8 images; " in capsys.readouterr().out
    assert main(["eval", str(run_folder), str(shapes), "--device", "cpu"]) == 0
    assert "3 images; " in capsys.readouterr().out, "the validation images of the folder"


def test_calibrate_takes_the_folder_of_a_run(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Calibrated(Exception):  # noqa: N818 (not an error)
        pass

    def record(model: Any, images: Any, **_: Any) -> None:
        given.append(len(images))
        raise Calibrated

    monkeypatch.setattr(evaluation, "calibrate", record)
    for weights in (run_folder, run_folder / "weights.safetensors"):
        with pytest.raises(Calibrated):
            main(["calibrate", str(weights), "--device", "cpu"])
    assert given == [8, 8], "the training images that were not held out"


@pytest.mark.parametrize("command", ["eval", "calibrate"])
def test_weights_outside_of_a_run_need_data(
    command: str, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = shutil.copy(run_folder / "weights.safetensors", tmp_path)
    assert main([command, str(weights)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected the folder of the data set after it, or as --data" in line
    assert main([command, str(tmp_path / "nowhere")]) == 2
    assert "nowhere: expected a run folder or a weights file, got no such file" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([command, str(tmp_path / "empty")]) == 1
    assert "expected weights.safetensors of a run" in capsys.readouterr().err


def test_the_yaml_file_stands_for_its_folder(shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("images", "labels"):
        (tmp_path / "yolo" / kind / "train").mkdir(parents=True)
    Image.new("RGB", (40, 30)).save(tmp_path / "yolo/images/train/a.png")
    (tmp_path / "yolo/labels/train/a.txt").write_text("1 0.5 0.5 0.2 0.2\n")
    (tmp_path / "yolo/other.yaml").write_text("names: [no, nothing]\ntrain: images/none\n")
    (tmp_path / "yolo/mine.yaml").write_text("names: [cat, dog]\ntrain: images/train\n")
    assert main(["convert", "yolo", str(tmp_path / "yolo/mine.yaml"), str(tmp_path / "coco")]) == 0
    (split,) = {find_splits(tmp_path / "coco").train} - {None}
    assert split is not None
    assert [each["name"] for each in split.read()["categories"]] == ["cat", "dog"]
    copy = shutil.copytree(shapes, tmp_path / "shapes")
    (copy / "data.yaml").touch()
    assert main(["check-data", str(copy / "data.yaml")]) == 0
    assert "12 images, " in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--foo", "--project", "--cache", "--patience", "--pretrained", "--model", "--gpus"])
def test_no_hint_at_a_flag_that_is_not_near(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "atss-laptop", "my-data", flag, "1"]) == 2
    assert capsys.readouterr().err == f'bucketrank: train: there is no flag "{flag}"\n'


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("--img-size", "--imgsz"),
        ("--batch-size", "--data.batch_size"),
        ("--num-workers", "--workers"),
        ("--lr0", "--lr"),
        ("--epoch", "--epochs"),
        ("--optimizer", "--schedule.optimiser"),
        ("--seed", "--trainer.seed"),
    ],
)
def test_flags_of_other_tools_get_a_hint(typed: str, nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "atss-laptop", "my-data", typed, "1"]) == 2
    assert f'there is no flag "{typed}"; the nearest is "{nearest}"' in capsys.readouterr().err


def test_a_recipe_is_hinted_at_by_its_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    for typed, nearest in {"retinanet": "retinanet-coco", "atss": "atss-laptop", "rfdetr": "rf-detr-coco"}.items():
        assert main(["train", typed, "my-data"]) == 2
        assert f'the nearest is "{nearest}"' in capsys.readouterr().err
    assert main(["train", "yolov8n", "my-data"]) == 2
    assert "nearest" not in capsys.readouterr().err


def test_recipes_are_listed_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    start, coco, laptop, paper, end = capsys.readouterr().out.split("\n\n")
    titles = [group.splitlines()[0] for group in (start, coco, laptop, paper)]
    assert titles == [
        "Start here: bucketrank train RECIPE DATA",
        "From COCO weights",
        "For a laptop",
        "The paper's tables, with its AP",
    ]
    names = [[line.split()[0] for line in group.splitlines()[1:]] for group in (start, coco, laptop, paper)]
    assert sorted([*names[1], *names[2], *names[3]]) == recipe_names(), "each once"
    assert {*names[0]} < {*names[1], *names[2]}, "the first are listed again in their group"
    assert all(len(line) <= 120 for line in laptop.splitlines())
    assert "  atss-r50-focal                        table 7: ATSS R-50 focal and GIoU, AP 39.3\n" in paper
    assert end == "All settings of a recipe: bucketrank recipes RECIPE\n"


def test_every_command_ends_with_the_next_one(
    run_folder: Path, shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def next_command(*words: str) -> str:
        assert main([*words]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    alone = Path(shutil.copy(run_folder / "weights.safetensors", tmp_path / "a b.safetensors"))
    image = next((shapes / "images").iterdir())
    assert next_command("check-data", str(shapes)) == f"Next: bucketrank train atss-laptop {shapes}"
    assert next_command("eval", str(run_folder)) == f"Next: bucketrank report {run_folder}"
    assert next_command("eval", str(alone), str(shapes)) == f"Next: bucketrank export '{alone}'"
    assert next_command("predict", str(run_folder), str(image), "--out", str(tmp_path / "out")) == (
        f"Next: bucketrank export {run_folder}"
    )


def test_train_ends_with_the_next_command(trained: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    begin("runs/atss-laptop")
    assert main(["train", "atss-laptop", "my-data"]) == 0
    assert len(trained) == 1
    assert capsys.readouterr().out == "Next: bucketrank report runs/atss-laptop-2\n"


def test_a_finished_run_says_so(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "run")
    assert main(["train", str(copy), "--resume"]) == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert "The run is already finished" in lines
    assert "resuming" not in lines


def test_what_scores_mean_is_said_in_words() -> None:
    calibration = Calibration(
        method="platt",
        target="match",
        a=(6.549,),
        b=(20.97,),
        images=96,
        detections=900,
        right=90,
        d_ece=(0.1234, 0.0123),
        la_ece=(0.2, 0.1),
        best_threshold=0.3,
    )
    meta = Meta(classes=["cat"], category_ids=[1], threshold=0.3, recipe={}, calibration=calibration)
    words = describe_scores(meta)
    assert words.endswith(", on 96 images: the calibration error (D-ECE) was 0.123 before and is 0.012 now.")
    assert words.startswith("Scores are calibrated to the probability ")


def test_a_missing_run_is_not_taken_for_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "runs/nope", "--resume"]) == 2
    assert "runs/nope: expected a run folder to resume, got none with a recipe.yaml" in capsys.readouterr().err
    assert recipe_and_folder("mine/first.yaml", None, None, resume=True) == ("mine/first.yaml", Path("runs/first"))
