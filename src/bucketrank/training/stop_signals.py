"""Ctrl-C and SIGTERM during a run. Imports nothing heavy: a command installs the handlers before it imports torch."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM stopped the run; ``--resume`` continues from the last checkpoint, or starts without one.

    Like KeyboardInterrupt it is not an Exception, so that no ``except Exception`` of a library catches it.
    """


class StopSignals:
    """The handler of both signals: it raises Interrupted, or sets ``received`` while ``deferred``.

    A run in its steps reads ``received`` after each step, so that it stops in a state that can be saved. A second
    Ctrl-C raises Interrupted all the same; a second SIGTERM does not, because schedulers repeat it.
    """

    def __init__(self) -> None:
        self.received = False
        self.deferred = False

    def handle(self, number: int, frame: object) -> None:
        """Handle one signal."""
        again = self.received and number == signal.SIGINT
        self.received = True
        if again or not self.deferred:
            raise Interrupted

    def defer(self) -> None:
        """From now on set ``received`` instead of raising, and hold signals back until ``deliver``.

        Processes started meanwhile inherit that both signals are held back. A signal to the whole process group thus
        waits in each process until its own handler is installed, and ends none of them during its imports.
        """
        self.deferred = True
        _mask("SIG_BLOCK")

    def deliver(self) -> None:
        """Receive the signals that were held back."""
        _mask("SIG_UNBLOCK")


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Install the handlers, and restore the earlier ones at the end; outside the main thread do nothing.

    A run inside a command shares the handler of the command: a signal that comes after the last step, when the run has
    returned and the command has not, must not turn a finished run into a stopped one.
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


def _mask(how: str) -> None:
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(getattr(signal, how), SIGNALS)
