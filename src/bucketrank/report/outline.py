"""The outline of a mask, as a path for SVG."""

from __future__ import annotations

from typing import Any

import numpy as np
from contourpy import contour_generator  # comes with matplotlib
from numpy.typing import NDArray
from PIL import Image

from bucketrank.data.coco import decode_masks

FINEST = 192  # pixels of the longer side that an outline is followed on


def outline(segmentation: Any, size: tuple[int, int], shown: tuple[int, int]) -> str:
    """The path around a mask (polygons or RLE) of an image of ``size``, in the pixels of the picture ``shown``.

    Both are height and width. Empty without a mask.
    """
    if not segmentation:
        return ""
    mask = decode_masks([segmentation], size)[0].numpy().astype(np.uint8) * 255
    share = min(1.0, FINEST / max(size))
    small = max(1, round(size[1] * share)), max(1, round(size[0] * share))
    soft: NDArray[np.float32] = np.asarray(Image.fromarray(mask).resize(small, Image.Resampling.BOX), dtype=np.float32)
    # With a border of zeros a mask at the picture's edge is closed there.
    lines = contour_generator(z=np.pad(soft, 1)).lines(127.5)
    scale = np.array([shown[1] / small[0], shown[0] / small[1]])
    pieces = []
    for line in lines:
        corners = np.clip((np.asarray(line) - 0.5) * scale, 0, [shown[1], shown[0]]).round(1)
        corners = corners[np.append(True, (np.diff(corners, axis=0) != 0).any(1))]
        if len(corners) > 2:
            pieces.append("M" + "L".join(f"{x:g},{y:g}" for x, y in corners) + "Z")
    return "".join(pieces)
