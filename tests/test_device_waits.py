"""The helper of the GPU tests that forbids waits, tested without a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from .device_waits import no_waits


def test_the_mode_is_reset_although_torch_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with no_waits():
        assert modes == ["error"]
    with pytest.raises(ZeroDivisionError), no_waits():
        raise ZeroDivisionError
    assert modes == ["error", "default"] * 2
