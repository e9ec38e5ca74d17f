"""The long random tests run, count, and fail where something is wrong."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from bucketrank.data import checks as checking
from bucketrank.losses.comparison import on_host
from tests.losses.cases import LOSSES, use_backend
from tests.soak import named_strikes, random_strikes
from tests.soak.__main__ import main
from tests.soak.annotations import check_annotations
from tests.soak.loss_comparisons import compare_losses, random_input
from tests.training import struck_runs
from tests.training.test_strikes import ALONE, TOGETHER


def test_annotations(capsys: pytest.CaptureFixture[str]) -> None:
    main(["annotations", "--count", "60", "--seed", "3"])
    printed = capsys.readouterr().out
    assert " refused\n" in printed
    assert "seed 3\n" in printed


def test_annotations_that_raise_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> set[object]:
        raise KeyError("name")

    monkeypatch.setattr(checking, "check_categories", fail)
    with pytest.raises(KeyError, match="name"):
        check_annotations(60, 3)


def test_losses(capsys: pytest.CaptureFixture[str]) -> None:
    main(["losses", "--seconds", "0.5", "--threads", "2", "--seed", "3"])
    assert ", seed 3\n" in capsys.readouterr().out


def test_a_backend_is_forced_in_its_own_thread_only() -> None:
    both_entered, cpu = Barrier(2, timeout=60), torch.empty(0)

    def force(backend: str) -> bool:
        with use_backend(backend):
            both_entered.wait()
            inside = on_host(cpu)
            both_entered.wait()
        return inside

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(force, ["device", "torch"])) == [False, True]
    assert on_host(cpu)


def test_losses_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, loss in LOSSES.items():
        changed = loss._replace(
            compute=lambda *args, _compute=loss.compute, **kwargs: tuple(
                term * 1.001 for term in _compute(*args, **kwargs)
            )
        )
        monkeypatch.setitem(LOSSES, name, changed)
    with pytest.raises(AssertionError, match="not close"):
        compare_losses(60, 2, 0)


def test_random_inputs_are_those_of_the_seed() -> None:
    first, again = (random_input(np.random.default_rng([3, 1])) for _ in range(2))
    torch.testing.assert_close(first, again, rtol=0, atol=0)


@pytest.mark.slow
def test_strikes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["strikes", "--count", "2", "--seed", "3"])
    printed = capsys.readouterr()
    assert ", one process\n" in printed.out
    assert "\n2 in " in printed.out
    assert "run 0, 1 strikes: SIGTERM at closing an epoch" in printed.err


@pytest.mark.slow
def test_files_left_by_a_struck_run_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_a_file(folder: Path, data: Path, **settings: Any) -> list[int | None]:
        codes = struck_runs.run(folder, data, **settings)
        if folder.exists():
            (folder / "left.tmp").touch()
        return codes

    monkeypatch.setattr(random_strikes, "run", leave_a_file)
    with pytest.raises(AssertionError, match="seed 3, run 0: SIG"):
        random_strikes.strike_runs(1, 3)


def test_random_strikes_are_those_of_the_seed() -> None:
    first, again = (
        [random_strikes.draw(rng, processes=2) for _ in range(100)]
        for rng in (np.random.default_rng([3, 1]), np.random.default_rng([3, 1]))
    )
    assert first == again
    assert {strike.victim for strike in first} == {"first", "last", "all"}
    assert all(strike.grace is None or strike.number == struck_runs.TERM for strike in first)


def test_each_named_strike_occurs_once_and_those_of_the_suite_are_among_them() -> None:
    one, two = named_strikes.ONE_PROCESS, named_strikes.TWO_PROCESSES
    assert len({*one}) + len({*two}) == len(one) + len(two) == 71
    assert {*ALONE} <= {*one}
    assert {*TOGETHER} <= {*two}
