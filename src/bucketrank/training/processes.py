"""The processes of a run: stop signals, ranks and child processes.

Imports nothing heavy: a command installs the signal handlers before it imports torch.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Rank variables of Lightning, torchrun, SLURM and LSF, for the process or its machine.
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "NODE_RANK", "GROUP_RANK")
PARENT = "BUCKETRANK_PARENT"  # environment variable with the PID of the process that starts the others
FOLDER = "BUCKETRANK_RUN_FOLDER"  # environment variable with the run folder that the first process chose
POLL_SECONDS = 1.0


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM stopped the run; ``--resume`` continues from the last checkpoint, or starts without one.

    Like KeyboardInterrupt, it is not an Exception, so no ``except Exception`` in a library catches it.
    """


class StopSignals:
    """Signal handler that raises Interrupted or, while ``deferred``, sets ``received``.

    The training loop checks ``received`` after each step and stops in a state that can be saved. A second Ctrl-C raises
    Interrupted even while deferred. A second SIGTERM does not, because schedulers repeat it.
    """

    def __init__(self) -> None:
        self.received = False
        self.deferred = False

    def handle(self, number: int, _frame: object) -> None:
        """Handle one signal."""
        again = self.received and number == signal.SIGINT
        self.received = True
        if again or not self.deferred:
            raise Interrupted

    def defer(self) -> None:
        """Set ``received`` instead of raising from now on, and block both signals until ``unblock``.

        Child processes inherit the block. A signal to the whole process group then waits in each process until its
        handler is installed, and kills none of them during its imports.
        """
        self.deferred = True
        _mask("SIG_BLOCK")

    def unblock(self) -> None:
        """Receive the signals that were blocked."""
        _mask("SIG_UNBLOCK")


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Install the handlers and restore the earlier ones at the end; do nothing outside the main thread.

    A run inside a command shares the command's handler: a signal between the end of the run and the end of the command
    must not turn a finished run into a stopped one.
    """
    current = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(current, StopSignals):
        yield current
        return
    stop = StopSignals()
    before = {}
    for number in SIGNALS:
        try:
            before[number] = signal.signal(number, stop.handle)
        except ValueError:  # noqa: PERF203 (not the main thread)
            break
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_first_process() -> bool:
    """Return whether this process is the first of its run, which writes the files; works before Lightning starts."""
    return all(os.environ.get(name, "0") in ("", "0") for name in RANKS)


def is_launched() -> bool:
    """Return whether a launcher like torchrun, SLURM or another run started this process as one of several."""
    return any(name in os.environ for name in RANKS)


@contextmanager
def pass_pid_to_children(folder: Path | None = None) -> Iterator[None]:
    """Pass our PID, and the run folder if given, to the child processes started in this context."""
    passed = {PARENT: str(os.getpid())} | ({} if folder is None else {FOLDER: str(folder)})
    before = {name: os.environ.get(name) for name in passed}
    os.environ.update(passed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def end_with_parent() -> None:
    """End this process soon after its parent, even if the parent ended while this process was importing.

    If the first process is killed, the others would otherwise wait for it, up to half an hour during start-up.
    """
    parent = int(os.environ.get(PARENT, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _mask(how: str) -> None:
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(getattr(signal, how), SIGNALS)
