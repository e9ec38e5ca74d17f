"""Signals during compiled kernels: the exception of the signal handler is raised, not a SystemError."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from bucketrank import rank_sort_loss, use_backend
from bucketrank.losses.kernel_calls import call_kernel

from .cases import synthetic, total


class Alarm(BaseException):
    """Raised by the signal handler of these tests."""


@pytest.fixture
def alarms() -> Iterator[None]:
    """Raise Alarm at SIGALRM."""

    def handle(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, handle)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no timer signals")
@pytest.mark.usefixtures("alarms")
def test_interrupted_losses_raise_the_exception_of_the_signal_handler() -> None:
    logits, targets = synthetic(100_000, 2_000)
    logits.requires_grad_()
    raised: Counter[str] = Counter()

    def train() -> None:
        with use_backend("fused"):
            total(rank_sort_loss(logits, targets)).backward()

    train()  # compiles the kernels
    for tenths in range(50):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.002 + 1e-4 * tenths)
            while True:
                train()
        except BaseException as error:  # noqa: BLE001, PERF203 (a SystemError, if the test fails)
            raised[type(error).__name__] += 1
    assert raised == {"Alarm": 50}


def raises(error: BaseException) -> None:
    raise error


def caused_by(cause: BaseException | None) -> SystemError:
    error = SystemError("returned a result with an exception set")
    error.__cause__ = cause
    return error


def test_the_first_cause_is_raised() -> None:
    assert call_kernel(max, 1, 2) == 2
    interrupt = KeyboardInterrupt()
    for error in (caused_by(interrupt), caused_by(caused_by(interrupt))):
        with pytest.raises(KeyboardInterrupt) as raised:
            call_kernel(raises, error)
        assert raised.value is interrupt
        assert interrupt.__context__ is None


def test_a_system_error_without_a_cause_stays() -> None:
    error = caused_by(caused_by(None))
    with pytest.raises(SystemError) as raised:
        call_kernel(raises, error)
    assert raised.value is error
