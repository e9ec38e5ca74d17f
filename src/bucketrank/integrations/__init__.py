"""Ranking losses for the detectors of other libraries: one package per library."""
