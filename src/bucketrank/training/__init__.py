"""Training a detector by a recipe: Lightning runs the loop, the run folder holds the results.

Names are imported when they are first used: reading recipes does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketrank.deploy.evaluate import evaluate
    from bucketrank.model_files.loading import load_model
    from bucketrank.model_files.weights import Meta, save_weights
    from bucketrank.recipes import Recipe, RecipeError, load_recipe
    from bucketrank.training.run import RunResult, train

_HOME = {
    "Meta": "model_files.weights",
    "Recipe": "recipes",
    "RecipeError": "recipes",
    "RunResult": "training.run",
    "evaluate": "deploy.evaluate",
    "load_model": "model_files.loading",
    "load_recipe": "recipes",
    "save_weights": "model_files.weights",
    "train": "training.run",
}

__all__ = [
    "Meta",
    "Recipe",
    "RecipeError",
    "RunResult",
    "evaluate",
    "load_model",
    "load_recipe",
    "save_weights",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"bucketrank.{_HOME[name]}"), name)
    raise AttributeError(f"module 'bucketrank.training' has no attribute {name!r}")
