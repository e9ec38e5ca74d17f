"""The weights at the end of a run: calibrated on training images, with validation transforms."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from bucketrank.data import CocoDataset, eval_transform
from bucketrank.detectors import Detector
from bucketrank.errors import CannotCalibrateError, WeightsError
from bucketrank.evaluation.calibration import Calibration, calibrate
from bucketrank.settings.training import TrainerSettings
from bucketrank.training.data_module import DataModule
from bucketrank.weights.files import Meta, read_weights, save_weights
from bucketrank.weights.load import load_model


def write_final_weights(
    detector: Detector,
    meta: Meta,
    data_module: DataModule,
    folder: Path,
    *,
    settings: TrainerSettings,
    console: Console,
) -> Meta:
    """Calibrate the detector in place, write weights.safetensors, and calibrate best.safetensors.

    The validation images stay untouched: what they measure was not fitted on them. Checkpoints hold the weights before
    calibration, and best.safetensors is calibrated once, so that a run resumed here ends with the same files. Scores
    that cannot be calibrated stay as they are, and one line says why.
    """
    best = folder / "best.safetensors"
    if settings.calibrate:
        before = {name: tensor.clone() for name, tensor in detector.state_dict().items()}
        images = CocoDataset(data_module.train.split, transform=eval_transform())
        try:
            calibration = calibrate(detector, images, max_images=settings.calibration_images)
        except CannotCalibrateError as error:
            _say(console, f"The scores are not calibrated: {str(error).removeprefix('calibrate: ')}")
        else:
            _say(console, f"Calibrated the scores: {calibration}")
            meta = meta.calibrated(calibration)
            if best.is_file():
                _calibrate_best(best, before, detector, calibration, images, settings)
    save_weights(folder / "weights.safetensors", detector, meta)
    return meta


def read_final_weights(path: Path) -> tuple[Detector, Meta] | None:
    """Return the detector that a finished run wrote, perhaps calibrated again since; None if missing or damaged."""
    if not path.is_file():
        return None
    try:
        return load_model(path)
    except WeightsError:
        return None


def _calibrate_best(
    path: Path,
    last: dict[str, Tensor],
    detector: Detector,
    calibration: Calibration,
    images: CocoDataset,
    settings: TrainerSettings,
) -> None:
    """Calibrate the weights of the best epoch; those of the last epoch need no second fit."""
    state, meta = read_weights(path)
    if meta.calibration is not None:
        return
    if all(torch.equal(tensor, last[name].cpu()) for name, tensor in state.items()):
        save_weights(path, detector, meta.calibrated(calibration))
        return
    model, _ = load_model(path)
    model.to(next(detector.parameters()).device)
    try:
        own = calibrate(model, images, max_images=settings.calibration_images)
    except CannotCalibrateError:
        return  # an early epoch may have too few right detections
    save_weights(path, model, meta.calibrated(own))


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
