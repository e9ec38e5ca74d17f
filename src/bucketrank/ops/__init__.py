"""Boxes, anchors and assignment: boxes in, numbers and indices out. Knows no detector and no loss.

Boxes are always (x1, y1, x2, y2) in pixels. Only ``anchors`` imports torchvision, and only the
Hungarian assignment scipy; the rest needs torch alone.
"""
