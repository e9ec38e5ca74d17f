"""Detectors trained with any loss, with the interface of torchvision's detectors."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.catalogue import BackboneSettings as BackboneSettings
    from bucketrank.catalogue import DetectorSettings as DetectorSettings
    from bucketrank.catalogue import DetectorSpec as DetectorSpec
    from bucketrank.catalogue import InputSettings as InputSettings
    from bucketrank.catalogue import LossSettings as LossSettings
    from bucketrank.catalogue import LossSpec as LossSpec
    from bucketrank.catalogue import register_detector as register_detector
    from bucketrank.catalogue import register_loss as register_loss
    from bucketrank.detectors.base import Detector as Detector
    from bucketrank.detectors.base import build as build

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.catalogue": (
            "BackboneSettings",
            "DetectorSettings",
            "DetectorSpec",
            "InputSettings",
            "LossSettings",
            "LossSpec",
            "register_detector",
            "register_loss",
        ),
        "bucketrank.detectors.base": (
            "Detector",
            "build",
        ),
    },
)
