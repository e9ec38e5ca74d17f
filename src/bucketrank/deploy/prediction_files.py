"""Prediction on image files: writes the images with their detections drawn, and one JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faster_coco_eval.core import mask as rle_codec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from bucketrank.data.image_files import SUFFIXES, Pixels, read_image
from bucketrank.data.problems import DataError, counted
from bucketrank.deploy.prediction import as_tensor, predict
from bucketrank.deploy.prediction_folder import (
    DESCRIPTION,
    IMAGE_FOLDER,
    JSON_NAME,
    drawn_names,
    find_images,
    require_replaceable,
    save_drawing,
)
from bucketrank.deploy.scores_in_words import scores_in_words
from bucketrank.detectors import Detector
from bucketrank.devices import resolve_device
from bucketrank.drawing import draw
from bucketrank.evaluation.detection_records import coco_records
from bucketrank.model_files.atomic import write_text
from bucketrank.model_files.loading import load_model
from bucketrank.model_files.weights import Meta
from bucketrank.suggestions import printable

# Exceptions that a detector may raise for one image, such as lack of device memory.
FAILURES = (ArithmeticError, LookupError, MemoryError, RuntimeError, ValueError)


@dataclass
class Predictions:
    """All detections of a call, collected for one JSON document in COCO's format whose annotations have a score."""

    meta: Meta
    threshold: float
    images: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, drawn: str, size: tuple[int, int], detections: dict[str, Tensor]) -> None:
        """Add one image of ``size`` (height, width) and its detections."""
        image_id = len(self.images) + 1
        self.images.append({"id": image_id, "file_name": name, "drawn": drawn, "height": size[0], "width": size[1]})
        masks = "masks" in detections
        for record in coco_records(detections, image_id=image_id, categories=self.meta.category_ids, masks=masks):
            x, y, width, height = record["bbox"]
            record["bbox"] = [round(value, 3) for value in (x, y, width, height)]
            area = float(rle_codec.area(record["segmentation"])) if masks else width * height
            self.annotations.append(record | {"id": len(self.annotations) + 1, "area": round(area, 3), "iscrowd": 0})

    def document(self) -> dict[str, Any]:
        """Return the document to write as JSON."""
        categories = zip(self.meta.category_ids, self.meta.classes, strict=True)
        return {
            "info": {"description": DESCRIPTION, "threshold": self.threshold},
            "images": self.images,
            "categories": [{"id": category_id, "name": name} for category_id, name in categories],
            "annotations": self.annotations,
        }


