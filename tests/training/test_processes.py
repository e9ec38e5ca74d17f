"""Ctrl-C and SIGTERM at any moment: status 130 and how to resume. Child processes end with their parent."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bucketrank import settings as recipes
from bucketrank.cli import main
from bucketrank.errors import KilledProcessError
from bucketrank.evaluation import Evaluator
from bucketrank.training import loop as loop_module
from bucketrank.training import run as run_module
from bucketrank.training.checkpoints import Checkpoints
from bucketrank.training.fabric import killed_process_named
from bucketrank.training.log import RunLog
from bucketrank.training.loop import Loop
from bucketrank.training.processes import PARENT, Interrupted, pass_pid_to_children, stop_signals

from . import tiny

FLAGS = "--trainer.checkpoint_steps 1"
SENT = [signal.SIGINT, signal.SIGTERM]


def words(folder: Path, data: Path, flags: str = FLAGS) -> list[str]:
    usual = ["train", "atss-laptop", "--data", str(data), "--out", str(folder)]
    return [*usual, *tiny.USUAL.split(), *flags.split()]


@pytest.fixture(autouse=True)
def handlers_come_back():
    before = {number: signal.signal(number, signal.default_int_handler) for number in SENT}
    yield
    assert all(signal.getsignal(number) is signal.default_int_handler for number in SENT)
    for number, handler in before.items():
        signal.signal(number, handler)


def strike(patch: pytest.MonkeyPatch, owner: object, name: str, number: signal.Signals, *, call: int = 1) -> None:
    """Send the signal to this process before one call of a function."""
    usual = getattr(owner, name)
    calls = 0

    def struck(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            signal.raise_signal(number)
        return usual(*args, **kwargs)

    patch.setattr(owner, name, struck)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("number", SENT, ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Checkpoints, "_keep_last", 2),  # between two renames of a checkpoint
        (Loop, "evaluate_batch", 2),
        (Evaluator, "metrics", 1),
        (loop_module, "save_weights", 1),  # the best weights
        (Loop, "run", 1),
    ],
    ids=["checkpoint", "evaluation", "metrics", "best weights", "before the first step"],
)
def test_a_signal_in_the_run_leaves_a_checkpoint(owner, name, call, number, shapes, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        strike(patch, owner, name, number, call=call)
        assert main(words(folder, shapes)) == 130
    error = capsys.readouterr().err
    assert error == f"bucketrank: stopped; resume with: bucketrank train {folder} --resume\n"
    assert Checkpoints(folder / "checkpoints").load() is not None
    assert not (folder / "weights.safetensors").exists()


@pytest.mark.parametrize("number", SENT, ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("find_splits", "the run had not begun; start it with the same command"),
        ("build_detector", "the run had not begun; start it with the same command"),
        ("_announce", "resume with: bucketrank train "),
    ],
)
def test_a_signal_in_the_start_up_ends_it_at_once(name, remedy, number, shapes, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        strike(patch, run_module, name, number)
        assert main(words(folder, shapes)) == 130
    error = capsys.readouterr().err
    assert error.startswith(f"bucketrank: stopped; {remedy}")
    assert len(error.splitlines()) == 1
    assert folder.exists() == (name == "_announce")


@pytest.mark.parametrize(("owner", "name"), [(run_module, "_write_final_weights"), (RunLog, "draw_curves")])
def test_a_signal_after_the_last_step_lets_the_run_finish(owner, name, shapes, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    strike(monkeypatch, owner, name, signal.SIGTERM)
    assert main(words(folder, shapes, "--schedule.epochs 1")) == 0
    assert (folder / "weights.safetensors").exists()


def test_a_signal_between_the_end_of_the_run_and_that_of_the_command_changes_nothing(
    shapes, tmp_path, monkeypatch, capsys
):
    usual = run_module.train

    def train(*args, **kwargs):
        result = usual(*args, **kwargs)
        signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(run_module, "train", train)
    assert main(words(tmp_path / "run", shapes, "--schedule.epochs 1")) == 0
    assert capsys.readouterr().err == ""


def test_a_signal_whose_exception_is_swallowed_in_the_start_up_stops_the_run(shapes, tmp_path, monkeypatch, capsys):
    """Python ignores exceptions in finalisers and callbacks, which may run at any moment."""

    class Dropped:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    usual = recipes.load_recipe

    def load_recipe(*args):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "unraisablehook", lambda _: None)
            Dropped()
        return usual(*args)

    monkeypatch.setattr("bucketrank.training.start.load_recipe", load_recipe)
    folder = tmp_path / "run"
    assert main(words(folder, shapes)) == 130
    assert "bucketrank: stopped; resume with" in capsys.readouterr().err
    assert Checkpoints(folder / "checkpoints").load() is not None


def test_a_second_ctrl_c_ends_the_run_at_once(shapes, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    steps = []
    usual = Loop.compute_loss

    def pressed(loop, batch):
        steps.append(loop.progress.step)
        if loop.progress.step == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            steps.append(-1)
        return usual(loop, batch)

    monkeypatch.setattr(Loop, "compute_loss", pressed)
    assert main(words(folder, shapes)) == 130
    assert steps == [0, 1, 2]
    assert "resume with" in capsys.readouterr().err
    assert Checkpoints(folder / "checkpoints").load() is not None


def test_a_repeated_sigterm_is_one_request():
    with stop_signals() as stop:
        stop.defer()
        stop.unblock()
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert stop.received
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)


def test_held_back_signals_reach_a_child_only_when_it_is_ready():
    child = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    with stop_signals() as stop:
        stop.defer()
        try:
            printed = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
            assert "SIGINT" in printed
            assert "SIGTERM" in printed
        finally:
            stop.unblock()
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_outside_the_main_thread_there_are_no_handlers():
    entered = []

    def enter() -> None:
        with stop_signals() as stop:
            entered.append(stop.received)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [False]


# The first process sends Ctrl-C to its process group between two renames of a checkpoint, as a terminal does.
PROGRAM = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from bucketrank.cli import main
from bucketrank.training.checkpoints import Checkpoints
from bucketrank.training.processes import is_first_process
usual = Checkpoints._keep_last
calls = 0
def struck(checkpoints):
    global calls
    calls += 1
    if calls == 2 and is_first_process():
        os.killpg(0, signal.SIGINT)
    return usual(checkpoints)
Checkpoints._keep_last = struck
sys.exit(main())
"""


