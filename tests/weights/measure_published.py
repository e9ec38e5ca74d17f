"""Print the table of docs/published-weights.md: ``python -m tests.weights.measure_published [CASE ...]``.

It runs the comparisons of ``test_published_parity`` and ``test_co_dino_parity``, and records the largest difference of
each kind.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from torch import Tensor

from . import test_co_dino_parity as co_dino
from . import test_published_parity as parity
from .published_cases import CASES, Case

KINDS = {
    "features": ("backbone", "pyramid", "neck", "encoder"),
    "boxes": ("detections_boxes", "all_pairs_boxes", "nms_boxes"),
    "scores": ("detections_scores", "all_pairs_scores", "nms_scores"),
}
recorded: dict[str, float] = {}


class Recording(Case):
    """A case that records the differences that a test asks for."""

    def differs(self, name: str, actual: Tensor) -> float:
        difference = super().differs(name, actual)
        if not name.startswith("anchors"):
            kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "heads")
            scaled = difference if kind in ("boxes", "scores") else difference / max(1.0, float(self[name].abs().max()))
            recorded[kind] = max(recorded.get(kind, 0.0), scaled)
        return difference


def measure(name: str) -> dict[str, float]:
    """Return the largest differences of a case by kind; raise AssertionError if a test fails."""
    recorded.clear()
    with tempfile.TemporaryDirectory() as folder:
        if name.startswith("co_dino"):
            co_dino.compare(Recording.read(name), co_dino.convert(Case.read("co_dino_5scale_r50"), Path(folder)))
        elif name.startswith("co_"):
            parity.test_co_deformable_detr(Path(folder))
        elif "rcnn" in name:
            parity.test_rcnns(name, Path(folder))
        else:
            parity.test_dense_detectors(name, Path(folder))
    return dict(recorded)


if __name__ == "__main__":
    vars(parity)["Case"] = Recording
    for case in sys.argv[1:] or CASES:
        found = measure(case)
        values = " | ".join(f"{found[kind]:.0e}" for kind in ("features", "heads", "boxes", "scores"))
        sys.stdout.write(f"| {case} | {values} |\n")
        sys.stdout.flush()
