"""Boxes, anchors and assignment: boxes in, numbers and indices out. Knows no detector and no loss.

Boxes are always (x1, y1, x2, y2) in pixels. Only ``anchors`` and the Hungarian assignment need
torchvision, and the latter scipy; the rest needs torch alone.
"""
