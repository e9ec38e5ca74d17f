"""A run folder belongs to one run at a time, holds no leftovers, and never loses files of the user."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bucketrank.cli import main
from bucketrank.errors import RunFolderError
from bucketrank.training.folder import LOCK, lock_run_folder, require_no_foreign_files

from . import tiny

HOLD = """
import sys, time
from pathlib import Path
from bucketrank.training.folder import lock_run_folder
with lock_run_folder(Path(sys.argv[1])):
    (Path(sys.argv[1]) / "recipe.yaml").touch()
    print("locked", flush=True)
    time.sleep(600)
"""


def words(folder: Path, data: Path) -> list[str]:
    return ["train", "atss-laptop", "--data", str(data), "--out", str(folder), *tiny.USUAL.split()]


@pytest.fixture
def holder(tmp_path):
    """Another process that works in the folder ``run``."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.sampled(3)
def test_a_second_run_gets_one_line(holder, shapes, tmp_path, capsys):
    for more in ([], ["--resume"]):
        assert main([*words(tmp_path / "run", shapes), *more]) == 1
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert f"another run works in this folder (process {holder.pid} on " in error
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [LOCK, "recipe.yaml"]


@pytest.mark.slow
def test_the_system_releases_the_lock_of_a_killed_process(holder, tmp_path):
    with pytest.raises(RunFolderError), lock_run_folder(tmp_path / "run"):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock_run_folder(tmp_path / "run"):
        pass


def test_a_forked_worker_does_not_keep_the_lock(tmp_path):
    with lock_run_folder(tmp_path / "run"):
        (tmp_path / "run" / "recipe.yaml").touch()
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with lock_run_folder(tmp_path / "run"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_two_threads_do_not_share_a_folder(tmp_path):
    errors = []

    def enter() -> None:
        try:
            with lock_run_folder(tmp_path / "run"):
                pass
        except RunFolderError as error:
            errors.append(str(error))

    with lock_run_folder(tmp_path / "run"):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_a_folder_in_which_nothing_was_written_is_removed(tmp_path):
    with lock_run_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK).exists()
    assert not (tmp_path / "a").exists()
    (tmp_path / "mine").mkdir()
    with lock_run_folder(tmp_path / "mine"):
        pass
    assert list((tmp_path / "mine").iterdir()) == []


def test_leftovers_of_kills_are_removed_at_the_next_start(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    ours = [".train.csv.7", ".weights.safetensors.7", "checkpoints/.last.safetensors.12345", "pictures/.3.jpg.7"]
    others = [".notes.txt.7", "checkpoints/.mine.7", "last.safetensors.7", "pictures/.cat.jpg.7"]
    for name in (*ours, *others):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("1234567890")
    with lock_run_folder(tmp_path):
        left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
        assert left - {LOCK} == {*others}
    assert "removed 40 bytes of unfinished files" in caplog.text


@pytest.mark.parametrize("name", ["weights.safetensors", "train.csv", "pictures", "environment.json"])
@pytest.mark.parametrize("resume", [False, True])
def test_files_of_the_user_are_not_overwritten(name, resume, shapes, tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).write_text("mine")
    assert main([*words(folder, shapes), *["--resume"] * resume]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"files that a run would overwrite: {name}; choose another --out" in error
    assert [path.name for path in folder.iterdir()] == [name]
    assert (folder / name).read_text() == "mine"


def test_other_files_are_no_hindrance(tmp_path):
    (tmp_path / "notes.txt").touch()
    require_no_foreign_files(tmp_path, resume=False)
