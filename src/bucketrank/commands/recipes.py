"""``bucketrank recipes``."""

from __future__ import annotations

import sys
from typing import Annotated

from bucketrank.arguments import SettingFlags, UsageError, require


def recipes(
    recipe: Annotated[str | None, "show this recipe with all its settings"] = None,
    *,
    markdown: Annotated[bool, "print the list as a Markdown table"] = False,
    settings: Annotated[SettingFlags, "settings of the recipe"],
) -> None:
    """List the recipes of the package with the paper's AP, or show one with all its settings."""
    require("yaml", extra="detect")
    from bucketrank.recipes import RecipeError, listing

    try:
        if recipe is not None:
            sys.stdout.write(listing.show_recipe(recipe, settings))
        elif markdown:
            sys.stdout.write(listing.markdown())
        else:
            listing.list_recipes()
    except RecipeError as error:
        raise UsageError(f"recipes: {error}") from error
