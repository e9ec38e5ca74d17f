"""The command, with real runs."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from bucketrank.cli import main
from bucketrank.data import write_shapes
from tests.training.tiny import USUAL

TINY = [word for word in USUAL.split() if word != "--trainer.deterministic"]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("data") / "shapes", train=8, val=2, size=64, seed=0)


@pytest.mark.slow
@pytest.mark.long
def test_a_study_from_beginning_to_end_and_again(shapes, tmp_path, capfd):
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


@pytest.mark.slow
def test_ctrl_c_stops_the_run_and_the_study(shapes, tmp_path):
    words = ["study", "detectors", "--data", str(shapes), "--out", str(tmp_path / "study"), "--only", "atss-focal"]
    words += ["--seeds", "1", "--rates", "1", "--rounds", "2", *TINY, "--schedule.epochs=400"]
    run = tmp_path / "study/runs/atss-focal-lr0.001-seed0"
    with subprocess.Popen(
        [sys.executable, "-m", "bucketrank.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            while not (run / "train.csv").exists() and process.poll() is None:
                time.sleep(0.1)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)  # a terminal sends Ctrl-C to the whole process group
            printed, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, printed
    assert "stopped in atss-focal-lr0.001-seed0; repeat the same command to resume" in printed
    assert (run / "checkpoints").is_dir()
    assert not (run / "weights.safetensors").exists()


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
    assert len(printed) == 4 + 2 * 3
    assert all(line.startswith("bucketrank train brs-detr-laptop ") for line in printed)
    assert not (tmp_path / "study").exists()
