"""``build``: from the name of a detector to the detector; every setting is a keyword."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bucketrank.catalogue import (
    BackboneSettings,
    DetectorSettings,
    InputSettings,
    LibraryInputSettings,
    LossSettings,
    Settings,
    describe,
    detector_settings,
    detector_spec,
    loss_names,
    loss_settings,
)
from bucketrank.detectors.detector import Detector
from bucketrank.suggestions import nearest, require_choice


def build(
    name: str | DetectorSettings,
    *,
    num_classes: int,
    backbone: str | BackboneSettings | None = None,
    loss: str | LossSettings = "rs",
    inputs: InputSettings | LibraryInputSettings | None = None,
    **settings: Any,
) -> Detector:
    """Build a detector for ``num_classes`` classes of objects, to be trained with ``loss``.

    ``name`` and ``loss`` are names in the catalogue, or settings. ``name`` may also be a model of another library, like
    ``"torchvision/retinanet_resnet50_fpn_v2"``, which brings its own backbone; for the others, the default ``backbone``
    is resnet50. Further keywords are settings of the detector, the loss, the backbone or the inputs; no two groups that
    a detector takes have a setting of the same name.

    Args:
        name: name of a detector in the catalogue, ``library/model``, or settings.
        num_classes: number of classes of objects, without the background.
        backbone: name of a backbone, or its settings.
        loss: name of a loss in the catalogue, or its settings.
        inputs: settings of the images: their size and their normalisation.
        settings: any setting of the detector, the loss, the backbone or the inputs, by its name.

    >>> size = {"min_size": 320, "max_size": 512}
    >>> model = build("atss", num_classes=3, backbone="resnet18", delta=0.25, **size)
    >>> model.criterion.delta
    0.25
    """
    detector = detector_settings(name) if isinstance(name, str) else name
    loss = loss_settings(loss) if isinstance(loss, str) else loss
    spec = detector_spec(detector.name)
    groups: dict[str, Settings] = {"settings": detector, "loss": loss, "inputs": inputs or spec.inputs()}
    if not isinstance(groups["inputs"], spec.inputs):
        expected = f"{spec.inputs.__name__} for {detector.name}"
        raise TypeError(f"build: expected inputs as {expected}, got {type(inputs).__name__}")
    if spec.backbone:
        named = BackboneSettings(name=backbone) if isinstance(backbone, str) else backbone
        groups["backbone"] = named or BackboneSettings()
    elif backbone is not None:
        raise TypeError(f"build: {detector.name} brings its own backbone, got backbone {backbone!r}; leave it out")
    known = {group: {each.name for each in describe(type(value))} - {"name"} for group, value in groups.items()}
    for keyword in settings:
        if not any(keyword in names for names in known.values()):
            nearest_name = nearest(keyword, sorted(set().union(*known.values())))
            raise TypeError(f"build: {detector.name} with loss {loss.name} has no setting {keyword!r}; {nearest_name}")
    for group, value in groups.items():
        changes = {keyword: settings[keyword] for keyword in settings if keyword in known[group]}
        groups[group] = replace(value, **changes)
    require_choice(f"loss.name for {detector.name}", loss.name, loss_names(detector.name))
    model: Detector = spec.load()(num_classes, **groups)
    return model
