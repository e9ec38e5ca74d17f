"""Recipes: all settings of a run in groups, and the YAML files they come from. Needs no torch.

A recipe file holds only what differs from the defaults, or from the recipe that it names as its ``base``. The recipes
of the package are in ``yaml/``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from bucketrank.errors import RecipeError, short_repr, suggest
from bucketrank.settings.detector_specs import BackboneSettings, DetectorSettings, InputSettings
from bucketrank.settings.fields import FlagText, Setting, Settings, convert, describe, parse_yaml
from bucketrank.settings.library_specs import LibraryInputSettings
from bucketrank.settings.loss_specs import LossSettings
from bucketrank.settings.registry import detector_spec, detectors, libraries, loss_settings, loss_spec, losses
from bucketrank.settings.training import AUTO_BATCH, DataSettings, ScheduleSettings, TrainerSettings

INIT = Setting(
    "init",
    str | None,
    None,
    "weights to start from: a file or folder of an earlier run, a name on the hub, torchvision:MODEL or mmdet:FILE; "
    "class rows are taken by name, and tensors that do not fit are skipped",
)
REQUIRED = "required"  # init of a recipe that starts from weights which only the user can name
# Groups shared by all detectors and losses.
SHARED_GROUPS: tuple[type[Settings], ...] = (DataSettings, ScheduleSettings, TrainerSettings)
GROUPS = ("detector", "backbone", "loss", "inputs", "data", "schedule", "trainer")
# Settings that a resumed run may change. A key that ends with a dot stands for the whole group.
MAY_CHANGE = (
    "trainer.",
    "data.workers",
    "data.val_batch_size",
    "init",
    "backbone.weights",
    "detector.weights",
)
MAX_BASES = 20  # recipe files that build on one another


@dataclass(frozen=True)
class Recipe:
    """All settings of a run. ``backbone`` is not used if the detector has its own backbone."""

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
        """The backbone name; None if the detector has its own backbone."""
        return self.backbone.name if detector_spec(self.detector.name).backbone else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for YAML and JSON."""
        used = [name for name in GROUPS if name != "backbone" or self.backbone_name is not None]
        groups = {name: dataclasses.asdict(getattr(self, name)) for name in used}
        plain: dict[str, Any] = _plain({**groups, "init": self.init})
        return plain

    def flat(self) -> dict[str, Any]:
        """Return plain values by key, like ``loss.delta``."""
        return flatten(self.to_dict())


def load_recipe(recipe: str | Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Load ``recipe``, the name of a packaged recipe or the path of a file, and apply ``changes``, values by key.

    >>> load_recipe("atss-laptop", {"loss.name": "ap", "loss.delta": 0.25}).loss.delta
    0.25
    """
    content, source = _read(recipe)
    if changes:
        content = _merged(content, changes)
        source = f"{source} with {' '.join(f'--{key} {value}' for key, value in changes.items())}"
    return from_dict(content, source=source)


def from_dict(content: Mapping[str, Any], *, source: str = "recipe") -> Recipe:
    """Build a recipe from ``content``, groups of settings as in a recipe file; everything else has its default.

    ``source`` names the recipe in error messages.

    >>> from_dict({"detector": {"name": "atss"}, "loss": {"delta": 0.25}}).loss.delta
    0.25
    >>> from_dict({"detector": {"name": "atss"}, "loss": {"dleta": 0.25}})
    Traceback (most recent call last):
    bucketrank.errors.RecipeError: recipe: there is no setting "loss.dleta"; ...
    """
    given = flatten(content)
    try:
        name = convert(given.get("detector.name", ""), str, name="detector.name")
        detector = detector_spec(name)
        loss = loss_spec(given.get("loss.name", LossSettings.name))
        known = settings_by_key(name, loss.name)
        values = {key: _convert(key, value, known) for key, value in given.items()}
        groups: dict[str, Any] = {
            group.group: group(**_values_of(group, values))
            for group in (*detector.groups, loss.settings, *SHARED_GROUPS)
        }
    except RecipeError:
        raise
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{source}: {error}") from error
    return Recipe(**groups, init=values.get("init"))


def _convert(key: str, value: Any, known: Mapping[str, Setting]) -> Any:
    if key not in known:
        raise ValueError(f'there is no setting "{key:.200}"{suggest(key, known)}')
    if not isinstance(value, FlagText):
        return convert(value, known[key].type, name=key)
    try:
        return convert(value, known[key].type, name=f"--{key}")
    except ValueError as error:  # the error is in the flag, so do not name the recipe
        raise RecipeError(str(error)) from error


def _values_of(group: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the settings of one group. The values may include settings of losses that the recipe does not use."""
    keys = {f"{group.group}.{setting.name}": setting.name for setting in describe(group)}
    return {keys[key]: value for key, value in values.items() if key in keys}


def settings_by_key(detector: str | None = None, loss: str | None = None) -> dict[str, Setting]:
    """Return every setting of a recipe by its key, like ``loss.delta``.

    The settings of all losses are included, so that a recipe with a ``loss.delta`` still works with ``--loss focal``.
    If two losses declare the same key, the declaration of ``loss`` counts. None stands for all detectors or all losses;
    then a setting accepts what any of them accepts.
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


def require_init(recipe: Recipe, source: str) -> None:
    """Raise RecipeError if the recipe must start from weights, and none are given; ``source`` names the recipe."""
    if recipe.init == REQUIRED:
        raise RecipeError(
            f"{source}: init: expected the weights of a {recipe.detector.name} trained on COCO, got none; "
            "give --init RUN/weights.safetensors of a COCO run or --init mmdet:FILE.pth of a published one, or "
            "--init null to start from the backbone's weights alone"
        )


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two recipes differ, with both values."""
    ours, theirs = one.flat(), other.flat()
    keys = [*ours, *(key for key in theirs if key not in ours)]
    return {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}


def fixed_differences(before: Recipe, now: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the changed settings that a resumed run must not change."""
    groups = (before.loss, before.detector, before.data)
    filled = {f"{each.group}.{name}" for each in groups for name in each.filled_by_run}
    return {
        key: (old, new)
        for key, (old, new) in differences(before, now).items()
        if (key == "trainer.seed" or not key.startswith(MAY_CHANGE))
        and not (key in filled and new in (None, AUTO_BATCH))
    }


def flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all groups by key, like ``loss.delta``."""
    flat: dict[str, Any] = {}
    for group, values in content.items():
        if group in GROUPS and isinstance(values, dict):
            flat |= {f"{group}.{key}": value for key, value in values.items()}
        else:
            flat[str(group)] = values
    return flat


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(each.name.removesuffix(".yaml") for each in _folder().iterdir() if each.name.endswith(".yaml"))


def recipe_text(recipe: str | Path) -> str:
    """Return the text of a recipe file."""
    path = _path(recipe)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path}: expected UTF-8, got another encoding (byte {error.start}); save the file as UTF-8"
        ) from error


