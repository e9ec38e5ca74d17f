"""The description of a GPU, with stand-ins for the devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils import collect_env

from bucketrank.provenance.gpu_description import describe_gpu, gpu_in_words
from bucketrank.provenance.machine import describe, in_words

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
    assert in_words(machine).startswith("Stand-in (8 GB, sm_90, driver 570.1, CUDA 12.8), ")


@pytest.mark.usefixtures("cuda")
def test_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3")
    gpu = describe_gpu("cuda")
    assert gpu is not None
    assert gpu_in_words(gpu) == "Stand-in (8 GB, gfx942, ROCm 6.3)"


def test_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="Arc", total_memory=16 * 2**30, driver_version="1.6")
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    gpu = describe_gpu("xpu")
    assert gpu is not None
    assert gpu_in_words(gpu) == "Arc (16 GB, driver 1.6)"


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
