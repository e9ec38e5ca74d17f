"""Declarations of all losses, detectors and recipes, with their settings and help. Needs no torch.

``build``, recipes, flags, ``--help``, weights files, reports and benchmarks read these declarations. To add a loss or a
detector, call :func:`register_loss` or :func:`register_detector`, or name a specification in an entry point of the
group ``bucketrank.losses`` or ``bucketrank.detectors``.
"""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.settings.detector_specs import BackboneSettings as BackboneSettings
    from bucketrank.settings.detector_specs import DetectorSettings as DetectorSettings
    from bucketrank.settings.detector_specs import DetectorSpec as DetectorSpec
    from bucketrank.settings.detector_specs import InputSettings as InputSettings
    from bucketrank.settings.fields import Setting as Setting
    from bucketrank.settings.fields import Settings as Settings
    from bucketrank.settings.fields import describe as describe
    from bucketrank.settings.flags import parse_flags as parse_flags
    from bucketrank.settings.library_specs import LibraryInputSettings as LibraryInputSettings
    from bucketrank.settings.library_specs import LibrarySpec as LibrarySpec
    from bucketrank.settings.loss_specs import LossSettings as LossSettings
    from bucketrank.settings.loss_specs import LossSpec as LossSpec
    from bucketrank.settings.loss_specs import RankingSettings as RankingSettings
    from bucketrank.settings.recipe import Recipe as Recipe
    from bucketrank.settings.recipe import from_dict as from_dict
    from bucketrank.settings.recipe import load_recipe as load_recipe
    from bucketrank.settings.recipe import recipe_names as recipe_names
    from bucketrank.settings.recipe import recipe_to_yaml as recipe_to_yaml
    from bucketrank.settings.registry import detector_settings as detector_settings
    from bucketrank.settings.registry import detector_spec as detector_spec
    from bucketrank.settings.registry import detectors as detectors
    from bucketrank.settings.registry import libraries as libraries
    from bucketrank.settings.registry import loss_names as loss_names
    from bucketrank.settings.registry import loss_settings as loss_settings
    from bucketrank.settings.registry import loss_spec as loss_spec
    from bucketrank.settings.registry import losses as losses
    from bucketrank.settings.registry import register_detector as register_detector
    from bucketrank.settings.registry import register_loss as register_loss

__all__, __getattr__ = import_on_use(
    __name__,
    {
        "bucketrank.settings.detector_specs": "BackboneSettings DetectorSettings DetectorSpec InputSettings",
        "bucketrank.settings.fields": "Setting Settings describe",
        "bucketrank.settings.flags": "parse_flags",
        "bucketrank.settings.library_specs": "LibraryInputSettings LibrarySpec",
        "bucketrank.settings.loss_specs": "LossSettings LossSpec RankingSettings",
        "bucketrank.settings.recipe": "Recipe from_dict load_recipe recipe_names recipe_to_yaml",
        "bucketrank.settings.registry": "detector_settings detector_spec detectors libraries loss_names loss_settings "
        "loss_spec losses register_detector register_loss",
    },
)
