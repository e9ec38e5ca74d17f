"""Torch devices by name."""

from __future__ import annotations

import torch


def resolve_device(name: str) -> torch.device:
    """Return a device by its name; ``"auto"`` is cuda if available, otherwise the CPU.

    ValueError if torch cannot use it.
    """
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        device = torch.device(chosen)
        torch.zeros(1, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"expected auto or a torch device like cpu or cuda:0, got {name!r}: {error}") from error
    return device
