"""The machine, package versions, commit and date that measured numbers belong to."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TypedDict

PACKAGES = ("bucketrank", "torch", "numba", "numpy")
PACKAGES_OF_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-windows")


class Machine(TypedDict):
    """Description of a machine, as written to JSON; None for what the system does not tell.

    ``gpu`` is the name of the GPU that was used, if one was. ``load`` is the mean load of the last minute, ``modified``
    whether the source tree has uncommitted changes.
    """

    processor: str
    cores: int
    load: float | None
    memory_gb: float | None
    gpu: str | None
    gpu_details: GpuDescription | None
    system: str
    torch_threads: int
    versions: dict[str, str | None]
    commit: str | None
    modified: bool | None
    date: str


def describe(device: str = "cpu", packages: tuple[str, ...] = PACKAGES) -> Machine:
    """Describe this machine, with the commit of the source tree if the package runs from one."""
    import torch

    commit, modified = _commit(Path(__file__).resolve().parents[2])
    gpu = describe_gpu(device)
    versions = {"python": platform.python_version(), **{name: _version(name) for name in packages}}
    if gpu is not None:
        versions["triton"] = next((version for name in PACKAGES_OF_TRITON if (version := _version(name))), None)
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        memory_gb=_memory_gb(),
        gpu=None if gpu is None else gpu["name"],
        gpu_details=gpu,
        system=f"{platform.system()} {platform.machine()}",
        torch_threads=torch.get_num_threads(),
        versions=versions,
        commit=commit,
        modified=modified,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def format_machine(machine: Machine) -> str:
    """Return one line for the foot of a table or figure."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    details = machine.get("gpu_details")  # not in older files
    gpu = f"{format_gpu(details)}, " if details else f"{machine['gpu']}, " if machine["gpu"] else ""
    commit = "no commit" if machine["commit"] is None else machine["commit"][:12]
    changed = " with local changes" if machine["modified"] else ""
    cores, threads = machine["cores"], machine["torch_threads"]
    return (
        f"{gpu}{machine['processor']}, {cores} core{'s' * (cores != 1)}, "
        f"{threads} torch thread{'s' * (threads != 1)}; {versions}; {commit}{changed}; {machine['date'][:10]}"
    )


def _processor() -> str:
    """Return the processor's model name; on Linux ``platform.processor()`` is empty or only the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return round(size / 2**30, 1)


def _version(package: str) -> str | None:
    # Read from the metadata: importing numba takes half a second.
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(root: Path) -> tuple[str | None, bool | None]:
    """Return HEAD of the tree at ``root`` and whether its source has changes; None for both without a commit."""
    # An installed package may lie in a virtual environment inside another repository.
    if not (root / ".git").exists() or not (root / "src" / "bucketrank").is_dir():
        return None, None
    head = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    status = _git(root, "status", "--porcelain", "--", "src", "benchmarks")
    return head or None, None if status is None or not head else bool(status)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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
    driver, architecture, runtime = getattr(properties, "driver_version", None), None, None
    if device_type == "cuda" and torch.version.hip is not None:
        architecture, runtime = properties.gcnArchName, f"ROCm {torch.version.hip}"
    elif device_type == "cuda":
        from torch.utils.collect_env import get_nvidia_driver_version, run

        driver, runtime = get_nvidia_driver_version(run), f"CUDA {torch.version.cuda}"
        architecture = f"sm_{properties.major}{properties.minor}"
    memory = round(properties.total_memory / 2**30, 1)
    return GpuDescription(
        name=properties.name, memory_gb=memory, architecture=architecture, driver=driver, runtime=runtime
    )


def format_gpu(gpu: GpuDescription) -> str:
    """Return the GPU in one line, without what is not known.

    >>> known = GpuDescription(name="A100", memory_gb=79.2, architecture="sm_80", driver="570.1", runtime="CUDA 12.8")
    >>> format_gpu(known)
    'A100 (79.2 GB, sm_80, driver 570.1, CUDA 12.8)'
    """
    driver = f"driver {gpu['driver']}" if gpu["driver"] else None
    details = (f"{gpu['memory_gb']:g} GB", gpu["architecture"], driver, gpu["runtime"])
    return f"{gpu['name']} ({', '.join(word for word in details if word)})"
