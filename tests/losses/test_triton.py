"""When the Triton kernels are chosen: what they need, and what happens where it is missing."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from bucketrank import ap_loss, use_backend
from bucketrank.losses import backend, triton

HAS_TRITON = importlib.util.find_spec("triton") is not None
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    caches = (triton.unavailable_reason, triton.import_problem, backend._log_once)
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


class _OnDevice:
    """The only property of logits that the choice reads."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)


def _choose(method: str, name: str, device: str) -> Any:
    logits: Any = _OnDevice(device)
    return backend.triton_for(method, name, logits)


def test_other_devices_are_named() -> None:
    for name in ("cpu", "mps", "xpu"):
        reason = triton.unavailable_reason(torch.device(name))
        assert reason == f"The Triton kernels run on CUDA and ROCm devices, not on {name}."


def test_a_missing_or_old_or_broken_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert triton.unavailable_reason(CUDA) == "Triton is not installed."
    triton.import_problem.cache_clear()
    with mock.patch.dict(sys.modules, triton=mock.Mock(__version__="3.1.0+git1", __spec__=mock.Mock())):
        assert triton.import_problem() == "The kernels need Triton 3.2 or newer, got 3.1.0+git1."
    triton.import_problem.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it raises
    with mock.patch("importlib.util.find_spec", return_value=object()):
        reason = triton.import_problem()
    assert reason is not None
    assert reason.startswith("Triton cannot be imported: ")


def test_an_old_gpu_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (6, 1))
    with mock.patch.object(triton, "import_problem", return_value=None):
        reason = triton.unavailable_reason(CUDA)
    assert reason == "The kernels need an NVIDIA GPU of compute capability 7.0 or higher, got 6.1."


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_a_kernel_that_cannot_be_launched_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Many images of CUDA have no C compiler, with which Triton builds its launchers."""
    from bucketrank.losses.triton import launch

    def probe(device: torch.device) -> None:
        raise RuntimeError(f"Failed to find C compiler for {device}\nPlease specify via CC environment variable")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(launch, "probe", probe)
    assert triton.unavailable_reason(CUDA) == (
        "Triton cannot run a kernel on cuda:0: Failed to find C compiler for cuda:0."
    )
    with caplog.at_level(logging.WARNING):
        assert _choose("exact", "auto", "cuda:0") is None
    assert len(caplog.messages) == 1


@pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="needs Triton and no GPU")
def test_the_probe_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    reason = triton.unavailable_reason(CUDA)  # there is no such device, whatever Triton says about it
    assert reason is not None
    assert reason.startswith("Triton cannot run a kernel on cuda:0: ")


@pytest.mark.slow
def test_importing_the_losses_does_not_import_triton() -> None:
    code = "import sys, bucketrank.losses, bucketrank.losses.triton; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_auto_chooses_triton_on_gpus_alone() -> None:
    with mock.patch.object(triton, "unavailable_reason", return_value=None):
        for device in ("cuda", "cuda:1", "xpu"):
            assert _choose("exact", "auto", device) is triton
            assert _choose("exact", "torch", device) is None
            assert _choose("pairwise", "auto", device) is None
            assert _choose("bucketed", "triton", device) is None
        for device in ("cpu", "mps", "meta"):
            assert _choose("exact", "auto", device) is None


def test_one_line_says_why_triton_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "unavailable_reason", "{} is too old".format)
    monkeypatch.setattr(triton, "import_problem", lambda: None)
    with caplog.at_level(logging.WARNING):
        for device in ("cuda:0", "cuda:0", "cpu"):
            assert _choose("exact", "auto", device) is None
    assert caplog.messages == [
        "ranking losses on cuda use torch operations instead of Triton kernels: cuda:0 is too old"
    ]
    with (
        use_backend("triton"),
        pytest.raises(ValueError, match="use_backend: the Triton kernels cannot rank tensors on cpu: cpu is too old"),
    ):
        ap_loss(torch.zeros(2), torch.ones(2))


def test_without_triton_the_error_says_so() -> None:
    with (
        mock.patch.object(triton, "import_problem", return_value="Triton is not installed."),
        pytest.raises(ImportError, match=r'"triton" needs Triton.*: Triton is not installed'),
        use_backend("triton"),
    ):
        pass
