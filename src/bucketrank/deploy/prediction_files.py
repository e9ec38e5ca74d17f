"""Prediction on image files: writes the images with their detections drawn, and one JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from bucketrank.data.image_files import SUFFIXES, Pixels, read_image
from bucketrank.data.problems import DataError, counted
from bucketrank.deploy.prediction import as_tensor, predict
from bucketrank.detectors import Detector
from bucketrank.devices import resolve_device
from bucketrank.drawing import draw
from bucketrank.evaluation.coco_records import coco_records
from bucketrank.model_files.loading import load_model
from bucketrank.model_files.weights import Meta

JSON_NAME = "predictions.json"
IMAGE_FOLDER = "pictures"
JPEG_QUALITY = 92


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
            extra = {"id": len(self.annotations) + 1, "area": round(width * height, 3), "iscrowd": 0}
            self.annotations.append(record | extra)

    def document(self) -> dict[str, Any]:
        """Return the document to write as JSON."""
        categories = zip(self.meta.category_ids, self.meta.classes, strict=True)
        return {
            "info": {"description": "detections by bucketrank predict", "threshold": self.threshold},
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
    """Predict on image files and write the results to the folder ``out``; return the number of unreadable files.

    ``sources`` are image files and folders; folders are searched recursively. ``out`` gets ``predictions.json`` and,
    in ``pictures/``, the images with their detections drawn. ``threshold`` is the minimum score to draw and write
    (default: the threshold stored with the weights). A file that cannot be read is reported and skipped.
    """
    out = Path(out)
    console = console or Console()
    resolved = resolve_device(device)
    require_replaceable(out)
    model, meta = load_model(weights)
    min_score = meta.threshold if threshold is None else threshold
    files = find_images(sources, skip=out)
    if not files:
        listed = ", ".join(str(source) for source in sources)
        raise DataError(f"{listed}: expected images, found no file that ends in {', '.join(sorted(SUFFIXES))}")
    (out / IMAGE_FOLDER).mkdir(parents=True, exist_ok=True)
    predictions = Predictions(meta, min_score)
    unreadable = _predict_all(
        model, files, predictions, out, batch_size=batch_size, device=str(resolved), console=console
    )
    (out / JSON_NAME).write_text(json.dumps(predictions.document(), indent=1) + "\n", encoding="utf-8")

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
    for path in (out / IMAGE_FOLDER, out / JSON_NAME):
        console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    if unreadable:
        console.print(f"{counted(unreadable, 'file')} could not be read", style="bold red", highlight=False)
    return unreadable


def find_images(sources: Iterable[Path], *, skip: Path) -> list[tuple[Path, str]]:
    """Return the image files among ``sources`` and below its folders, each with the name to report it by.

    Each file is listed once. Files in ``skip``, the folder to write to, are not listed.
    """
    skipped = skip.resolve()
    files: dict[Path, tuple[Path, str]] = {}
    for source in sources:
        if source.is_dir():
            below = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
            pairs = [(path, path.relative_to(source).as_posix()) for path in below]
        else:
            pairs = [(source, source.name)]
        for path, name in pairs:
            resolved = path.resolve()
            if not resolved.is_relative_to(skipped):
                files.setdefault(resolved, (path, name))
    return list(files.values())


def require_replaceable(out: Path) -> None:
    """Raise DataError unless the folder to write to is new, empty or holds earlier predictions."""
    if out.exists() and not (out.is_dir() and ((out / JSON_NAME).is_file() or not any(out.iterdir()))):
        raise DataError(f"{out}: already exists and holds no predictions; choose a new folder with --out")


def free_name(name: str, taken: set[str]) -> str:
    """Return a name for the drawn image of ``name`` that is not in ``taken``, and add it there.

    Names that differ only in upper and lower case count as equal: some file systems do not tell them apart.

    >>> taken: set[str] = set()
    >>> [free_name(name, taken) for name in ("a/cat.png", "b/cat.png", "a/cat.JPG")]
    ['a/cat.jpg', 'b/cat.jpg', 'a/cat-2.jpg']
    """
    stem = Path(name).with_suffix("").as_posix()
    number = 1
    while (chosen := f"{stem}{'' if number == 1 else f'-{number}'}.jpg").lower() in taken:
        number += 1
    taken.add(chosen.lower())
    return chosen


def _predict_all(
    model: Detector,
    files: Sequence[tuple[Path, str]],
    predictions: Predictions,
    out: Path,
    *,
    batch_size: int,
    device: str,
    console: Console,
) -> int:
    unreadable = 0
    taken: set[str] = set()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("predicting", total=len(files))
        for first in range(0, len(files), batch_size):
            batch = files[first : first + batch_size]
            contents = [(name, _pixels_or_error(path)) for path, name in batch]
            images = [(name, pixels) for name, pixels in contents if not isinstance(pixels, DataError)]
            for error in [pixels for _, pixels in contents if isinstance(pixels, DataError)]:
                unreadable += 1
                progress.console.print(f"skipped: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
            results = predict(
                model,
                [as_tensor(pixels) for _, pixels in images],
                threshold=predictions.threshold,
                batch_size=batch_size,
                device=device,
            )
            for (name, pixels), detections in zip(images, results, strict=True):
                drawn = f"{IMAGE_FOLDER}/{free_name(name, taken)}"
                (out / drawn).parent.mkdir(parents=True, exist_ok=True)
                draw(pixels, detections, classes=predictions.meta.classes).save(out / drawn, quality=JPEG_QUALITY)
                predictions.add(name, drawn, pixels.shape[:2], detections)
            progress.update(task, advance=len(batch))
    return unreadable


def _pixels_or_error(path: Path) -> Pixels | DataError:
    try:
        return read_image(path, upright=True)
    except DataError as error:
        return error
