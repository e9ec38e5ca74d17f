"""The command, with real runs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, TextIO

import pytest

from benchmarks.__main__ import main
from bucketrank.cli import main as bucketrank_main
from bucketrank.data import write_shapes
from tests.training.tiny import USUAL

TINY = [word for word in USUAL.split() if word != "--trainer.deterministic"]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("data") / "shapes", train=8, val=2, size=64, seed=0)


START = subprocess.Popen


class SameProcess:
    """A run of ``bucketrank`` in this process instead of a new one, whose start would take seconds."""

    def __init__(self, arguments: list[str], log: TextIO) -> None:
        with redirect_stdout(log), redirect_stderr(log):
            self.status = bucketrank_main(arguments)

    def wait(self) -> int:
        return self.status


def start_here(command: list[str], **settings: Any) -> Any:
    """Stand in for ``subprocess.Popen``; other programs, like git, start as usual."""
    if command[:3] != [sys.executable, "-m", "bucketrank.cli"]:
        return START(command, **settings)
    assert settings["stderr"] == subprocess.STDOUT
    return SameProcess(command[3:], settings["stdout"])


@pytest.mark.slow
@pytest.mark.long
def test_a_study_from_beginning_to_end_and_again(shapes, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", start_here)
    words = ["study", "detectors", "--data", str(shapes), "--out", str(tmp_path / "study"), "--seeds", "1"]
    words += ["--only", "atss-rs-exact,atss-rs-pairwise", "--rates", "1,1e9", "--rounds", "2", *TINY]
    words += ["--schedule.epochs=1", "--schedule.clip=null"]
    assert main(words) == 1, "the run with a huge learning rate fails"
    printed = capfd.readouterr().out
    assert "4 runs; all files go to" in printed
    assert "2 of 4  atss-rs-exact-lr1e+06-trial  failed (see " in printed
    assert "the loss is not finite" in printed
    assert "4 of 4  atss-rs-pairwise-lr0.001-seed0  AP " in printed
    assert "- `atss-rs-exact-lr1e+06-trial`: failed" in (tmp_path / "study/detectors.md").read_text()
    document = json.loads((tmp_path / "study/detectors.json").read_text())
    assert [row["lr"] for row in document["rows"]] == [0.001, 0.001]
    assert [len(row["runs"]) for row in document["rows"]] == [1, 1]
    gradients = next(each for each in document["claims"] if "the gradients of exact" in each["claim"])
    assert gradients["holds"] is True
    steps = (tmp_path / "study/steps.json").read_text()
    folders = {path: path.stat().st_mtime_ns for path in (tmp_path / "study/runs").glob("*/weights.safetensors")}
    assert len(folders) == 3  # one trial and two final runs
    # Finished runs are skipped.
    assert main([*words[:-1], "--only", "atss-rs-exact,atss-rs-pairwise", "--rates", "1", words[-1]]) == 0
    assert {path: path.stat().st_mtime_ns for path in folders} == folders
    assert (tmp_path / "study/steps.json").read_text() == steps


def test_ctrl_c_stops_the_run_and_the_study(shapes, tmp_path, capfd, monkeypatch):
    """A terminal sends Ctrl-C to the study and to its run, which ends its step and exits with 130."""
    run = "import signal, time; signal.signal(signal.SIGINT, lambda *_: exit(130)); print('ready', flush=True); "
    started = []

    def popen(command: list[str], **_: object) -> subprocess.Popen[bytes]:
        process = START([sys.executable, "-c", run + "time.sleep(60)"], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()

        def press() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # the run ends after the study was interrupted
            os.kill(process.pid, signal.SIGINT)

        threading.Timer(0.2, press).start()
        started.append(command)
        return process

    monkeypatch.setattr("subprocess.Popen", popen)
    monkeypatch.setattr("benchmarks.study.command.measure_steps", lambda *_, **__: {})
    words = ["study", "detectors", "--data", str(shapes), "--out", str(tmp_path), "--only", "atss-focal,atss-rs-exact"]
    assert main([*words, "--seeds", "1", "--rates", "1", *TINY]) == 130
    name = "atss-rs-exact-lr0.001-seed0"
    assert [command[command.index("--out") + 1] for command in started] == [str(tmp_path / "runs" / name)]
    assert f"study: stopped in {name}; repeat the same command to resume" in capfd.readouterr().err
    assert "Not complete: 2 runs are not finished." in (tmp_path / "detectors.md").read_text()


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("detecors --data {data}", 2, "got 'detecors'; the nearest is \"detectors\""),
        ("detectors", 2, "study: expected --data, the folder of the data set"),
        ("detectors --data {data} --budget smal", 2, "got 'smal'; the nearest is \"small\""),
        ("detectors --data {data} --seeds 0", 2, "expected --seeds of at least 1"),
        ("detectors --data {data} --rates a", 2, "--rates: expected numbers separated by commas, got 'a'"),
        (
            "detectors --data {data} --only yolo",
            2,
            "--only: no row matches 'yolo'; the rows are faster-rcnn-rs-exact, ",
        ),
        ("detr --data {data}/missing", 1, "{data}/missing: "),
        ("detr --data {data}/missing --budget paper", 1, "{data}/missing: "),
        ("synthetic --only a --schedule.lr 1", 2, "takes --out alone; remove --only, settings"),
        ("synthetic --seeds 5", 2, "takes --out alone; remove --seeds"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_written(shapes, tmp_path, capsys, words, status, message):
    out = tmp_path / "study"
    assert main(["study", *words.format(data=shapes).split(), "--out", str(out)]) == status
    assert message.format(data=shapes) in capsys.readouterr().err
    assert not out.exists()


def test_step_times_that_cannot_be_read(shapes, tmp_path, capsys):
    (tmp_path / "steps.json").write_text('{"ATSS": {"samples": []}}')
    words = ["study", "detectors", "--data", str(shapes), "--out", str(tmp_path), "--only", "atss-focal"]
    assert main(words) == 1
    message = capsys.readouterr().err
    assert "steps.json: cannot be read" in message
    assert "remove it to time the steps again" in message
    assert not (tmp_path / "runs").exists()


def test_dry_run(shapes, tmp_path, capsys):
    words = ["study", "detr", "--data", str(shapes), "--out", str(tmp_path / "study"), "--seeds", "1", "--dry-run"]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 * 3, "the trials of two losses; the rates of the final runs are not known yet"
    assert all(line.startswith("bucketrank train brs-detr-laptop ") for line in printed)
    assert not (tmp_path / "study").exists()
