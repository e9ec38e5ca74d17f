"""The detectors by name, and ``build``: every setting a keyword."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import fields, replace
from typing import Any

from bucketrank.detectors.atss import ATSS
from bucketrank.detectors.cascade_rcnn import CascadeRCNN
from bucketrank.detectors.co_detr.detector import CoDETR
from bucketrank.detectors.detector import Detector
from bucketrank.detectors.faster_rcnn import FasterRCNN
from bucketrank.detectors.mask_rcnn import MaskRCNN
from bucketrank.detectors.paa import PAA
from bucketrank.detectors.retinanet import RetinaNet
from bucketrank.detectors.settings import BackboneSettings, InputSettings, LossSettings

# To add a detector: write its file, and name it here.
DETECTORS: dict[str, type[Detector]] = {
    "faster_rcnn": FasterRCNN,
    "mask_rcnn": MaskRCNN,
    "cascade_rcnn": CascadeRCNN,
    "retinanet": RetinaNet,
    "atss": ATSS,
    "paa": PAA,
    "co_detr": CoDETR,
}

# The groups of settings that every detector takes.
SHARED = ("backbone", "loss", "inputs")


def build(
    name: str,
    *,
    num_classes: int,
    backbone: str | BackboneSettings = "resnet50",
    loss: str | LossSettings = "rs",
    inputs: InputSettings | None = None,
    **settings: Any,
) -> Detector:
    """The detector ``name`` for ``num_classes`` kinds of objects, trained by ``loss``.

    ``settings`` are those of :class:`LossSettings`, :class:`BackboneSettings`, :class:`InputSettings` and of the
    detector itself, by their names; each goes where it belongs.

    >>> model = build("atss", num_classes=3, backbone="resnet18", loss="rs", delta=0.25, min_size=320, max_size=512)
    >>> model.criterion.delta
    0.25
    """
    if name not in DETECTORS:
        raise ValueError(f"build: there is no detector {name!r}; {_nearest(name, list(DETECTORS))}")
    shared: dict[str, Any] = {
        "backbone": BackboneSettings(name=backbone) if isinstance(backbone, str) else backbone,
        "loss": LossSettings(name=loss) if isinstance(loss, str) else loss,
        "inputs": inputs or InputSettings(),
    }
    groups = {group: {field.name for field in fields(value)} - {"name"} for group, value in shared.items()}
    own = set(detector_settings(name))
    for setting in settings:
        if setting not in own.union(*groups.values()):
            known = sorted(own.union(*groups.values()))
            raise TypeError(f"build: {name} has no setting {setting!r}; {_nearest(setting, known)}")
    for group, value in shared.items():
        given = {setting: settings[setting] for setting in settings if setting in groups[group]}
        shared[group] = replace(value, **given)
    return DETECTORS[name](
        num_classes, **shared, **{setting: settings[setting] for setting in settings if setting in own}
    )


def detector_settings(name: str) -> dict[str, inspect.Parameter]:
    """The settings that the detector ``name`` has by itself, with their defaults."""
    found: dict[str, inspect.Parameter] = {}
    for kind in DETECTORS[name].__mro__:
        parameters = inspect.signature(vars(kind).get("__init__", object.__init__)).parameters
        found |= {
            key: parameter
            for key, parameter in parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and key not in {*SHARED, *found}
        }
        # A constructor that passes on what it does not know has the settings of its parent, too.
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
