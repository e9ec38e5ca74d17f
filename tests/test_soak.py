"""The long random tests run, count, and fail where something is wrong."""

import numpy as np
import pytest
import torch

from bucketrank.data import checking
from tests import soak
from tests.losses.cases import LOSSES


def test_annotations(capsys: pytest.CaptureFixture[str]) -> None:
    soak.main(["annotations", "--count", "60", "--seed", "3"])
    printed = capsys.readouterr().out
    assert " refused\n" in printed
    assert "seed 3\n" in printed


def test_annotations_that_raise_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> set[object]:
        raise KeyError("name")

    monkeypatch.setattr(checking, "check_categories", fail)
    with pytest.raises(KeyError, match="name"):
        soak.check_annotations(60, 3)


def test_losses(capsys: pytest.CaptureFixture[str]) -> None:
    soak.main(["losses", "--seconds", "0.5", "--threads", "2", "--seed", "3"])
    assert ", seed 3\n" in capsys.readouterr().out


def test_losses_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, loss in LOSSES.items():
        changed = loss._replace(
            compute=lambda *args, _compute=loss.compute, **kwargs: tuple(
                term * 1.001 for term in _compute(*args, **kwargs)
            )
        )
        monkeypatch.setitem(LOSSES, name, changed)
    with pytest.raises(AssertionError, match="not close"):
        soak.compare_losses(60, 2, 0)


def test_random_inputs_are_those_of_the_seed() -> None:
    first, again = (soak.random_input(np.random.default_rng([3, 1])) for _ in range(2))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
