"""A recipe: everything that decides how a detector is trained, as settings in groups.

A recipe file is YAML with only what differs from the defaults (or from the recipe named by ``base``); on the command
line any setting is a flag, ``--loss.delta 0.25``. Nothing here needs torch, so that a mistake is told at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from bucketrank.detectors.settings import BackboneSettings, InputSettings, LossSettings
from bucketrank.detectors.signatures import detector_names, loss_names, own_settings
from bucketrank.training.convert import convert, in_words
from bucketrank.training.settings import DataSettings, ScheduleSettings, TrainerSettings, choose, nearest

METHODS = ("exact", "bucketed", "pairwise")
GROUPS: dict[str, type[Any]] = {
    "backbone": BackboneSettings,
    "loss": LossSettings,
    "inputs": InputSettings,
    "data": DataSettings,
    "schedule": ScheduleSettings,
    "trainer": TrainerSettings,
}
MAY_CHANGE = ("trainer.", "data.workers", "data.val_batch_size", "init", "backbone.weights")  # in a resumed run
MOST = 1_000_000  # of anything in a detector
NAMED = ("detector", "backbone", "loss")  # groups with a name: --loss rs is --loss.name rs


class RecipeError(ValueError):
    """A recipe or flag that cannot be; the message says where, what and what is nearest."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a training, all of them. ``detector`` has its name and its own settings."""

    detector: dict[str, Any]
    backbone: BackboneSettings = field(default_factory=BackboneSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    inputs: InputSettings = field(default_factory=InputSettings)
    data: DataSettings = field(default_factory=DataSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    init: str | None = None  # a weights file of ours, whose tensors that fit are taken

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        groups = {name: dataclasses.asdict(getattr(self, name)) for name in GROUPS}
        plain: dict[str, Any] = _plain({"detector": self.detector, **groups, "init": self.init})
        return plain

    def flat(self) -> dict[str, Any]:
        """The same with one level of keys, like ``loss.delta``."""
        return _flat(self.to_dict())


def from_dict(content: Mapping[str, Any], *, source: str = "recipe") -> Recipe:
    """The recipe of such values; RecipeError names ``source``, the setting, and the nearest one that exists.

    >>> from_dict({"detector": {"name": "atss"}, "loss": {"delta": 0.25}}).loss.delta
    0.25
    >>> from_dict({"detector": {"name": "atss"}, "loss": {"dleta": 0.25}})
    Traceback (most recent call last):
    bucketrank.training.recipe.RecipeError: recipe: there is no setting "loss.dleta"; the nearest is "loss.delta"
    """
    given = _flat(dict(content))
    name = given.get("detector.name", "")
    try:
        choose("detector.name", name, detector_names())
        kinds = settings_of(name)
        _check_known(given, kinds)
        values = {key: convert(given[key], kinds[key][0], name=key) for key in given}
        if "loss.name" in values:
            choose("loss.name", values["loss.name"], loss_names())
        if "loss.method" in values:
            choose("loss.method", values["loss.method"], METHODS)
        _check_counts(values)
        groups = {
            group: kind(
                **{key.partition(".")[2]: value for key, value in values.items() if key.startswith(group + ".")}
            )
            for group, kind in GROUPS.items()
        }
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{source}: {error}") from error
    own = {key: values.get(f"detector.{key}", setting.default) for key, setting in own_settings(name).items()}
    return Recipe(detector={"name": name, **own}, init=values.get("init"), **groups)


def _check_known(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for key in given:
        if key not in known:
            raise ValueError(f'there is no setting "{key}"; {nearest(key, list(known))}')


def _check_counts(values: Mapping[str, Any]) -> None:
    """The whole numbers of a detector are all numbers of something."""
    for key, value in values.items():
        if key.startswith("detector.") and type(value) is int and not 0 <= value <= MOST:
            raise ValueError(f"{key}: expected a number from 0 to {MOST:,}, got {value:.6g}")


def settings_of(detector: str) -> dict[str, tuple[Any, Any, str]]:
    """Every setting of a recipe for ``detector``, by its flag: type, default and what it means."""
    found: dict[str, tuple[Any, Any, str]] = {"detector.name": (str, detector, "one of " + ", ".join(detector_names()))}
    for key, setting in own_settings(detector).items():
        kind = eval(setting.kind, {"Any": Any})  # noqa: S307 (an annotation of our own source)
        found[f"detector.{key}"] = (kind, setting.default, "")
    for group, settings in GROUPS.items():
        hints = get_type_hints(settings, include_extras=True)
        for each in dataclasses.fields(settings):
            hint = hints[each.name]
            default = each.default if each.default is not dataclasses.MISSING else {}
            annotated = hasattr(hint, "__metadata__")
            text = hint.__metadata__[0] if annotated else ""
            found[f"{group}.{each.name}"] = (get_args(hint)[0] if annotated else hint, default, text)
    found["init"] = (str | None, None, "weights of an earlier run to start from; tensors that do not fit are left out")
    return found


def load(recipe: str | Path, flags: Sequence[str] = ()) -> Recipe:
    """The recipe of that name in the package, or in that file, with the settings that ``flags`` give.

    >>> load("atss-laptop", ["--loss.delta", "0.25", "--loss", "ap"]).loss.delta
    0.25
    """
    content, source = _read(recipe)
    if flags:
        content = _merged(content, parse_flags(flags, detector=str(content["detector"].get("name"))))
        source = f"{source} with {' '.join(flags)}"
    return from_dict(content, source=source)


def parse_flags(words: Sequence[str], *, detector: str) -> dict[str, Any]:
    """What flags like ``--loss.delta 0.25`` or ``--loss.delta=0.25`` set."""
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word, equals, text = rest.pop(0).partition("=")
        key = word.removeprefix("--").replace("-", "_")
        if key in NAMED:
            key += ".name"
        if key == "detector.name":
            detector = text if equals else rest[0] if rest else detector
        known = settings_of(detector if detector in detector_names() else detector_names()[0])
        if not word.startswith("--") or key not in known:
            shown = [f"--{each}" for each in known]
            raise RecipeError(f'there is no flag "{word}"; {nearest(word, shown)}')
        if not equals:
            if rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            elif known[key][0] is bool:
                text = "true"
            else:
                raise RecipeError(f"--{key}: expected {in_words(known[key][0])} after it, got nothing")
        try:
            found[key] = convert(_value(text), known[key][0], name=f"--{key}")
        except ValueError as error:
            raise RecipeError(str(error)) from error
    return found


def known_flags() -> list[str]:
    """All flags that set something, of every detector."""
    found = {f"--{key}": None for name in detector_names() for key in settings_of(name)}
    return [*(f"--{group}" for group in NAMED), *found]


def names() -> list[str]:
    """The recipes in the package."""
    folder = resources.files("bucketrank.recipes")
    return sorted(each.name.removesuffix(".yaml") for each in folder.iterdir() if each.name.endswith(".yaml"))


def text_of(recipe: str | Path) -> str:
    """The file of a recipe."""
    return _file(recipe).read_text(encoding="utf-8")


def dump(recipe: Recipe) -> str:
    """The recipe as YAML, every setting in it."""
    text: str = yaml.safe_dump(recipe.to_dict(), sort_keys=False, width=110)
    return text


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """The settings in which two recipes differ."""
    mine, theirs = one.flat(), other.flat()
    keys = [*mine, *(key for key in theirs if key not in mine)]
    return {key: (mine.get(key), theirs.get(key)) for key in keys if mine.get(key) != theirs.get(key)}


def kept_differences(before: Recipe, now: Recipe) -> dict[str, tuple[Any, Any]]:
    """Those of a run's settings that it has to keep when it goes on, but that are to be others now."""
    changed = differences(before, now)
    if "loss.balance_period" in changed and changed["loss.balance_period"][1] is None:
        del changed["loss.balance_period"]  # filled in when the run began
    return {k: pair for k, pair in changed.items() if k == "trainer.seed" or not k.startswith(MAY_CHANGE)}


def _file(recipe: str | Path) -> Path:
    packaged = Path(str(resources.files("bucketrank.recipes").joinpath(f"{recipe}.yaml")))
    if isinstance(recipe, str) and "/" not in recipe and packaged.is_file():
        return packaged
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise RecipeError(f"{path}: there is no such file; give a recipe's name or file (see bucketrank recipes)")
    raise RecipeError(f'there is no recipe "{recipe}"; {nearest(str(recipe), names())} (see bucketrank recipes)')


def _read(recipe: str | Path, *, seen: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    path = _file(recipe)
    source = str(recipe) if path.parent.name == "recipes" and path.stem == str(recipe) else str(path)
    try:
        content = _parsed(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not YAML: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: expected groups of settings like detector, loss and schedule, got {content!r:.40}")
    for group, values in content.items():
        known = ["base", "detector", *GROUPS, "init"]
        if group not in known:
            raise RecipeError(f'{path}: there is no group "{group}"; {nearest(str(group), known)}')
        if group not in ("base", "init") and not isinstance(values, dict):
            raise RecipeError(f"{path}: expected settings under {group!r}, got {values!r:.40}")
    base = content.pop("base", None)
    if base is not None:
        if str(path) in seen:
            raise RecipeError(f"{path}: is its own base")
        inherited, _ = _read(base, seen=(*seen, str(path)))
        content = _merged(inherited, _flat(content))
    if "detector" not in content or "name" not in content["detector"]:
        raise RecipeError(f"{path}: expected detector.name, one of {', '.join(detector_names())}")
    return content, source


def _parsed(text: str) -> Any:
    """YAML, read by libyaml where it is there: a study reads some hundred recipes."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (both are safe)


def _merged(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``changes`` has flat keys."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in content.items()}
    for key, value in changes.items():
        group, dot, setting = key.partition(".")
        if dot:
            merged.setdefault(group, {})[setting] = value
        else:
            merged[key] = value
    return merged


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for group, values in content.items():
        if isinstance(values, dict):
            flat |= {f"{group}.{key}": value for key, value in values.items()}
        else:
            flat[str(group)] = values
    return flat


def _value(text: str) -> Any:
    try:
        return _parsed(text)
    except yaml.YAMLError:
        return text


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
