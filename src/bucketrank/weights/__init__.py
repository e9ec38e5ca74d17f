"""Weights: our weights files with recipe, classes and threshold, the hub, and torchvision and timm weights."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.errors import WeightsError as WeightsError
    from bucketrank.weights.files import Meta as Meta
    from bucketrank.weights.files import read_weights as read_weights
    from bucketrank.weights.files import save_weights as save_weights
    from bucketrank.weights.load import build_detector as build_detector
    from bucketrank.weights.load import load_model as load_model

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.errors": "WeightsError",
        "bucketrank.weights.files": "Meta read_weights save_weights",
        "bucketrank.weights.load": "build_detector load_model",
    },
)
