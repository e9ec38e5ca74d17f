"""The torch device that a ``device`` argument or a ``--device`` flag names."""

from __future__ import annotations

import torch

from bucketrank.errors import first_line


def resolve_device(name: str = "auto") -> torch.device:
    """Return the device called ``name``; "auto" is cuda if available, else cpu.

    Raises ValueError if torch does not know the device or cannot compute on it. The message opens with ``device:``, so
    that a command can put two hyphens before it.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (AssertionError, ImportError, RuntimeError) as error:
        raise ValueError(
            "device: expected auto, cpu, cuda or another device that torch can use here, got "
            f"{name!r} ({first_line(error)})"
        ) from error
    return device
