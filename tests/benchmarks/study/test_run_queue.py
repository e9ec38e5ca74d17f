"""The queue of a study: how it ends its run when it is stopped, and how long it says that the study takes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.study import runs as runs_module
from benchmarks.study.grid import COMPARED
from benchmarks.study.plan import LossPlan
from benchmarks.study.runs import RunQueue, StoppedError, _wait
from tests.benchmarks.study.finished_runs import finish


def rs_plan(data: Path, out: Path) -> LossPlan:
    return LossPlan(data=(data,), out=out, detector=COMPARED["atss-laptop"], losses=("rs",), head="published")


def test_sigterm_to_the_study_ends_its_run():
    sleeping = "import sys, time; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", sleeping], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.readline()
        before = signal.getsignal(signal.SIGTERM)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        assert _wait(run) == (-signal.SIGTERM, True)
        assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("status", [0, -signal.SIGTERM])
def test_a_study_stops_even_if_its_run_was_about_to_end(
    status: int, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = rs_plan(shapes, tmp_path)
    queue = RunQueue(Console(file=io.StringIO()), plan.total, plan.total_length)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: None)
    monkeypatch.setattr(runs_module, "_wait", lambda _: (status, True))
    with pytest.raises(StoppedError, match="repeat the same command"):
        queue.train(plan.rate_trials(plan.arm(shapes, "rs")))
    assert not queue.failed


def test_the_time_left_counts_the_steps_of_each_run(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LossPlan(
        data=(shapes,),
        out=tmp_path,
        detector=COMPARED["atss-laptop"],
        losses=("rs",),
        head="published",
        seeds=2,
        steps=800,
        trial_steps=100,
        factors=(1.0, 2.0),
    )
    output, seconds = io.StringIO(), [0.0]
    queue = RunQueue(Console(file=output), plan.total, plan.total_length)
    finish(plan.rate_trials(plan.arm(shapes, "rs"))[0], 20.0)  # before this study: it takes no time

    def train(command: list[str], **_: object) -> None:
        run = next(run for run in runs if run.name == Path(command[command.index("--out") + 1]).name)
        finish(run, 30.0)
        seconds[0] += 80 * run.length

    monkeypatch.setattr("subprocess.Popen", train)
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])
    monkeypatch.setattr(runs_module, "_wait", lambda _: (0, False))
    queue.train(runs := plan.rate_trials(plan.arm(shapes, "rs")))
    queue.train(runs := plan.runs(plan.arm(shapes, "rs")))
    endings = [line.split("AP ")[1] for line in output.getvalue().splitlines()]
    assert endings == ["20.0", "30.0  2 min 40 s left", "30.0  1 min 20 s left", "30.0"]
