"""The catalogue: every loss and every detector, declared once, with its settings and their help. Needs no torch.

``build``, recipes, flags, ``--help``, weights files, reports, studies and benchmarks read it. To add a loss or a
detector, call :func:`register_loss` or :func:`register_detector`, or name a specification in an entry point of the
group ``bucketrank.losses`` or ``bucketrank.detectors``.
"""

from bucketrank.catalogue.detector_specs import DetectorSettings, DetectorSpec
from bucketrank.catalogue.fields import Setting, Settings, describe
from bucketrank.catalogue.library_specs import LibraryInputSettings, LibrarySpec
from bucketrank.catalogue.loss_specs import LossSettings, LossSpec, RankingSettings
from bucketrank.catalogue.model_settings import BackboneSettings, InputSettings
from bucketrank.catalogue.registry import (
    detector_settings,
    detector_spec,
    detectors,
    libraries,
    loss_names,
    loss_settings,
    loss_spec,
    losses,
    register_detector,
    register_loss,
)

__all__ = [
    "BackboneSettings",
    "DetectorSettings",
    "DetectorSpec",
    "InputSettings",
    "LibraryInputSettings",
    "LibrarySpec",
    "LossSettings",
    "LossSpec",
    "RankingSettings",
    "Setting",
    "Settings",
    "describe",
    "detector_settings",
    "detector_spec",
    "detectors",
    "libraries",
    "loss_names",
    "loss_settings",
    "loss_spec",
    "losses",
    "register_detector",
    "register_loss",
]
