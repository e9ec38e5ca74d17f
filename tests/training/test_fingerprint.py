"""A resumed run notices that its data changed, and says what."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from bucketrank.cli import main
from bucketrank.data import find_splits
from bucketrank.training.folder import Fingerprint, fingerprint_of, read_fingerprint
from bucketrank.training.log import CsvTable
from bucketrank.training.loop import Loop
from bucketrank.training.processes import Interrupted

from . import tiny


@pytest.fixture(scope="module")
def stopped(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data, and a run that was stopped in its second epoch of three steps."""
    folder = tmp_path_factory.mktemp("stopped")
    shutil.copytree(shapes, folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        tiny.stop_in(patch, step=4)
        with pytest.raises(Interrupted):
            tiny.run(folder / "run", folder / "data")
    return folder


def edit(folder: Path, change, split: str = "train") -> None:
    path = folder / "data" / f"{split}.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def rotate_names(document):
    names = [category["name"] for category in document["categories"]]
    for category, name in zip(document["categories"], [*names[1:], names[0]], strict=True):
        category["name"] = name


def add_class(document):
    document["categories"].append({"id": 77, "name": "seventh"})


def renumber(document):
    for each in (*document["categories"], *document["annotations"]):
        key = "category_id" if "bbox" in each else "id"
        each[key] += 100


def halve(document):
    document["images"] = document["images"][: len(document["images"]) // 2]
    ids = {image["id"] for image in document["images"]}
    document["annotations"] = [each for each in document["annotations"] if each["image_id"] in ids]


def move_a_box(document):
    document["annotations"][0]["bbox"][0] += 1


def add_a_box(document):
    document["annotations"].append({**document["annotations"][0], "id": 10**6})


def remove_a_box(document):
    del document["annotations"][-1]


def reverse(document):
    document["images"].reverse()


@pytest.mark.parametrize("change", [rotate_names, add_class, renumber])
@pytest.mark.parametrize("flag", [[], ["--allow-changed-data"]])
def test_other_classes_are_never_accepted(change, flag, stopped, tmp_path, capsys):
    folder = shutil.copytree(stopped, tmp_path / "copy")
    for split in ("train", "val"):
        edit(folder, change, split)
    assert main(["train", "--resume", "--out", str(folder / "run"), "--data", str(folder / "data"), *flag]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "the classes changed since the run began, from circle (1), square (2)" in error


@pytest.mark.parametrize(
    ("change", "split", "message"),
    [
        (halve, "train", "train: 6 images removed, "),
        (halve, "val", "val: 2 images removed, "),
        (move_a_box, "train", "(train: 1 annotation changed)"),
        (add_a_box, "train", "(train: 1 annotation added)"),
        (remove_a_box, "val", "(val: 1 annotation removed)"),
        (reverse, "train", "(train: images in another order)"),
    ],
)
def test_what_changed_is_named(change, split, message, stopped, tmp_path, capsys):
    folder = shutil.copytree(stopped, tmp_path / "copy")
    edit(folder, change, split)
    before = (folder / "run" / "data.safetensors").read_bytes()
    assert main(["train", "--resume", "--out", str(folder / "run"), "--data", str(folder / "data")]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert message in error
    assert "--allow-changed-data" in error
    assert (folder / "run" / "data.safetensors").read_bytes() == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "steps", "resumed"),
    [
        (move_a_box, [1, 2, 3, 4, 5, 6], "resuming after step 5 (epoch 2)"),
        # Two steps per epoch are left of three: the second epoch starts again.
        (halve, [1, 2, 3, 4], "resuming after step 2 (epoch 2)"),
    ],
)
def test_changed_images_and_boxes_are_accepted_on_demand(change, steps, resumed, stopped, tmp_path, capsys):
    folder = shutil.copytree(stopped, tmp_path / "copy")
    edit(folder, change)
    words = ["train", "--resume", "--out", str(folder / "run"), "--data", str(folder / "data")]
    assert main([*words, "--allow-changed-data"]) == 0
    assert resumed in capsys.readouterr().out
    rows = (folder / "run" / "train.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == steps
    assert main(words) == 0  # the run has the new data now


@pytest.mark.slow
def test_the_rows_of_trained_epochs_stay_when_there_are_fewer_images(shapes, tmp_path, monkeypatch):
    folder, flags = tmp_path, "--schedule.epochs 4 --trainer.checkpoint_steps 1"
    shutil.copytree(shapes, folder / "data")
    with monkeypatch.context() as patch:
        tiny.stop_in(patch, step=7)
        with pytest.raises(Interrupted):
            tiny.run(folder / "run", folder / "data", flags)
    evaluated = rows_of(folder / "run" / "validation.csv")
    edit(folder, halve)
    words = ["train", "--resume", "--out", str(folder / "run"), "--data", str(folder / "data"), "--allow-changed-data"]

    def killed(loop):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:  # the tables have new steps, but no checkpoint does
        patch.setattr(Loop, "run", killed)
        with pytest.raises(RuntimeError, match="killed"):
            main(words)
    assert main(words[:-1]) == 0, "the run has the new data since the first try"
    steps = {name: rows_of(folder / "run" / f"{name}.csv") for name in ("train", "validation")}
    assert [(row["step"], row["epoch"]) for row in steps["train"]] == [
        (str(step), str((step + 1) // 2)) for step in range(1, 9)
    ]
    assert [(row["step"], row["epoch"]) for row in steps["validation"]] == [
        ("2", "1"),
        ("4", "2"),
        ("6", "3"),
        ("8", "4"),
    ]
    assert [row["boxes/AP"] for row in steps["validation"][:2]] == [row["boxes/AP"] for row in evaluated]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_steps_of_a_table_follow_the_steps_per_epoch(tmp_path):
    table = CsvTable(tmp_path / "train.csv")
    for step, epoch in ((1, 1), (4, 1), (8, 2), (9, 3)):
        table.add({"step": step, "epoch": epoch, "loss": 10.0 * step})
    for _ in range(2):  # the second time nothing is left to do
        table.restart_epoch(2, old=4, new=10)
        assert table.column("loss") == ([3, 10, 20], [10.0, 40.0, 80.0])
    table.restart_epoch(2, old=10, new=1)
    assert table.column("loss") == ([1, 2], [40.0, 80.0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("content", [None, b"", b"no fingerprint"], ids=["missing", "empty", "damaged"])
def test_a_run_without_a_readable_fingerprint_is_resumed_on_demand_only(content, stopped, tmp_path, capsys):
    folder = shutil.copytree(stopped, tmp_path / "copy")
    fingerprint = folder / "run" / "data.safetensors"
    if content is None:
        fingerprint.unlink()
    else:
        fingerprint.write_bytes(content)
    words = ["train", "--resume", "--out", str(folder / "run"), "--data", str(folder / "data")]
    assert main(words) == 1
    assert f"{fingerprint}: expected the fingerprint of the data" in capsys.readouterr().err
    assert main([*words, "--allow-changed-data"]) == 0
    assert read_fingerprint(fingerprint) is not None


@pytest.mark.slow
def test_moved_data_are_named_in_the_run_folder(stopped, tmp_path):
    """A later resume without --data finds them, and so does the report."""
    folder = shutil.copytree(stopped, tmp_path / "copy")
    tiny.run(folder / "run", folder / "data", resume=True)
    environment = json.loads((folder / "run" / "environment.json").read_text())
    assert environment["data"] == str(folder / "data")
    before = json.loads((stopped / "run" / "environment.json").read_text())
    assert {**environment, "data": before["data"]} == before


def test_a_fingerprint_comes_back_as_it_was(shapes, tmp_path):
    splits = find_splits(shapes)
    assert splits.train is not None
    assert splits.val is not None
    before = fingerprint_of(splits.train, splits.val, masks=False)
    before.write(tmp_path / "data.safetensors")
    after = read_fingerprint(tmp_path / "data.safetensors")
    assert isinstance(after, Fingerprint)
    assert (before.classes, before.changes(after)) == (after.classes, [])
    with_masks = fingerprint_of(splits.train, splits.val, masks=True)
    changes = before.changes(with_masks)
    assert [text.partition(":")[0] for text in changes] == ["train", "val"]
    assert all(text.endswith(" changed") for text in changes)
    (tmp_path / "data.safetensors").write_bytes(b"no fingerprint")
    assert read_fingerprint(tmp_path / "data.safetensors") is None
