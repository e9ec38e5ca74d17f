"""Calibrate a weights file: read it, fit, fold, and write it with the calibration in its description."""

from __future__ import annotations

from pathlib import Path

from bucketrank.calibration import Calibration, calibrate
from bucketrank.calibration.calibrate_model import MOST_IMAGES
from bucketrank.calibration.calibration_result import Method, Target
from bucketrank.deploy.evaluate import prepare_evaluation
from bucketrank.model_files.weights import WeightsError, save_weights


def calibrate_weights(
    weights: Path | str,
    data: Path | str,
    out: Path | str | None = None,
    *,
    split: str = "train",
    layout: str | None = None,
    target: Target = "match",
    per_class: bool = False,
    method: Method = "platt",
    most: int | None = MOST_IMAGES,
    device: str = "auto",
) -> Calibration:
    """Calibrate the scores of a weights file on a split of the data folder ``data``; write it to ``out``.

    By default the file itself is replaced. The training split is the usual choice, so that the validation split stays
    untouched. A calibrated file may be calibrated again. CannotCalibrateError if the scores cannot be calibrated; then
    nothing is written.
    """
    if out is None and not Path(weights).is_file():
        raise WeightsError(
            f"{weights}: expected a weights file to replace, got no such file; choose the file with --out"
        )
    setup = prepare_evaluation(weights, data, split=split, layout=layout, device=device)
    calibration = calibrate(setup.model, setup.images, target=target, per_class=per_class, method=method, most=most)
    save_weights(weights if out is None else out, setup.model.cpu(), setup.meta.calibrated(calibration))
    return calibration
