"""Detectors trained with any loss, with the interface of torchvision's detectors."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.detectors.base import Detector as Detector
    from bucketrank.detectors.base import build as build
    from bucketrank.settings import BackboneSettings as BackboneSettings
    from bucketrank.settings import DetectorSettings as DetectorSettings
    from bucketrank.settings import DetectorSpec as DetectorSpec
    from bucketrank.settings import InputSettings as InputSettings
    from bucketrank.settings import LossSettings as LossSettings
    from bucketrank.settings import LossSpec as LossSpec
    from bucketrank.settings import register_detector as register_detector
    from bucketrank.settings import register_loss as register_loss

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.detectors.base": "Detector build",
        "bucketrank.settings": "BackboneSettings DetectorSettings DetectorSpec InputSettings LossSettings LossSpec "
        "register_detector register_loss",
    },
)
