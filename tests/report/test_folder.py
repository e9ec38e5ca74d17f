"""Run folders: read with what is there, refused where there is no run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bucketrank.data import DataError
from bucketrank.report.folder import read_folder, read_folders


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "pictures")))


def test_a_whole_run_has_no_gaps(run, shapes):
    found = read_folder(run)
    assert found.gaps == []
    assert (found.name, found.data) == ("masks", shapes.absolute())
    assert found.weights == run / "weights.safetensors"
    assert found.train.steps == [1, 2]
    assert len(found.validation.pairs("masks/AP")) == 1


def test_what_is_no_run(tmp_path, run):
    for given, message in (
        (tmp_path / "nowhere", "there is no such folder"),
        (tmp_path, "one without recipe.yaml"),
        (run / "recipe.yaml", f"give the folder it lies in: {run}"),
    ):
        with pytest.raises(DataError, match=message):
            read_folder(given)
    (tmp_path / "recipe.yaml").write_text("detector: {name: atts}")
    with pytest.raises(DataError, match='the nearest is "atss"'):
        read_folder(tmp_path)
    with pytest.raises(DataError, match="at least one run"):
        read_folders([])


def test_an_unfinished_run(copy):
    (copy / "weights.safetensors").unlink()
    found = read_folder(copy)
    assert found.weights == copy / "best.safetensors"
    assert "has not ended" in found.gaps[0]
    (copy / "best.safetensors").unlink()
    found = read_folder(copy)
    assert found.weights is None
    assert "--resume" in found.gaps[0]


@pytest.mark.parametrize(
    ("content", "rows", "gap"),
    [
        (b"", 0, "no column step"),
        (b"step,loss\n1,0.5\n2,x\n3,0.25\n4", 2, "2 rows cannot be read"),
        (b"step,loss\n3,0.25\n1,\n", 2, None),
        (b"step,loss\nnan,1\ninf,1\n1,0.5", 1, "2 rows cannot be read"),
        (b"step\xff\n", 0, "cannot be read"),
        (b"a,b\n1,2\n", 0, "no column step"),
        (b"step,loss\n1,2\x00\n", 0, "cannot be read"),
    ],
)
def test_a_table_is_read_as_far_as_it_goes(copy, content, rows, gap):
    (copy / "train.csv").write_bytes(content)
    found = read_folder(copy)
    assert len(found.train.steps) == rows
    assert found.train.steps == sorted(found.train.steps)
    assert (gap in found.gaps[0]) if gap else (found.gaps == [])


@pytest.mark.parametrize("content", ["", "[]", "{", '{"data": 7}'])
def test_an_environment_that_says_nothing(copy, content):
    (copy / "environment.json").write_text(content)
    found = read_folder(copy)
    assert found.data is None
    assert bool(found.gaps) == (content != '{"data": 7}')


def test_two_of_one_name_and_one_twice(run, tmp_path):
    names = []
    for parent in ("a", "b"):
        (tmp_path / parent / "run").mkdir(parents=True)
        shutil.copy(run / "recipe.yaml", tmp_path / parent / "run")
        names.append(tmp_path / parent / "run")
    assert [found.name for found in read_folders(names)] == ["a/run", "b/run"]
    assert [found.name for found in read_folders([run, run])] == ["masks (1)", "masks (2)"]
