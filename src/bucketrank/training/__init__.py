"""Train detectors by recipes, with a loop on Lightning Fabric; a run folder holds the results."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.errors import RecipeError as RecipeError
    from bucketrank.inference.evaluation import evaluate as evaluate
    from bucketrank.settings import Recipe as Recipe
    from bucketrank.settings import load_recipe as load_recipe
    from bucketrank.training.run import RunResult as RunResult
    from bucketrank.training.run import train as train
    from bucketrank.weights.files import Meta as Meta
    from bucketrank.weights.files import save_weights as save_weights
    from bucketrank.weights.load import load_model as load_model

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.errors": "RecipeError",
        "bucketrank.inference.evaluation": "evaluate",
        "bucketrank.settings": "Recipe load_recipe",
        "bucketrank.training.run": "RunResult train",
        "bucketrank.weights.files": "Meta save_weights",
        "bucketrank.weights.load": "load_model",
    },
)
