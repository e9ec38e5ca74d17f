"""``build``: from the name of a detector to the detector, with every setting a keyword."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bucketrank.catalogue import (
    BackboneSettings,
    DetectorSettings,
    InputSettings,
    LossSettings,
    Settings,
    describe,
    detector_settings,
    detector_spec,
    loss_settings,
)
from bucketrank.detectors.detector import Detector
from bucketrank.suggestions import nearest, require_choice


def build(
    name: str | DetectorSettings,
    *,
    num_classes: int,
    backbone: str | BackboneSettings = "resnet50",
    loss: str | LossSettings = "rs",
    inputs: InputSettings | None = None,
    **settings: Any,
) -> Detector:
    """Build a detector for ``num_classes`` classes of objects, to be trained with ``loss``.

    ``name`` and ``loss`` are names that the catalogue knows, or their settings. Further keywords are the settings
    of the detector, the loss, the backbone and the inputs; each has one meaning and goes where it belongs.

    >>> model = build("atss", num_classes=3, backbone="resnet18", loss="rs", delta=0.25, min_size=320, max_size=512)
    >>> model.criterion.delta
    0.25
    """
    groups: dict[str, Settings] = {
        "settings": detector_settings(name) if isinstance(name, str) else name,
        "backbone": BackboneSettings(name=backbone) if isinstance(backbone, str) else backbone,
        "loss": loss_settings(loss) if isinstance(loss, str) else loss,
        "inputs": inputs or InputSettings(),
    }
    known = {group: {each.name for each in describe(type(value))} - {"name"} for group, value in groups.items()}
    detector = groups["settings"].name  # type: ignore[attr-defined]
    for keyword in settings:
        if not any(keyword in names for names in known.values()):
            every = sorted(set().union(*known.values()))
            raise TypeError(f"build: {detector} with this loss has no setting {keyword!r}; {nearest(keyword, every)}")
    for group, value in groups.items():
        changes = {keyword: settings[keyword] for keyword in settings if keyword in known[group]}
        groups[group] = replace(value, **changes)
    spec = detector_spec(detector)
    if spec.losses is not None:
        require_choice(f"loss.name: {detector} takes some losses only", groups["loss"].name, spec.losses)  # type: ignore[attr-defined]
    model: Detector = spec.load()(num_classes, **groups)
    return model
