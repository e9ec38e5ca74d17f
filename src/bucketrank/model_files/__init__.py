"""Model files: weights with their recipe, classes and threshold; writing, reading and building the model again."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.model_files.loading import build_detector as build_detector
    from bucketrank.model_files.loading import load_model as load_model
    from bucketrank.model_files.weights import Meta as Meta
    from bucketrank.model_files.weights import WeightsError as WeightsError
    from bucketrank.model_files.weights import read_weights as read_weights
    from bucketrank.model_files.weights import save_weights as save_weights

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.model_files.loading": ("build_detector", "load_model"),
        "bucketrank.model_files.weights": ("Meta", "WeightsError", "read_weights", "save_weights"),
    },
)
