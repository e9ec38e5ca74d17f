"""Ranking losses for the detectors of other libraries: one package per library, one module for DETR-like criteria."""
