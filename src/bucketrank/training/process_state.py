"""State of the process during a run: warnings and deterministic algorithms, restored afterwards."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_restored() -> Iterator[None]:
    """Restore the deterministic mode, which Lightning sets for the whole process."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence advice of Lightning and timm that does not apply here."""
    # Lightning lists the devices, which our announcement does; timm lists tensors of a file that a backbone does not
    # need, which building the backbone has checked.
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("lightning.pytorch", "timm"))}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # Frozen stages and batch norms are meant to be in eval mode.
        warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode at the start of training")
        # The number of workers is a setting.
        warnings.filterwarnings("ignore", message=r".*does not have many workers which may be a bottleneck")
        # From Lightning's own use of torch.utils._pytree.
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=DeprecationWarning)
        try:
            yield
        finally:
            for logger, level in loggers.items():
                logger.setLevel(level)
