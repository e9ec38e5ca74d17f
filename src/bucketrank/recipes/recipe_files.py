"""Recipes as YAML files: those of the package by name, those of users by path.

A file holds only what differs from the defaults, or from the recipe that it names as its ``base``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from bucketrank.catalogue import detectors, libraries
from bucketrank.recipes.recipe import GROUPS, Recipe, RecipeError, flatten, from_dict
from bucketrank.suggestions import nearest, short_repr

MAX_NESTED = 10_000  # characters that open a list or a group; libyaml crashes at about 50,000 levels
MAX_BASES = 20  # recipe files that build on one another


def load_recipe(recipe: str | Path, flags: Sequence[str] = ()) -> Recipe:
    """Return a recipe of the package by its name, or of a file, with the settings that ``flags`` change.

    Args:
        recipe: name of a recipe of the package, or path of a file.
        flags: settings as on the command line.

    >>> load_recipe("atss-laptop", ["--loss.delta", "0.25", "--loss", "ap"]).loss.delta
    0.25
    """
    content, source = _read(recipe)
    if flags:
        from bucketrank.recipes.setting_flags import parse_setting_flags

        content = _merged(content, parse_setting_flags(flags))
        source = f"{source} with {' '.join(flags)}"
    return from_dict(content, source=source)


def recipe_names() -> list[str]:
    """Return the names of the package's recipes."""
    return sorted(each.name.removesuffix(".yaml") for each in _folder().iterdir() if each.name.endswith(".yaml"))


def recipe_text(recipe: str | Path) -> str:
    """Return the text of a recipe's file."""
    path = _path(recipe)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path}: expected UTF-8, got another encoding (byte {error.start}); save the file as UTF-8"
        ) from error


def recipe_to_yaml(recipe: Recipe) -> str:
    """Return the recipe as YAML with every setting in it.

    Args:
        recipe: the recipe to write.
    """
    text: str = yaml.safe_dump(recipe.to_dict(), sort_keys=False, width=110)
    return text


def parse_yaml(text: str) -> Any:
    """Parse YAML with libyaml where it is installed: a study reads hundreds of recipes.

    RecursionError if it may be nested too deeply.
    """
    if sum(map(text.count, "[{-?")) > MAX_NESTED:
        raise RecursionError
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (both are safe)


def _folder() -> Path:
    return Path(str(resources.files("bucketrank.recipes"))) / "yaml"


def _path(recipe: str | Path) -> Path:
    packaged = _folder() / f"{recipe}.yaml"
    if isinstance(recipe, str) and "/" not in recipe and packaged.is_file():
        return packaged
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise RecipeError(f"{path}: there is no such file; give a recipe's name or file (see bucketrank recipes)")
    raise RecipeError(f'there is no recipe "{recipe}"; {nearest(str(recipe), recipe_names())} (see bucketrank recipes)')


def _read(recipe: str | Path, *, seen: tuple[Path, ...] = ()) -> tuple[dict[str, Any], str]:
    """Return the content of a recipe with that of its bases, and how to call it in messages."""
    path = _path(recipe)
    source = str(recipe) if path.parent == _folder() else str(path)
    try:
        content = parse_yaml(recipe_text(recipe))
    except RecipeError:
        raise
    except RecursionError as error:
        raise RecipeError(f"{path}: expected groups of settings, got lists or groups nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date like 2026-13-45
        raise RecipeError(f"{path}: not YAML: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(
            f"{path}: expected groups of settings like detector, loss and schedule, got {short_repr(content)}"
        )
    for group, values in content.items():
        known = ["base", *GROUPS, "init"]
        if group not in known:
            raise RecipeError(f'{path}: there is no group "{group!s:.200}"; {nearest(str(group), known)}')
        if group not in ("base", "init") and not isinstance(values, dict):
            raise RecipeError(f"{path}: expected settings under {group!r}, got {short_repr(values)}")
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
        if base.endswith((".yaml", ".yml")):  # a file, which is looked for beside this one
            base = path.parent / base
        inherited, _ = _read(base, seen=(*seen, resolved))
        content = _merged(inherited, flatten(content))
    if "detector" not in content or "name" not in content["detector"]:
        names = [*detectors(), *(f"{library}/MODEL" for library in libraries())]
        raise RecipeError(f"{path}: expected detector.name, one of {', '.join(names)}")
    return content, source


def _merged(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``content`` with ``changes``, whose keys are flat like ``loss.delta``."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in content.items()}
    for key, value in changes.items():
        group, dot, setting = key.partition(".")
        if dot:
            merged.setdefault(group, {})[setting] = value
        else:
            merged[key] = value
    return merged
