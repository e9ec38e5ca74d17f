"""The meaning of the scores of a weights file, in one sentence."""

from __future__ import annotations

from bucketrank.model_files.weights import Meta

MEANINGS = {"match": "the probability of a match at IoU 0.5", "iou": "the expected IoU"}


def scores_in_words(meta: Meta) -> str:
    """Return a sentence about the scores of a weights file: what they were calibrated to, or that they were not."""
    if meta.calibration is None:
        return "Scores are not calibrated: bucketrank calibrate makes them probabilities."
    return f"Scores are calibrated to {MEANINGS[meta.calibration.target]} ({meta.calibration})."
