"""The Triton backend: when it is available, and its tests in the interpreter, in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from bucketrank.losses import triton as triton_backend

ROOT = Path(__file__).parents[2]
HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture(autouse=True)
def _forget_triton():
    triton_backend._triton_problem.cache_clear()
    yield
    triton_backend._triton_problem.cache_clear()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already in the interpreter")
def test_the_kernels_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    selection = request.config.getoption("markexpr")
    command = [sys.executable, "-m", "pytest", "tests/losses/triton", "-q", "-x", "-p", "no:cacheprovider"]
    if selection:
        command += ["-m", selection]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = triton_backend.unavailable_reason(torch.device("cpu"))
    assert reason == "The Triton kernels run on CUDA and ROCm devices; on the CPU only in Triton's interpreter."
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert (triton_backend.unavailable_reason(torch.device("cpu")) is None) == HAS_TRITON


def test_other_devices_are_named() -> None:
    reason = triton_backend.unavailable_reason(torch.device("mps"))
    assert reason == "The Triton kernels run on CUDA and ROCm devices, not on mps."


def test_a_missing_or_old_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert triton_backend.unavailable_reason(torch.device("cpu")) == "Triton is not installed."
    triton_backend._triton_problem.cache_clear()
    with mock.patch.dict(sys.modules, triton=mock.Mock(__version__="3.1.0+git1", __spec__=mock.Mock())):
        reason = triton_backend.unavailable_reason(torch.device("cpu"))
    assert reason == "The kernels need Triton 3.2 or newer, got 3.1.0+git1."


def test_an_old_gpu_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(triton_backend, "_triton_problem", mock.Mock(return_value=None, cache_clear=lambda: None))
    reason = triton_backend.unavailable_reason(torch.device("cuda", 0))
    assert reason == "The kernels need an NVIDIA GPU of compute capability 7.0 or higher, got 6.1."


def test_importing_the_losses_does_not_import_triton() -> None:
    code = "import sys, bucketrank.losses, bucketrank.losses.triton; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
