"""Training a detector by a recipe: Lightning runs the loop; the run folder has all that is worth keeping.

Names are imported when they are asked for: reading recipes does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketrank.training.recipe import Recipe, RecipeError, load
    from bucketrank.training.run import Result, train
    from bucketrank.training.weights import Meta, load_model, save_weights

_HOME = {
    "Meta": "weights",
    "Recipe": "recipe",
    "RecipeError": "recipe",
    "Result": "run",
    "load": "recipe",
    "load_model": "weights",
    "save_weights": "weights",
    "train": "run",
}

__all__ = ["Meta", "Recipe", "RecipeError", "Result", "load", "load_model", "save_weights", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"bucketrank.training.{_HOME[name]}"), name)
    raise AttributeError(f"module 'bucketrank.training' has no attribute {name!r}")
