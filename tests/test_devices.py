"""The device that a name stands for."""

from __future__ import annotations

import pytest
import torch

from bucketrank.devices import resolve_device


def test_named_and_automatic_devices(monkeypatch):
    assert resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device() == resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")


@pytest.mark.parametrize("name", ["abacus", "meta", "cuda:99", ""])
def test_a_device_that_cannot_compute_is_refused(name):
    with pytest.raises(ValueError, match=f"^device: expected auto, cpu, .* got {name!r} \\("):
        resolve_device(name)
