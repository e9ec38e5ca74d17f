"""Flags: an argument parser with our messages, a flag for every setting, and short names for the most common ones.

The parser only splits the words. Values stay texts (:class:`FlagText`) until the recipe or the command converts them to
the declared type.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, get_origin, get_type_hints

from bucketrank.errors import UsageError, short_repr, suggest
from bucketrank.settings.fields import FlagText, Setting, alternatives, choices_of, convert, format_type
from bucketrank.settings.recipe import GROUPS, SHARED_GROUPS, Recipe, load_recipe, settings_by_key

SHORT = {"--detector": "--detector.name", "--backbone": "--backbone.name", "--loss": "--loss.name"}
METAVARS = {int: "N", float: "NUMBER", str: "TEXT", bool: "BOOL", dict: '"{NAME: NUMBER}"', tuple: "LIST"}
# Short name, as other detection tools have it -> the setting that it changes.
KEYS = {
    "epochs": "schedule.epochs",
    "batch": "data.batch_size",
    "imgsz": "inputs.min_size",
    "lr": "schedule.lr",
    "device": "trainer.accelerator",
    "workers": "data.workers",
    "time": "trainer.max_time",
}
MIN_IMGSZ = 32  # pixels, the coarsest stride of most backbones; objects vanish in smaller images
ACCELERATORS = {"auto": "auto", "cpu": "cpu", "cuda": "cuda", "cuda:0": "cuda", "gpu": "cuda", "mps": "mps"}


class FlagParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError with our messages. ``add_value`` adds the flags that take a value."""

    def __init__(self, **texts: Any) -> None:
        super().__init__(**texts, allow_abbrev=False, exit_on_error=False)
        self._types: dict[str, Any] = {}  # flag -> type of its value

    def add_value(self, flag: str, annotation: Any, *, section: Any = None, **options: Any) -> None:
        """Add a flag with one value. ``annotation`` is its type in messages; the parser does not convert the text."""
        self._types[flag] = annotation
        (section or self).add_argument(flag, **options)

    def parse(self, words: Sequence[str], known: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
        """Parse the values by destination; also return the remaining words. ``known`` are all existing flags."""
        flags = list(known)
        for word in words:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag != "--" and flag not in flags:
                raise UsageError(f'there is no flag "{flag}"{suggest(flag, flags)}')
        try:
            values, rest = self.parse_known_args(list(words))
        except argparse.ArgumentError as error:
            name = error.argument_name
            if name is None:  # newer Python versions report missing positional arguments this way
                self.error(error.message)
            if name not in self._types:
                raise UsageError(f"{name}: expected no value after it") from error
            after = list(words)[list(words).index(name) + 1 :] if name in words else []
            dashed = bool(after) and not after[0].startswith("--")  # like -1h, which argparse reads as a flag
            remedy = f"nothing; if {after[0]} is the value, write {name}={after[0]}" if dashed else "nothing"
            expected = format_type(self._types[name])
            raise UsageError(f"{name}: expected {expected} after it, got {remedy}") from error
        return vars(values), rest

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _CollectSetting(argparse.Action):
    """Put the texts of all setting flags into one dict, by setting key."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        vars(namespace).setdefault(self.dest, {})[str(option_string).removeprefix("--")] = FlagText(values)


def flag_names() -> list[str]:
    """Return the setting flags of all detectors and losses."""
    return [*SHORT, *(f"--{key}" for key in settings_by_key())]


def normalised(word: str) -> str:
    """Normalise a flag: underscores for dashes, and ``--loss.name`` for ``--loss``.

    >>> normalised("--inputs.max-size=640"), normalised("--loss")
    ('--inputs.max_size=640', '--loss.name')
    """
    flag, equals, value = word.partition("=")
    if flag.startswith("--") and "." in flag:
        flag = "--" + flag.removeprefix("--").replace("-", "_")
    return SHORT.get(flag, flag) + equals + value


def parse_flags(words: Sequence[str]) -> dict[str, FlagText]:
    """Parse flags like ``--loss.delta 0.25`` or ``--loss.delta=0.25`` to recipe changes; ``words`` is a command line.

    >>> parse_flags(["--loss.delta", "0.25", "--data.jitter"])
    {'loss.delta': '0.25', 'data.jitter': 'true'}
    """
    words = [normalised(word) for word in words]
    parser = FlagParser(add_help=False)
    add_used_flags(parser, words, dest="changes")
    values, rest = parser.parse(words, flag_names())
    if rest:
        raise UsageError(f'there is no flag "{rest[0]}"{suggest(f"--{rest[0]}", flag_names())}')
    changes: dict[str, FlagText] = values.get("changes", {})
    return changes


def add_used_flags(parser: FlagParser, words: Sequence[str], *, dest: str) -> None:
    """Add only the setting flags that occur among the words; a parser with all flags is slow to build."""
    used = {word.partition("=")[0].removeprefix("--") for word in words}
    for key, setting in settings_by_key().items():
        if key in used:
            _add(parser, parser, key, setting, dest=dest, help_text="")


def add_recipe_flags(parser: FlagParser, recipe: Recipe, *, dest: str) -> None:
    """Add a flag for every setting of a recipe. The help shows the recipe's values."""
    values = recipe.flat()
    settings = settings_by_key(recipe.detector.name, recipe.loss.name)
    for group in (*GROUPS, "init"):
        section = parser.add_argument_group(f"settings of {group}" if group != "init" else "initial weights")
        for key, setting in settings.items():
            if key.partition(".")[0] == group and key in values:
                _add(parser, section, key, setting, dest=dest, help_text=f"{setting.help} [{_short(values[key])}]")


def _add(parser: FlagParser, section: Any, key: str, setting: Setting, *, dest: str, help_text: str) -> None:
    optional: Mapping[str, Any] = {"nargs": "?", "const": "true"} if bool in alternatives(setting.type) else {}
    parser.add_value(
        f"--{key}",
        setting.type,
        section=section,
        action=_CollectSetting,
        dest=dest,
        default=argparse.SUPPRESS,
        metavar=metavar(setting.type),
        help=help_text.replace("%", "%%"),
        **optional,
    )


def metavar(annotation: Any) -> str:
    """Return a value's placeholder in the help."""
    first = alternatives(annotation)[0]
    choices = choices_of(annotation)
    if choices and get_origin(first) is not tuple:
        return "{" + ",".join(choices) + "}"
    return METAVARS.get(get_origin(first) or first, "VALUE")


def _short(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class ShortNames:
    """Settings by their short names; None where the recipe decides.

    >>> ShortNames(epochs=24, imgsz=640).changes("atss-r50-rs")
    {'schedule.epochs': 24, 'inputs.min_size': 640, 'schedule.milestones': [16, 22], 'inputs.max_size': 1066}
    >>> ShortNames(batch=4, device="cpu").changes("atss-laptop")
    {'data.batch_size': 4, 'trainer.accelerator': 'cpu', 'trainer.devices': '1'}
    """

    epochs: int | None = None  # passes over the training set
    batch: int | None = None  # images per step
    imgsz: int | None = None  # shorter side of the images
    lr: float | None = None  # learning rate
    device: str | None = None  # auto, cpu, cuda or mps
    workers: int | None = None  # data-loading workers
    time: str | None = None  # time budget

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for name, value in self.given().items():
            try:
                object.__setattr__(self, name, convert(value, types[name], name=name))
                self._require_valid(name)
            except ValueError as error:  # noqa: PERF203
                raise UsageError(str(error)) from error

    def _require_valid(self, name: str) -> None:
        """Raise ValueError if a setting would refuse its short name's value; the message has the short name."""
        value = getattr(self, name)
        if name == "imgsz" and value < MIN_IMGSZ:
            raise ValueError(f"imgsz: expected at least {MIN_IMGSZ} pixels, got {value}")
        group, _, setting = KEYS[name].partition(".")
        for settings in SHARED_GROUPS:
            if settings.group == group and name != "device":
                try:
                    settings(**{setting: value})
                except ValueError as error:
                    if str(error).startswith(f"{KEYS[name]}:"):
                        raise ValueError(str(error).replace(KEYS[name], name, 1)) from error

    def given(self) -> dict[str, Any]:
        """Return the short names that are given, with their values."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def changes(self, recipe: str | Path, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the changes to ``recipe``, a name or a file, by short names and by ``settings``, changes by key.

        Milestones scale with the number of epochs, and the upper limit of the longer side with that of the shorter;
        ``settings`` take precedence over these scaled values. UsageError names a setting that is given twice, under
        both of its names.
        """
        settings = settings or {}
        given = self.given()
        for name in given:
            if KEYS[name] in settings:
                raise UsageError(f"{name}: is short for {KEYS[name]}; give one of them")
        if not given:
            return dict(settings)
        if self.time is not None and self.epochs is not None:
            raise UsageError("time: expected to be given without epochs, got both; leave one of them out")
        before = load_recipe(recipe)
        changes = {KEYS[name]: value for name, value in given.items()}
        if self.epochs is not None:
            changes |= _scaled_milestones(before, self.epochs)
        if self.imgsz is not None:
            changes |= _scaled_limit(before, self.imgsz)
        if self.device is not None:
            changes |= _device(self.device)
        return changes | dict(settings)


def _scaled_milestones(recipe: Recipe, epochs: int) -> dict[str, Any]:
    schedule = recipe.schedule
    scaled = {max(1, round(milestone * epochs / schedule.epochs)) for milestone in schedule.milestones}
    return {"schedule.milestones": sorted(scaled)}


def _scaled_limit(recipe: Recipe, side: int) -> dict[str, Any]:
    """Keep the proportion of both limits; null stands for the limits of a library's model."""
    sides, limit = recipe.inputs.min_size, recipe.inputs.max_size
    if sides is None or limit is None:
        return {}
    return {"inputs.max_size": round(side * limit / (sides if isinstance(sides, int) else max(sides)))}


def _device(name: str) -> dict[str, Any]:
    if name not in ACCELERATORS:
        raise UsageError(
            f"device: expected auto, cpu, cuda or mps, got {short_repr(name)}; choose a GPU with the environment "
            "variable CUDA_VISIBLE_DEVICES, or a number of GPUs with --trainer.devices"
        )
    chosen = {"trainer.accelerator": ACCELERATORS[name]}
    return chosen if name == "auto" else chosen | {"trainer.devices": "1"}
