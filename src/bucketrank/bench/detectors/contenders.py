"""Who is measured: each detector with its ranking loss by every method, and with score-based losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EXACT, BUCKETED, PAIRWISE = "rs/exact", "rs/bucketed", "rs/pairwise"
FOCAL, USUAL = "focal", "usual"
NAMES = (EXACT, BUCKETED, PAIRWISE, FOCAL, USUAL)
# Time grows with P x (P + N): estimated before it is spent.
QUADRATIC = (BUCKETED, PAIRWISE)

TITLES = {
    "faster_rcnn": "Faster R-CNN",
    "mask_rcnn": "Mask R-CNN",
    "cascade_rcnn": "Cascade R-CNN",
    "retinanet": "RetinaNet",
    "atss": "ATSS",
    "paa": "PAA",
    "co_detr": "Co-DETR",
}
RCNNS = ("faster_rcnn", "mask_rcnn", "cascade_rcnn")
# What the detectors do otherwise under a ranking loss, for the score-based loss on the same candidates.
SAME: dict[str, dict[str, Any]] = {
    "faster_rcnn": {},
    "mask_rcnn": {"mask_rois": 200},
    "cascade_rcnn": {},
    "retinanet": {"scales": 2},
    "atss": {"anchors": 3},
    "paa": {"anchors": 3},
    "co_detr": {"sampling": False},
}
# With a transformer of the published size the study would be about little else.
SMALLER: dict[str, dict[str, Any]] = {
    "co_detr": {
        "queries": 100,
        "auxiliary_queries": 100,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "feedforward": 256,
        "hidden": 256,
    }
}
# Of the score-based contenders: on the same candidates, and the usual one.
SCORED_TITLES = {
    "faster_rcnn": ("focal, no sampling", "ce, 512 sampled"),
    "mask_rcnn": ("focal, no sampling", "ce, 512 sampled"),
    "cascade_rcnn": ("focal, no sampling", "ce, 512 sampled"),
    "retinanet": ("focal, 2 scales", "focal, 3 scales"),
    "atss": ("focal, 3 anchors", "focal, 1 anchor"),
    "paa": ("focal, 3 anchors", "focal, 1 anchor"),
    "co_detr": ("focal, no sampling", "usual, 512 sampled"),
}


@dataclass(frozen=True)
class Entry:
    """One contender on one detector: the settings of ``build`` that make it."""

    detector: str
    name: str
    title: str
    build: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{TITLES[self.detector]}, {self.title}"


def entries(detector: str) -> list[Entry]:
    """The contenders on one detector.

    ``focal`` is the score-based loss on the same candidates: it takes every anchor and proposal, with the anchors and
    the box loss of the ranking loss. ``usual`` is what the detector is usually trained with: for the R-CNNs
    cross-entropy on 256 anchors and 512 proposals an image, else focal loss on the detector's own anchors.
    """
    methods = {name: name.removeprefix("rs/") for name in (EXACT, BUCKETED, PAIRWISE)}
    ranking = [Entry(detector, name, name, {"loss": "rs", "method": methods[name]}) for name in methods]
    same = {"loss": "focal", "box_loss": "giou", **SAME[detector]}
    usual = {"loss": "ce" if detector in RCNNS else "focal"}
    titles = SCORED_TITLES[detector]
    return [*ranking, Entry(detector, FOCAL, titles[0], same), Entry(detector, USUAL, titles[1], usual)]
