"""Recipes as YAML: one for each row of the paper's tables, and small ones for a laptop."""
