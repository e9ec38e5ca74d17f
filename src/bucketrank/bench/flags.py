"""What the settings of the benches share: checks that name the flag, and the command that repeats a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

# A quartile of fewer samples says nothing.
FEWEST_ROUNDS = 3


def check_device(device: str) -> None:
    """Raise unless torch can use it here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device: expected a device that torch can use here, got {device!r}") from error


def command_line(
    name: str,
    given: Mapping[str, Any],
    usual: Mapping[str, Any],
    quick: Mapping[str, Any],
    spell: Mapping[str, Callable[[Any], str]],
) -> str:
    """The command ``name`` with the flags in which ``given`` differs from ``usual``, or from ``quick`` if it is that.

    ``spell`` says how the values of some flags are written; of a tuple, how each of its parts is.

    >>> command_line("bench", {"sizes": (1, 2), "rounds": 5}, {"sizes": (1,), "rounds": 9}, {"rounds": 5}, {})
    'bucketrank bench --quick --sizes 1,2'
    """
    is_quick = all(given[flag] == value for flag, value in quick.items())
    usual = {**usual, **(quick if is_quick else {})}
    words = ["bucketrank", name, *(["--quick"] if is_quick else [])]
    for setting, value in given.items():
        flag = setting.replace("_", "-")
        in_words = spell.get(setting, str)
        if value == usual[setting]:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            words += [f"--{flag}", ",".join(map(in_words, value))]
        else:
            words += [f"--{flag}", in_words(value)]
    return " ".join(words)
