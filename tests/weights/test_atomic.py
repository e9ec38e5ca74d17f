"""Files are complete or absent, have the modes of the umask, and have the same bytes for the same content."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from bucketrank.cli.arguments import run
from bucketrank.errors import DataError, DiskFullError, as_user_error
from bucketrank.training.log import CsvTable
from bucketrank.weights.atomic import remove_temporary_files, require_writable, write, write_tensors, write_text

TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3),
    "a": torch.tensor([1, 2], dtype=torch.int64),
    "odd": torch.tensor([True, False, True]),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "transposed": torch.arange(6).reshape(2, 3).T,
}
SAVE = """
import sys, torch
from pathlib import Path
from bucketrank.weights.atomic import write_tensors
write_tensors(Path(sys.argv[1]), {"x": torch.ones(3), "y": torch.ones(2)}, {name: name for name in "abcdefgh"})
"""


def test_the_library_reads_what_is_written(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, {"name": "värde", "other": "1"})
    for name, tensor in load_file(path).items():
        torch.testing.assert_close(tensor, TENSORS[name], rtol=0, atol=0)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"name": "värde", "other": "1"}
        assert {*file.keys()} == {*TENSORS}


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(tmp_path):
    files = [tmp_path / "one.safetensors", tmp_path / "other.safetensors"]
    for path in files:
        subprocess.run([sys.executable, "-c", SAVE, str(path)], check=True, timeout=120)
    one, other = (path.read_bytes() for path in files)
    assert one == other


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_modes_follow_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        write_tensors(tmp_path / "x.safetensors", TENSORS, {})
        write_text(tmp_path / "x.txt", "x")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~mask}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_and_leaves_the_old_file(number, tmp_path, monkeypatch, capsys):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x": torch.ones(1)}, {})
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match=r"x\.safetensors: cannot be written, the disk or the quota is full"):
        write_tensors(path, TENSORS, {})
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]
    assert path.read_bytes() == before

    def save() -> None:
        write_tensors(path, TENSORS, {})

    assert run({"save": save}, ["save"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_row_on_a_full_disk_is_one_line(tmp_path):
    table = CsvTable(tmp_path / "train.csv")
    table.add({"step": 1, "loss": 2.0})
    table.path.unlink()
    table.path.symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match=r"train\.csv: cannot be written"):
        table.add({"step": 2, "loss": 1.0})


def test_other_errors_of_the_system_stay(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "file" / "x.txt", "x")


def test_only_our_temporary_files_are_removed(tmp_path):
    for name in (".a.txt.12", ".b.txt.12", ".a.txt", "a.txt.12", ".a.txt.x"):
        (tmp_path / name).write_text("12345")
    (tmp_path / ".a.txt.13").mkdir()
    assert remove_temporary_files(tmp_path, lambda name: name == "a.txt") == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".a.txt",
        ".a.txt.13",
        ".a.txt.x",
        ".b.txt.12",
        "a.txt.12",
    ]
    assert remove_temporary_files(tmp_path / "nothing", lambda name: True) == 0


def test_a_place_that_cannot_be_written_to_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"a.onnx: cannot be written, because .*/file is a file; choose another place"):
        require_writable(tmp_path / "file" / "a.onnx", "a.onnx")
    require_writable(tmp_path / "new" / "folder" / "a.onnx", "a.onnx")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(DataError, match=f"cannot be written, because {tmp_path} is read-only"):
        require_writable(tmp_path / "new" / "a.onnx", "a.onnx")


def test_errors_name_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    def refuse(temporary: Path) -> None:
        raise PermissionError(13, "Permission denied", str(temporary))

    with pytest.raises(PermissionError) as caught:
        write(tmp_path / "a.json", refuse)
    assert str(as_user_error(caught.value)).startswith(f"{tmp_path / 'a.json'}: Permission denied; check the path and")
