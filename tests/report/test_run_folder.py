"""Reading run folders: incomplete ones are read, other folders are refused."""

from __future__ import annotations

import shutil

import pytest

from bucketrank.errors import DataError
from bucketrank.report.run_folder import read_folder, read_folders


def test_a_complete_run_has_no_gaps(run, shapes):
    folder = read_folder(run)
    assert folder.gaps == []
    assert (folder.name, folder.data) == ("masks", shapes.absolute())
    assert folder.weights == run / "weights.safetensors"
    assert folder.train.steps == [1, 2]
    assert len(folder.validation.pairs("masks/AP")) == 1


def test_other_folders_are_refused(tmp_path, run):
    for path, message in (
        (tmp_path / "nowhere", "the folder does not exist"),
        (tmp_path, "a folder without recipe.yaml"),
        (run / "recipe.yaml", f"give the folder that contains it: {run}"),
    ):
        with pytest.raises(DataError, match=message):
            read_folder(path)
    (tmp_path / "recipe.yaml").write_text("detector: {name: atts}")
    with pytest.raises(DataError, match='the nearest is "atss"'):
        read_folder(tmp_path)
    with pytest.raises(DataError, match="at least one run"):
        read_folders([])


def test_an_unfinished_run(run_copy):
    (run_copy / "weights.safetensors").unlink()
    folder = read_folder(run_copy)
    assert folder.weights == run_copy / "best.safetensors"
    assert "has not finished" in folder.gaps[0]
    (run_copy / "best.safetensors").unlink()
    folder = read_folder(run_copy)
    assert folder.weights is None
    assert "--resume" in folder.gaps[0]


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
def test_complete_rows_of_a_csv_file_are_read(run_copy, content, rows, gap):
    (run_copy / "train.csv").write_bytes(content)
    folder = read_folder(run_copy)
    assert len(folder.train.steps) == rows
    assert folder.train.steps == sorted(folder.train.steps)
    assert (gap in folder.gaps[0]) if gap else (folder.gaps == [])


@pytest.mark.parametrize("content", ["", "[]", "{", '{"data": 7}'])
def test_an_environment_without_data(run_copy, content):
    (run_copy / "environment.json").write_text(content)
    folder = read_folder(run_copy)
    assert folder.data is None
    assert bool(folder.gaps) == (content != '{"data": 7}')


def test_folders_of_the_same_name_get_distinct_names(run, tmp_path):
    paths = []
    for parent in ("a", "b"):
        (tmp_path / parent / "run").mkdir(parents=True)
        shutil.copy(run / "recipe.yaml", tmp_path / parent / "run")
        paths.append(tmp_path / parent / "run")
    assert [folder.name for folder in read_folders(paths)] == ["a/run", "b/run"]
    assert [folder.name for folder in read_folders([run, run])] == ["masks (1)", "masks (2)"]
