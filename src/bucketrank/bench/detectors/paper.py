"""The paper's seconds per iteration, to stand beside ours."""

from __future__ import annotations

from typing import NamedTuple

WHERE = "ResNet-50, 800x1333, 4 A100 with 4 images each"


class Published(NamedTuple):
    """T_iter of the ranking loss, of its bucketed form and of the score-based baseline; None where there is none."""

    ranking: float | None = None
    bucketed: float | None = None
    scored: float | None = None
    others: str = ""


T_ITER = {
    "faster_rcnn": Published(0.50, 0.17, 0.14, "aLRP 0.28"),
    "mask_rcnn": Published(0.56, 0.24),
    "cascade_rcnn": Published(1.28, 0.24),
    "retinanet": Published(None, 0.23, None, "DR 0.29"),
    "atss": Published(0.36, 0.15, 0.14, "AP 0.32, BAP 0.15, aLRP 0.32, DR 0.20"),
    "paa": Published(0.57, 0.30, None, "AP 0.45, BAP 0.30"),
    "co_detr": Published(4.14, 0.69, None, "8 A100 with 2 images each"),
}
