"""Lightning Fabric for a run: devices, precision, processes and their communication."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from bucketrank.errors import KilledProcessError, RecipeError
from bucketrank.settings.training import TrainerSettings
from bucketrank.training.log import build_loggers

STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true")


def build_fabric(settings: TrainerSettings, folder: Path) -> Fabric:
    """Build Fabric from a recipe's trainer settings; ``launch`` starts the other processes, if any."""
    loggers = build_loggers(settings.loggers, folder)
    try:
        return Fabric(
            accelerator=settings.accelerator,
            devices=settings.devices if settings.devices == "auto" else int(settings.devices),
            num_nodes=settings.nodes,
            strategy=settings.strategy,
            precision=settings.precision,
            loggers=loggers,
        )
    except (RuntimeError, ValueError, MisconfigurationException) as error:
        if settings.accelerator in ("cuda", "gpu") and not torch.cuda.is_available():
            raise RecipeError("device: expected one that torch can use, got cuda without a GPU; try cpu") from error
        names = "trainer.accelerator, trainer.devices and trainer.strategy"
        raise RecipeError(f"expected {names} that Lightning accepts on this machine, got: {error}") from error


def killed_process_message(folder: Path) -> str:
    """Say that a process was killed, and how to resume."""
    return f"a process of the run was killed; continue with: bucketrank train {shlex.quote(str(folder))} --resume"


@contextmanager
def killed_process_named(fabric: Fabric, folder: Path) -> Iterator[None]:
    """Raise KilledProcessError in place of the communication error that a dead child process causes."""
    try:
        yield
    except RuntimeError as error:
        children = getattr(fabric.strategy.launcher, "procs", [])
        if any(child.poll() not in (None, 0) for child in children):
            raise KilledProcessError(killed_process_message(folder)) from error
        raise


class ResumeAdvice(logging.Handler):
    """Print how to resume when a child process has died while this one waits for it.

    Lightning's observer logs the death and then kills all processes, this one included, so nothing later can say it.
    """

    observer = logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script")

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:  # noqa: ARG002 (logging's signature)
        sys.stderr.write(f"bucketrank: train: {killed_process_message(self.folder)}\n")
        sys.stderr.flush()

    @classmethod
    def install(cls, folder: Path) -> None:
        """Listen to the observer; replace an earlier run's handlers."""
        cls.observer.handlers = [cls(folder)]
        cls.observer.setLevel(logging.INFO)
        cls.observer.propagate = False


def require_strategy(name: str) -> None:
    """Raise RecipeError for strategies that shard the model or that start processes by fork or spawn."""
    # Lightning checks the other names that begin with ddp.
    started_by_multiprocessing = ("ddp_spawn", "ddp_fork", "ddp_notebook")
    if not name.startswith(("auto", "ddp")) or name.startswith(started_by_multiprocessing):
        raise RecipeError(f"trainer.strategy: expected one of {', '.join(STRATEGIES)}, got {name!r}")


def any_process(fabric: Fabric, *, flag: bool) -> bool:
    """Return whether the flag is set in any process, so that all processes decide alike."""
    if fabric.world_size == 1:
        return flag
    count = fabric.all_reduce(torch.tensor(float(flag), device=fabric.device), reduce_op="sum")
    return bool(count)


def broadcast_buffers(fabric: Fabric, module: nn.Module) -> None:
    """Broadcast the buffers of the first process, which are saved.

    Batch norms in training mode have seen different images in each process since DDP last synced them. Without this, an
    evaluation after a resume would start from other running statistics.
    """
    if fabric.world_size > 1:
        for buffer in module.buffers():
            torch.distributed.broadcast(buffer, src=0)


def require_equal_weights(fabric: Fabric, module: nn.Module) -> None:
    """Raise RuntimeError unless all processes have the same weights: only those of the first process are saved."""
    if fabric.world_size > 1:
        sums = torch.stack([parameter.detach().double().sum() for parameter in module.parameters()])
        extremes = [fabric.all_reduce(sums.clone(), reduce_op=name) for name in ("max", "min")]
        if not torch.equal(*cast("list[Tensor]", extremes)):
            raise RuntimeError("the weights of the processes differ; were all started with the same settings?")


@contextmanager
def deterministic_algorithms(*, enabled: bool) -> Iterator[None]:
    """Switch torch's deterministic mode, and restore it afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence logs and warnings of Lightning and timm that do not apply to our runs."""
    # Lightning logs its devices, which a run announces itself. timm logs unused tensors of pretrained backbones, which
    # are checked when the backbone is built.
    names = ("lightning.fabric", "lightning.pytorch", "timm")
    loggers = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # Lightning's use of torch.utils._pytree.
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=DeprecationWarning)
        try:
            yield
        finally:
            for logger, level in loggers.items():
                logger.setLevel(level)