def recipe_to_yaml(recipe: Recipe) -> str:
    """Format ``recipe`` as YAML, with every setting."""
    text: str = yaml.safe_dump(recipe.to_dict(), sort_keys=False, width=110)
    return text


def _folder() -> Path:
    return Path(str(resources.files("bucketrank.settings"))) / "yaml"


def _path(recipe: str | Path) -> Path:
    packaged = _folder() / f"{recipe}.yaml"
    if isinstance(recipe, str) and "/" not in recipe and packaged.is_file():
        return packaged
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise RecipeError(f"{path}: there is no such file; give a recipe's name or file (see bucketrank recipes)")
    hint = suggest(str(recipe), recipe_names())
    raise RecipeError(f'there is no recipe "{recipe}"{hint} (see bucketrank recipes)')


def _read(recipe: str | Path, *, seen: tuple[Path, ...] = ()) -> tuple[dict[str, Any], str]:
    """Read a recipe file, merged with its bases; also return the recipe name for messages."""
    path = _path(recipe)
    content = _parse(path, recipe_text(recipe))
    base = content.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise RecipeError(f"{path}: base: expected the name or file of a recipe, got {short_repr(base)}")
        resolved = path.resolve()
        if resolved in seen:
            raise RecipeError(f"{path}: is its own base")
        if len(seen) >= MAX_BASES:
            raise RecipeError(
                f"{path}: expected at most {MAX_BASES} recipes that build on one another; merge some of them"
            )
        if base.endswith((".yaml", ".yml")):  # a file path is relative to this file
            base = path.parent / base
        inherited, _ = _read(base, seen=(*seen, resolved))
        content = _merged(inherited, content)
    if "detector" not in content or "name" not in content["detector"]:
        names = [*detectors(), *(f"{library}/MODEL" for library in libraries())]
        raise RecipeError(f"{path}: expected detector.name, one of {', '.join(names)}")
    return content, str(recipe) if path.parent == _folder() else str(path)


def _parse(path: Path, text: str) -> dict[str, Any]:
    """Parse a recipe file and check its groups."""
    try:
        content = parse_yaml(text)
    except RecursionError as error:
        raise RecipeError(f"{path}: expected groups of settings, got lists or groups nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date like 2026-13-45
        raise RecipeError(f"{path}: not YAML: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(
            f"{path}: expected groups of settings like detector, loss and schedule, got {short_repr(content)}"
        )
    known = ["base", *GROUPS, "init"]
    for group, values in content.items():
        if group not in known:
            raise RecipeError(f'{path}: there is no group "{group!s:.200}"{suggest(str(group), known)}')
        if group in GROUPS and not isinstance(values, dict):
            raise RecipeError(f"{path}: expected settings under {group!r}, got {short_repr(values)}")
    return content


def _merged(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``content`` with ``changes``, which may be groups or keys like ``loss.delta``."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in content.items()}
    for key, value in flatten(changes).items():
        group, dot, setting = key.partition(".")
        if dot:
            merged.setdefault(group, {})[setting] = value
        else:
            merged[key] = value
    return merged
