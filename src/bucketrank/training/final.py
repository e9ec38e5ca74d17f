"""The files written at the end of a run: calibrated weights, and validation images with detections."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from bucketrank.data import CocoDataset, eval_transform
from bucketrank.detectors import Detector
from bucketrank.errors import CannotCalibrateError, WeightsError
from bucketrank.evaluation.calibration import Calibration, calibrate
from bucketrank.settings.training import TrainerSettings
from bucketrank.training.batches import RunData
from bucketrank.training.log import say
from bucketrank.weights.atomic import write
from bucketrank.weights.files import Meta, read_weights, save_weights
from bucketrank.weights.load import load_model


def write_final_weights(
    detector: Detector,
    meta: Meta,
    data: RunData,
    folder: Path,
    *,
    settings: TrainerSettings,
    console: Console,
) -> Meta:
    """Calibrate the detector in place, write weights.safetensors, and calibrate best.safetensors.

    The scores are calibrated on training images with validation transforms, so validation metrics stay unbiased.
    Checkpoints hold the weights before calibration, and best.safetensors is calibrated only once: a run resumed here
    ends with the same files. If the scores cannot be calibrated, they stay as they are, and one line says why.
    """
    best = folder / "best.safetensors"
    if settings.calibrate:
        before = {name: tensor.clone() for name, tensor in detector.state_dict().items()}
        images = CocoDataset(data.train.split, transform=eval_transform())
        try:
            calibration = calibrate(detector, images, max_images=settings.calibration_images)
        except CannotCalibrateError as error:
            say(console, f"The scores are not calibrated: {str(error).removeprefix('calibrate: ')}")
        else:
            say(console, f"Calibrated the scores: {calibration}")
            meta = meta.calibrated(calibration)
            if best.is_file():
                _calibrate_best(best, before, detector, calibration, images, settings)
    save_weights(folder / "weights.safetensors", detector, meta)
    return meta


def read_final_weights(path: Path) -> tuple[Detector, Meta] | None:
    """Read the final weights of a finished run; return None if the file is missing or damaged."""
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
    """Calibrate the best weights; reuse the calibration if they equal the last weights."""
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
        return  # an early epoch may have too few correct detections
    save_weights(path, model, meta.calibrated(own))


@torch.no_grad()
def draw_validation_images(model: Detector, data: RunData, folder: Path, *, threshold: float, count: int) -> None:
    """Draw detections and ground truth on up to ``count`` images spread over the validation set; name files by id."""
    from bucketrank.drawing import draw

    images = data.val
    count = min(count, len(images))
    indices = [round(number * (len(images) - 1) / max(count - 1, 1)) for number in range(count)]
    model.eval()
    device = next(model.parameters()).device
    for index in indices:
        image, target = images[index]
        (detections,) = model([image.to(device)])
        result = {name: value.cpu() for name, value in detections.items()}
        drawn = draw(image, result, ground_truth=target, classes=data.classes, threshold=threshold)
        write(folder / f"{int(target['image_id'])}.jpg", partial(drawn.save, format="JPEG", quality=90))
