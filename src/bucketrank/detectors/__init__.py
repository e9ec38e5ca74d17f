"""Detectors trained with any loss, on torchvision's contract.

Names are imported when they are asked for: reading settings does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketrank.detectors.catalogue import DETECTORS, build
    from bucketrank.detectors.detector import Detector
    from bucketrank.detectors.settings import BackboneSettings, InputSettings, LossSettings

_HOME = {
    "DETECTORS": "catalogue",
    "BackboneSettings": "settings",
    "Detector": "detector",
    "InputSettings": "settings",
    "LossSettings": "settings",
    "build": "catalogue",
}

__all__ = ["DETECTORS", "BackboneSettings", "Detector", "InputSettings", "LossSettings", "build"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"bucketrank.detectors.{_HOME[name]}"), name)
    raise AttributeError(f"module 'bucketrank.detectors' has no attribute {name!r}")
