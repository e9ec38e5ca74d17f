"""Ranking losses for models of other libraries: one module for each library."""
