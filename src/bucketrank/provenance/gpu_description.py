"""The GPU that measured numbers belong to: memory, architecture, driver and runtime."""

from __future__ import annotations

from typing import TypedDict

PACKAGES_OF_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-windows")


class GpuDescription(TypedDict):
    """Description of a GPU, as written to JSON; None for what the system does not tell."""

    name: str
    memory_gb: float
    architecture: str | None
    driver: str | None
    runtime: str | None


def describe_gpu(device: str) -> GpuDescription | None:
    """Describe a CUDA, ROCm or XPU device; None for other devices."""
    import torch

    device_type = torch.device(device).type
    if device_type not in ("cuda", "xpu"):
        return None
    properties = getattr(torch, device_type).get_device_properties(device)
    described = GpuDescription(
        name=properties.name,
        memory_gb=round(properties.total_memory / 2**30, 1),
        architecture=None,
        driver=getattr(properties, "driver_version", None),
        runtime=None,
    )
    if device_type == "xpu":
        return described
    if torch.version.hip is not None:
        return {**described, "architecture": properties.gcnArchName, "runtime": f"ROCm {torch.version.hip}"}
    from torch.utils.collect_env import get_nvidia_driver_version, run

    architecture = f"sm_{properties.major}{properties.minor}"
    driver = get_nvidia_driver_version(run)
    return {**described, "architecture": architecture, "driver": driver, "runtime": f"CUDA {torch.version.cuda}"}


def gpu_in_words(gpu: GpuDescription) -> str:
    """Return the GPU in one line, without what is not known.

    >>> known = GpuDescription(name="A100", memory_gb=79.2, architecture="sm_80", driver="570.1", runtime="CUDA 12.8")
    >>> gpu_in_words(known)
    'A100 (79.2 GB, sm_80, driver 570.1, CUDA 12.8)'
    """
    driver = f"driver {gpu['driver']}" if gpu["driver"] else None
    details = (f"{gpu['memory_gb']:g} GB", gpu["architecture"], driver, gpu["runtime"])
    return f"{gpu['name']} ({', '.join(word for word in details if word)})"
