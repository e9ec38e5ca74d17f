"""Ranking losses for detectors of other libraries: torchvision, transformers and DETR-like repositories."""
