"""State of the process during a run: signals, warnings and deterministic algorithms, all restored afterwards."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bucketrank.training.run_keeper import RunKeeper


@contextmanager
def stop_on_signal(keeper: RunKeeper) -> Iterator[None]:
    """End the run after the current step on Ctrl-C or SIGTERM; a second Ctrl-C ends it at once."""

    def request_stop(number: int, frame: object) -> None:  # noqa: ARG001
        keeper.asked_to_stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            before[number] = signal.signal(number, request_stop)
        except ValueError:  # noqa: PERF203 (not the main thread)
            break
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deterministic_restored() -> Iterator[None]:
    """Restore the deterministic mode, which Lightning sets for the whole process."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


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
