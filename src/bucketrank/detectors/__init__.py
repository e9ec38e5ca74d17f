"""Detectors trained with any loss, with the interface of torchvision's detectors.

Names are imported when they are first used: reading settings does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketrank.catalogue import (
        BackboneSettings,
        DetectorSettings,
        DetectorSpec,
        InputSettings,
        LossSettings,
        LossSpec,
        register_detector,
        register_loss,
    )
    from bucketrank.detectors.builder import build
    from bucketrank.detectors.detector import Detector

_HOME = {
    "BackboneSettings": "catalogue",
    "Detector": "detectors.detector",
    "DetectorSettings": "catalogue",
    "DetectorSpec": "catalogue",
    "InputSettings": "catalogue",
    "LossSettings": "catalogue",
    "LossSpec": "catalogue",
    "build": "detectors.builder",
    "register_detector": "catalogue",
    "register_loss": "catalogue",
}

__all__ = [
    "BackboneSettings",
    "Detector",
    "DetectorSettings",
    "DetectorSpec",
    "InputSettings",
    "LossSettings",
    "LossSpec",
    "build",
    "register_detector",
    "register_loss",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"bucketrank.{_HOME[name]}"), name)
    raise AttributeError(f"module 'bucketrank.detectors' has no attribute {name!r}")
