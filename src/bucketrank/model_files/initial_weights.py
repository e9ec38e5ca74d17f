"""The weights that a run starts from: those of an earlier run, or torchvision's."""

from __future__ import annotations

from collections.abc import Sequence

from bucketrank.detectors import Detector
from bucketrank.model_files.loading import load_matching_weights
from bucketrank.model_files.torchvision_init import load_from_torchvision

TORCHVISION = "torchvision:"


def load_initial_weights(model: Detector, init: str, *, classes: Sequence[str] | None = None) -> list[str]:
    """Load the weights that ``init`` names; return the names of the tensors that keep their values.

    ``init`` is a weights file of an earlier run, ``torchvision:MODEL`` for torchvision's COCO weights, or
    ``torchvision:FILE.safetensors`` for the state of a torchvision model. ``classes`` are the names of the model's
    classes.
    """
    if init.startswith(TORCHVISION):
        return load_from_torchvision(model, init.removeprefix(TORCHVISION), classes=classes)
    return load_matching_weights(model, init)
