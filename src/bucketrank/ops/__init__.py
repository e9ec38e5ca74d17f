"""Boxes, anchors and assignment: boxes in, numbers and indices out. Imports no detector and no loss.

Boxes are always (x1, y1, x2, y2) in pixels. ``anchors`` needs torchvision; the Hungarian assignment needs torchvision
and scipy; the rest needs torch alone.
"""
