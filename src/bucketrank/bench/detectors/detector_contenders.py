"""The contenders: each detector with its ranking loss by every method, and with two score-based losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bucketrank.settings import detector_spec

EXACT, BUCKETED, PAIRWISE = "rs/exact", "rs/bucketed", "rs/pairwise"
FOCAL, USUAL = "focal", "usual"
NAMES = (EXACT, BUCKETED, PAIRWISE, FOCAL, USUAL)
# Their time grows with P x (P + N), so it is estimated before they run.
QUADRATIC = (BUCKETED, PAIRWISE)

RCNNS = ("faster_rcnn", "mask_rcnn", "cascade_rcnn")
# Settings that a ranking loss changes by default, given to ``focal`` so that it has the same candidates.
SAME_CANDIDATES: dict[str, dict[str, Any]] = {
    "faster_rcnn": {},
    "mask_rcnn": {"mask_rois": 200},
    "cascade_rcnn": {},
    "retinanet": {"scales": 2},
    "atss": {"anchors": 3},
    "paa": {"anchors": 3},
    "co_detr": {"sampling": False},
}
# A transformer of the published size would take most of the benchmark's time.
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
# Titles of ``focal`` and ``usual``.
SCORED_TITLES = {
    "faster_rcnn": ("focal, no sampling", "cross-entropy, 512 sampled"),
    "mask_rcnn": ("focal, no sampling", "cross-entropy, 512 sampled"),
    "cascade_rcnn": ("focal, no sampling", "cross-entropy, 512 sampled"),
    "retinanet": ("focal, 2 scales", "focal, 3 scales"),
    "atss": ("focal, 3 anchors", "focal, 1 anchor"),
    "paa": ("focal, 3 anchors", "focal, 1 anchor"),
    "co_detr": ("focal, no sampling", "focal and cross-entropy, 512 sampled"),
}
TITLES = {name: detector_spec(name).title for name in SCORED_TITLES}


@dataclass(frozen=True)
class DetectorContender:
    """A detector with a loss; ``build`` holds the loss settings for :func:`bucketrank.detectors.build`."""

    detector: str
    name: str
    title: str
    build: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{TITLES[self.detector]}, {self.title}"


def detector_contenders(detector: str) -> list[DetectorContender]:
    """Return the contenders of one detector, in the order of ``NAMES``.

    ``focal`` is a score-based loss on the same candidates: it takes every anchor and proposal, with the anchors and
    the box loss of the ranking loss. ``usual`` is the loss the detector is usually trained with: cross-entropy on 256
    anchors and 512 proposals per image for the R-CNNs, otherwise focal loss on the detector's own anchors.
    """
    methods = {name: name.removeprefix("rs/") for name in (EXACT, BUCKETED, PAIRWISE)}
    focal = {"loss": "focal", "box_loss": "giou", **SAME_CANDIDATES[detector]}
    usual = {"loss": "ce" if detector in RCNNS else "focal"}
    focal_title, usual_title = SCORED_TITLES[detector]
    return [
        *(DetectorContender(detector, name, name, {"loss": "rs", "method": methods[name]}) for name in methods),
        DetectorContender(detector, FOCAL, focal_title, focal),
        DetectorContender(detector, USUAL, usual_title, usual),
    ]
