"""Detectors of other libraries behind the interface of ours, with their pretrained weights: torchvision's models."""
