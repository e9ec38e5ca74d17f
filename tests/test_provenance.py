"""The description of the machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils import collect_env

from bucketrank.provenance import _commit, describe, describe_gpu, format_gpu, format_machine


def test_description_is_json_with_versions() -> None:
    machine = describe()
    assert json.loads(json.dumps(machine)) == machine
    assert torch.__version__.startswith(str(machine["versions"]["torch"]))
    assert machine["torch_threads"] == torch.get_num_threads()
    assert machine["processor"]
    assert 1 <= machine["cores"] <= (os.cpu_count() or 1)
    assert f"torch {machine['versions']['torch']}" in format_machine(machine)


def test_words_tell_commit_and_changes() -> None:
    machine = describe()
    machine["commit"], machine["modified"] = "0123456789abcdef", True
    assert "0123456789ab with local changes" in format_machine(machine)
    machine["commit"], machine["modified"] = None, None
    assert "no commit" in format_machine(machine)


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


# The description of a GPU, with stand-ins for the devices.


PROPERTIES = SimpleNamespace(
    name="Stand-in", total_memory=8 * 2**30, major=9, minor=0, gcnArchName="gfx942", driver_version=None
)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES)
    monkeypatch.setattr(collect_env, "get_nvidia_driver_version", lambda run: "570.1")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.usefixtures("cuda")
def test_nvidia() -> None:
    gpu = describe_gpu("cuda:0")
    assert gpu == {
        "name": "Stand-in",
        "memory_gb": 8.0,
        "architecture": "sm_90",
        "driver": "570.1",
        "runtime": "CUDA 12.8",
    }
    machine = describe("cuda")
    assert (machine["gpu"], machine["gpu_details"]) == ("Stand-in", gpu)
    assert "triton" in machine["versions"]
    assert format_machine(machine).startswith("Stand-in (8 GB, sm_90, driver 570.1, CUDA 12.8), ")


@pytest.mark.usefixtures("cuda")
def test_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3")
    gpu = describe_gpu("cuda")
    assert gpu is not None
    assert format_gpu(gpu) == "Stand-in (8 GB, gfx942, ROCm 6.3)"


def test_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="Arc", total_memory=16 * 2**30, driver_version="1.6")
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    gpu = describe_gpu("xpu")
    assert gpu is not None
    assert format_gpu(gpu) == "Arc (16 GB, driver 1.6)"


def test_the_cpu_has_no_gpu() -> None:
    assert describe_gpu("cpu") is None
    machine = describe()
    assert machine["gpu_details"] is None
    assert "triton" not in machine["versions"]


def test_the_properties_have_these_names() -> None:
    properties = getattr(torch._C, "_CudaDeviceProperties", None)
    if properties is None:
        pytest.skip("this build of torch has no CUDA")
    for name in ("name", "total_memory", "major", "minor", "gcnArchName"):
        assert hasattr(properties, name)
