"""Model files: weights with their recipe, classes and threshold; writing, reading and building the model again.

Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketrank.model_files.loading import build_detector, load_model
    from bucketrank.model_files.weights import Meta, WeightsError, read_weights, save_weights

_HOME = {
    "Meta": "weights",
    "WeightsError": "weights",
    "build_detector": "loading",
    "load_model": "loading",
    "read_weights": "weights",
    "save_weights": "weights",
}

__all__ = ["Meta", "WeightsError", "build_detector", "load_model", "read_weights", "save_weights"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"bucketrank.model_files.{_HOME[name]}"), name)
    raise AttributeError(f"module 'bucketrank.model_files' has no attribute {name!r}")
