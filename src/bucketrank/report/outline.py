"""The outline of a mask as an SVG path."""

from __future__ import annotations

from typing import Any

import numpy as np
from contourpy import contour_generator  # comes with matplotlib
from numpy.typing import NDArray
from PIL import Image

from bucketrank.data.coco import decode_masks

MAX_SIDE = 192  # masks are reduced to this many pixels on their longer side before they are traced


def outline(segmentation: Any, size: tuple[int, int], shown: tuple[int, int]) -> str:
    """Return an SVG path around a mask (polygons or RLE), or "" without a mask.

    ``size`` is the height and width of the image, ``shown`` that of the copy whose pixels the path refers to.
    """
    if not segmentation:
        return ""
    mask = decode_masks([segmentation], size)[0].numpy().astype(np.uint8) * 255
    scale = min(1.0, MAX_SIDE / max(size))
    small = max(1, round(size[1] * scale)), max(1, round(size[0] * scale))
    soft: NDArray[np.float32] = np.asarray(Image.fromarray(mask).resize(small, Image.Resampling.BOX), dtype=np.float32)
    # A border of zeros closes the outline of a mask that reaches the edge of the image.
    lines = contour_generator(z=np.pad(soft, 1)).lines(127.5)
    to_shown = np.array([shown[1] / small[0], shown[0] / small[1]])
    pieces = []
    for line in lines:
        corners = np.clip((np.asarray(line) - 0.5) * to_shown, 0, [shown[1], shown[0]]).round(1)
        corners = corners[np.append(True, (np.diff(corners, axis=0) != 0).any(1))]
        if len(corners) > 2:
            pieces.append("M" + "L".join(f"{x:g},{y:g}" for x, y in corners) + "Z")
    return "".join(pieces)