@pytest.mark.slow
def test_two_processes_stop_together(shapes, tmp_path):
    """Other moments and SIGTERM to one process are in test_strikes.py; here Lightning starts the second process."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    strategy = "--trainer.devices 2 --trainer.strategy ddp --trainer.checkpoint_steps 1"
    command = [sys.executable, str(program), *words(tmp_path / "run", shapes, strategy)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=400, start_new_session=True)
    assert done.returncode == 130, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert done.stderr.count("bucketrank: stopped; resume with") == 1
    assert Checkpoints(tmp_path / "run" / "checkpoints").load() is not None


CHILD = "import time; from bucketrank.training.processes import end_with_parent; end_with_parent(); time.sleep(SECONDS)"


def child(seconds: float) -> int:
    """Return the status of a new process that lasts for ``seconds`` unless its parent has ended."""
    return subprocess.run([sys.executable, "-c", CHILD.replace("SECONDS", str(seconds))], check=False).returncode


def test_a_process_ends_whose_parent_has_ended_during_its_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT, str(2**22 + 1))  # beyond the largest PID
    assert child(60) == 1


def test_a_process_lives_as_long_as_its_parent() -> None:
    with pass_pid_to_children():
        assert child(0.1) == 0
    assert PARENT not in os.environ
    assert child(0.1) == 0, "started by another launcher"


def test_the_variable_of_an_outer_run_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT, "7")
    with pass_pid_to_children():
        assert os.environ[PARENT] == str(os.getpid())
    assert os.environ[PARENT] == "7"


@pytest.mark.slow
def test_a_killed_child_process_ends_the_run_with_advice(tmp_path: Path) -> None:
    """Lightning's own observer finds the dead child, and kills the first process."""
    code = """
import os, pathlib, subprocess, sys
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from bucketrank.training.fabric import ResumeAdvice
ResumeAdvice.install(pathlib.Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
child.wait()
_ChildProcessObserver(os.getpid(), [child])._run()
"""
    folder = tmp_path / "my run"
    result = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL
    advice = f"a process of the run was killed; continue with: bucketrank train '{folder}' --resume\n"
    assert result.stderr.endswith(f"bucketrank: train: {advice}")


def test_the_communication_error_after_a_killed_child_is_named(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    child.wait()
    fabric: Any = SimpleNamespace(strategy=SimpleNamespace(launcher=SimpleNamespace(procs=[child])))
    with (
        pytest.raises(KilledProcessError, match=r"was killed; continue with: bucketrank train .* --resume"),
        killed_process_named(fabric, tmp_path),
    ):
        raise RuntimeError("connection reset by peer")
    fabric.strategy.launcher = None  # a run of one process
    with pytest.raises(RuntimeError, match="another error"), killed_process_named(fabric, tmp_path):
        raise RuntimeError("another error")
