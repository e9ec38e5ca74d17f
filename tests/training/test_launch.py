"""The processes of one run end with the one that started them."""

import os
import subprocess
import sys

import pytest

from bucketrank.training.launch import PARENT, parent_of_others

CHILD = "import time; from bucketrank.training.launch import end_with_parent; end_with_parent(); time.sleep(SECONDS)"


def child(seconds: float) -> int:
    """Return the status of a new process that lasts for ``seconds`` unless its parent has ended."""
    return subprocess.run([sys.executable, "-c", CHILD.replace("SECONDS", str(seconds))], check=False).returncode


def test_a_process_ends_whose_parent_has_ended_during_its_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT, str(2**22 + 1))  # beyond the largest number of a process
    assert child(60) == 1


def test_a_process_lives_as_long_as_its_parent() -> None:
    with parent_of_others():
        assert child(0.1) == 0
    assert PARENT not in os.environ
    assert child(0.1) == 0, "started by another launcher"


def test_the_variable_of_an_outer_run_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT, "7")
    with parent_of_others():
        assert os.environ[PARENT] == str(os.getpid())
    assert os.environ[PARENT] == "7"
