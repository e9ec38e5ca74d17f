"""Calibrate a weights file: read it, fit, fold, and write it with the calibration in its description."""

from __future__ import annotations

from pathlib import Path

from bucketrank.calibration import Calibration, calibrate
from bucketrank.calibration.calibrate_model import MOST_IMAGES
from bucketrank.calibration.calibration_result import Method, Target
from bucketrank.deploy.weights_evaluation import prepare_evaluation
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

    Args:
        weights: weights file, folder of a run or of ``save_pretrained``, or a name on the hub.
        data: folder of the data set.
        out: the file to write; by default the weights file is replaced.
        split: images to fit on: ``"train"`` or ``"val"``.
        layout: layout of the data folder; by default the first that fits.
        target: ``"match"``, the probability of an IoU of at least 0.5 with an object, or ``"iou"``, the expected IoU.
        per_class: fit each class on its own.
        method: ``"platt"`` for sigmoid scores, ``"temperature"`` for a softmax.
        most: maximum number of images; None for all.
        device: a torch device; auto is cuda if available.
    """
    if out is None and not Path(weights).is_file():
        raise WeightsError(
            f"{weights}: expected a weights file to replace, got no such file; choose the file with --out"
        )
    setup = prepare_evaluation(weights, data, split=split, layout=layout, device=device)
    calibration = calibrate(setup.model, setup.images, target=target, per_class=per_class, method=method, most=most)
    save_weights(weights if out is None else out, setup.model.cpu(), setup.meta.calibrated(calibration))
    return calibration