def predict_files(
    weights: Path | str,
    sources: Sequence[Path],
    out: Path | str,
    *,
    threshold: float | None = None,
    device: str = "auto",
    batch_size: int = 1,
    console: Console | None = None,
) -> int:
    """Predict on image files and write the results to the folder ``out``; return the number of skipped files.

    ``sources`` are image files and folders; folders are searched recursively. ``out`` gets ``predictions.json`` and,
    in ``pictures/``, the images with their detections drawn. ``threshold`` is the minimum score to draw and write
    (default: the threshold stored with the weights). An image that cannot be read, or on which the detector fails, is
    reported and skipped. Raise DataError, before anything is written, if a source does not exist, or if ``out`` has
    files that would be overwritten and are not earlier predictions.

    Args:
        weights: weights file, folder of a run or of ``save_pretrained``, or a name on the hub.
        sources: image files and folders.
        out: folder for the results.
        threshold: minimum score to draw and write; by default the stored threshold.
        device: a torch device; auto is cuda if available.
        batch_size: images per batch.
        console: where progress is printed; by default the terminal.
    """
    if threshold is not None and not math.isfinite(threshold):
        raise DataError(f"threshold: expected a finite number, got {threshold}; scores are from 0 to 1")
    out = Path(out)
    console = console or Console()
    resolved = resolve_device(device)
    require_replaceable(out)
    files = find_images(sources, skip=out)
    model, meta = load_model(weights)
    min_score = meta.threshold if threshold is None else threshold
    if not files:
        listed = ", ".join(str(source) for source in sources)
        raise DataError(f"{listed}: expected images, found no file that ends in {', '.join(sorted(SUFFIXES))}")
    drawn = drawn_names([name for _, name in files])
    require_replaceable(out, drawn)
    (out / IMAGE_FOLDER).mkdir(parents=True, exist_ok=True)
    predictions = Predictions(meta, min_score)
    skipped = _predict_all(
        model, files, drawn, predictions, out, batch_size=batch_size, device=str(resolved), console=console
    )
    write_text(out / JSON_NAME, json.dumps(predictions.document(), indent=1) + "\n")

    if threshold is not None:
        source = "as given"
    else:
        source = "chosen on the validation set" if min_score else "the weights have no threshold"
    console.print(
        f"{counted(len(predictions.images), 'image')}, {counted(len(predictions.annotations), 'detection')} with a "
        f"score of at least {min_score:.3g} ({source})",
        highlight=False,
        soft_wrap=True,
    )
    console.print(scores_in_words(meta), highlight=False, soft_wrap=True)
    for path in (out / IMAGE_FOLDER, out / JSON_NAME):
        console.print(f"wrote {printable(path)}", highlight=False, markup=False, soft_wrap=True)
    if skipped:
        console.print(f"skipped {counted(skipped, 'file')}, listed above", style="bold red", highlight=False)
    return skipped


def _predict_all(
    model: Detector,
    files: Sequence[tuple[Path, str]],
    drawn: Sequence[str],
    predictions: Predictions,
    out: Path,
    *,
    batch_size: int,
    device: str,
    console: Console,
) -> int:
    """Predict batch by batch; return the number of files that were skipped."""
    skipped = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("predicting", total=len(files))
        for first in range(0, len(files), batch_size):
            batch = range(first, min(first + batch_size, len(files)))
            pixels = {number: _pixels_or_error(files[number][0]) for number in batch}
            images = {number: each for number, each in pixels.items() if not isinstance(each, DataError)}
            errors = [each for each in pixels.values() if isinstance(each, DataError)]
            results = _detections_or_errors(model, images, threshold=predictions.threshold, device=device)
            for number, detections in results.items():
                path, name = files[number]
                if isinstance(detections, DataError):
                    errors.append(DataError(f"{path}: {detections}"))
                    continue
                image = draw(images[number], detections, classes=predictions.meta.classes)
                save_drawing(image, out / drawn[number])
                predictions.add(name, drawn[number], images[number].shape[:2], detections)
            for error in errors:
                text = f"skipped: {printable(error)}"
                progress.console.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
            skipped += len(errors)
            progress.update(task, advance=len(batch))
    return skipped


def _detections_or_errors(
    model: Detector, images: dict[int, Pixels], *, threshold: float, device: str
) -> dict[int, dict[str, Tensor] | DataError]:
    """Return the detections of each image; if the batch fails, each image is tried alone."""
    try:
        tensors = [as_tensor(pixels) for pixels in images.values()]
        results = predict(model, tensors, threshold=threshold, batch_size=max(1, len(images)), device=device)
    except FAILURES as error:
        if len(images) == 1:
            (pixels,) = images.values()
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            text = f"the detector failed on this image of {pixels.shape[1]} x {pixels.shape[0]} pixels ({reason})"
            return dict.fromkeys(images, DataError(text))
        alone = [{number: pixels} for number, pixels in images.items()]
    else:
        return dict(zip(images, results, strict=True))
    return {
        number: result
        for image in alone
        for number, result in _detections_or_errors(model, image, threshold=threshold, device=device).items()
    }


def _pixels_or_error(path: Path) -> Pixels | DataError:
    try:
        return read_image(path, upright=True)
    except DataError as error:
        return error
