"""Tensors from a .safetensors file that a setting names. Pickles are never read."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

CONVERT = "convert a file you trust with safetensors.torch.save_file(torch.load(file, weights_only=True), ...)"


def read_safetensors(path: Path, *, setting: str, others: str) -> dict[str, Tensor]:
    """Return the tensors of a file; ``others`` are the values of the setting that are no file, for the message.

    FileNotFoundError if there is no such file, ValueError if it holds anything else or nothing.
    """
    if not path.exists():
        raise FileNotFoundError(f"{setting}: expected {others} or an existing .safetensors file, got {path}")
    if path.suffix != ".safetensors" or not path.is_file():
        raise ValueError(f"{setting}: expected a .safetensors file, got {path}; {CONVERT}")
    try:
        state = load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{setting}: expected a .safetensors file, got {path} with other contents ({error}); {CONVERT}"
        ) from error
    if not state:
        raise ValueError(f"{setting}: expected a file with tensors, got {path} without any; write it again")
    return state
