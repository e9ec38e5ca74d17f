"""Recipes: what a recipe is, how its file is read, and the files of the package in ``yaml/``. Needs no torch."""

from bucketrank.recipes.recipe import Recipe, RecipeError, from_dict
from bucketrank.recipes.recipe_files import load_recipe, recipe_names, recipe_to_yaml

__all__ = ["Recipe", "RecipeError", "from_dict", "load_recipe", "recipe_names", "recipe_to_yaml"]
