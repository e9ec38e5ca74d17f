"""Parts of the benchmarks' settings: checks whose messages name the flag, and the command that repeats a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

# Fewer samples have no meaningful quartiles.
FEWEST_ROUNDS = 3


def check_device(device: str) -> None:
    """Raise ValueError unless torch can use the device on this machine."""
    try:
        torch.zeros(1, device=device).item()
    except (AssertionError, ImportError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removesuffix(".")
        raise ValueError(
            f"--device: expected a device that torch can use here, got {device!r} ({reason}); "
            "install its driver and a build of torch for it, or choose --device cpu"
        ) from error


def device_type(device: str) -> str:
    """Return a device without its index.

    >>> device_type("cuda:1")
    'cuda'
    """
    return device.partition(":")[0]


def command_line(
    name: str,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    quick: Mapping[str, Any],
    spell: Mapping[str, Callable[[Any], str]],
) -> str:
    """Return the command ``name`` with the flags whose values in ``settings`` differ from ``defaults``.

    If all values of ``quick`` are set, the command has ``--quick`` instead of those flags. ``spell`` holds functions
    that write the value of a flag; for a tuple, each of its values.

    >>> command_line("bench", {"sizes": (1, 2), "rounds": 5}, {"sizes": (1,), "rounds": 9}, {"rounds": 5}, {})
    'bucketrank bench --quick --sizes 1,2'
    """
    is_quick = all(settings[flag] == value for flag, value in quick.items())
    defaults = {**defaults, **(quick if is_quick else {})}
    words = ["bucketrank", name, *(["--quick"] if is_quick else [])]
    for setting, value in settings.items():
        flag = setting.replace("_", "-")
        write = spell.get(setting, str)
        if value == defaults[setting]:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            words += [f"--{flag}", ",".join(map(write, value))]
        else:
            words += [f"--{flag}", write(value)]
    return " ".join(words)
