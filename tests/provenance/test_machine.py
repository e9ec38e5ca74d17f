"""The description of the machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from bucketrank.provenance.machine import _commit, describe, in_words


def test_description_is_json_with_versions() -> None:
    machine = describe()
    assert json.loads(json.dumps(machine)) == machine
    assert torch.__version__.startswith(str(machine["versions"]["torch"]))
    assert machine["torch_threads"] == torch.get_num_threads()
    assert machine["processor"]
    assert 1 <= machine["cores"] <= (os.cpu_count() or 1)
    assert f"torch {machine['versions']['torch']}" in in_words(machine)


def test_words_tell_commit_and_changes() -> None:
    machine = describe()
    machine["commit"], machine["modified"] = "0123456789abcdef", True
    assert "0123456789ab with local changes" in in_words(machine)
    machine["commit"], machine["modified"] = None, None
    assert "no commit" in in_words(machine)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_of_a_tree(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert _commit(tmp_path) == (None, None)
    source = tmp_path / "src" / "bucketrank" / "cli.py"
    source.parent.mkdir(parents=True)
    source.write_text("old")
    git("init")
    assert _commit(tmp_path) == (None, None), "no commit yet"
    git("add", ".")
    git("commit", "-m", "first")
    assert _commit(tmp_path) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "results.json").write_text("{}")
    assert _commit(tmp_path) == (git("rev-parse", "HEAD"), False), "results are not source"
    source.with_name("new.py").write_text("new")
    assert _commit(tmp_path) == (git("rev-parse", "HEAD"), True)
    source.with_name("new.py").unlink()
    source.write_text("new")
    assert _commit(tmp_path) == (git("rev-parse", "HEAD"), True)


def test_a_package_inside_another_repository_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert _commit(tmp_path) == (None, None)
