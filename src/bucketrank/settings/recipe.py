"""A recipe: every setting that decides how a detector is trained, in groups. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bucketrank.catalogue import (
    BackboneSettings,
    DetectorSettings,
    InputSettings,
    LibraryInputSettings,
    LossSettings,
    Setting,
    Settings,
    describe,
    detector_spec,
    detectors,
    libraries,
    loss_settings,
    loss_spec,
    losses,
)
from bucketrank.catalogue.values import convert
from bucketrank.recipes.training_settings import DataSettings, ScheduleSettings, TrainerSettings
from bucketrank.suggestions import nearest

INIT = Setting(
    "init",
    str | None,
    None,
    "weights to start from: a file or folder of an earlier run, a name on the hub, torchvision:MODEL or mmdet:FILE; "
    "tensors that do not fit are skipped",
)
# The groups whose settings are the same for every detector and every loss.
SHARED_GROUPS: tuple[type[Settings], ...] = (DataSettings, ScheduleSettings, TrainerSettings)
GROUPS = ("detector", "backbone", "loss", "inputs", "data", "schedule", "trainer")
MAY_CHANGE = (  # in a resumed run
    "trainer.",
    "data.workers",
    "data.val_batch_size",
    "init",
    "backbone.weights",
    "detector.weights",
)


class RecipeError(ValueError):
    """Invalid recipe or flag. The message names the setting, the problem and the closest valid name."""


@dataclass(frozen=True)
class Recipe:
    """All settings of a run. A detector whose backbone is part of the model does not use those of ``backbone``."""

    detector: DetectorSettings  # the detector
    backbone: BackboneSettings = field(default_factory=BackboneSettings)  # its backbone
    loss: LossSettings = field(default_factory=loss_settings)  # its loss
    inputs: InputSettings | LibraryInputSettings = field(default_factory=InputSettings)  # size and normalisation
    data: DataSettings = field(default_factory=DataSettings)  # batches and augmentation
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)  # optimiser and learning rate
    trainer: TrainerSettings = field(default_factory=TrainerSettings)  # devices and files
    init: str | None = None  # weights to start from

    @property
    def backbone_name(self) -> str | None:
        """The name of the backbone; None if it is part of the model."""
        return self.backbone.name if detector_spec(self.detector.name).backbone else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for YAML and JSON."""
        used = [name for name in GROUPS if name != "backbone" or self.backbone_name is not None]
        groups = {name: dataclasses.asdict(getattr(self, name)) for name in used}
        plain: dict[str, Any] = _plain({**groups, "init": self.init})
        return plain

    def flat(self) -> dict[str, Any]:
        """Return plain values with one level of keys, like ``loss.delta``."""
        return flatten(self.to_dict())


def from_dict(content: Mapping[str, Any], *, source: str = "recipe") -> Recipe:
    """Return the recipe with these values and the defaults.

    RecipeError names ``source``, the setting and the nearest one that exists.

    Args:
        content: groups of settings, as in a recipe's file.
        source: name of the recipe in messages.

    >>> from_dict({"detector": {"name": "atss"}, "loss": {"delta": 0.25}}).loss.delta
    0.25
    >>> from_dict({"detector": {"name": "atss"}, "loss": {"dleta": 0.25}})
    Traceback (most recent call last):
    bucketrank.recipes.recipe.RecipeError: recipe: there is no setting "loss.dleta"; ...
    """
    given = _without_retired(flatten(content))
    try:
        name = convert(given.get("detector.name", ""), str, name="detector.name")
        detector = detector_spec(name)
        loss = loss_spec(given.get("loss.name", LossSettings.name))
        known = settings_by_key(name, loss.name)
        _require_known(given, known)
        values = {key: convert(value, known[key].type, name=key) for key, value in given.items()}
        groups: dict[str, Any] = {
            group.group: group(**_values_of(group, values))
            for group in (*detector.groups, loss.settings, *SHARED_GROUPS)
        }
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{source}: {error}") from error
    return Recipe(**groups, init=values.get("init"))


def _without_retired(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with settings of earlier versions in their present form, so that old runs still load."""
    current = dict(values)
    if current.pop("trainer.tensorboard", False):
        current.setdefault("trainer.loggers", ["tensorboard"])
    return current


def _require_known(keys: Iterable[str], known: Mapping[str, Setting]) -> None:
    for key in keys:
        if key not in known:
            raise ValueError(f'there is no setting "{key:.200}"; {nearest(key, known)}')


def _values_of(group: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group's own settings: a recipe may also hold settings of a loss that it does not use."""
    keys = {f"{group.group}.{setting.name}": setting.name for setting in describe(group)}
    return {keys[key]: value for key, value in values.items() if key in keys}


def settings_by_key(detector: str | None = None, loss: str | None = None) -> dict[str, Setting]:
    """Return every setting of a recipe by its key, like ``loss.delta``.

    The settings of all losses are included, so that a recipe with a ``loss.delta`` still works with ``--loss focal``;
    where two declare one key, the type is that of ``loss``. None stands for all detectors or all losses; then a setting
    takes what any of them takes.
    """
    own = [] if loss is None else [loss_spec(loss).settings]
    every_detector = (*detectors().values(), *libraries().values())
    of_detectors = every_detector if detector is None else (detector_spec(detector),)
    known: dict[str, Setting] = {}
    groups: list[type[Settings]] = [*own, *(group for spec in of_detectors for group in spec.groups)]
    groups += [*(spec.settings for spec in losses().values()), *SHARED_GROUPS]
    for group in groups:
        for setting in describe(group):
            key = f"{group.group}.{setting.name}"
            first = known.setdefault(key, setting)
            if first.type != setting.type and group.group not in {each.group for each in own}:
                known[key] = first._replace(type=first.type | setting.type)
    order = {group: place for place, group in enumerate(GROUPS)}
    in_order = sorted(known, key=lambda key: order[key.partition(".")[0]])
    return {**{key: known[key] for key in in_order}, "init": INIT}


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two recipes differ, with both values."""
    ours, theirs = one.flat(), other.flat()
    keys = [*ours, *(key for key in theirs if key not in ours)]
    return {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}


def fixed_differences(before: Recipe, now: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ although a resumed run must not change them."""
    filled = {f"{each.group}.{name}" for each in (before.loss, before.detector) for name in each.filled_by_run}
    return {
        key: (old, new)
        for key, (old, new) in differences(before, now).items()
        if (key == "trainer.seed" or not key.startswith(MAY_CHANGE)) and not (key in filled and new is None)
    }


def flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all groups with one level of keys."""
    flat: dict[str, Any] = {}
    for group, values in content.items():
        if isinstance(values, dict):
            flat |= {f"{group}.{key}": value for key, value in values.items()}
        else:
            flat[str(group)] = values
    return flat


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
