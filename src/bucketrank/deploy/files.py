"""The command ``predict``: from picture files to drawn pictures and one JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from bucketrank.data.image_files import SUFFIXES, Pixels, read_image
from bucketrank.data.problems import DataError, counted
from bucketrank.deploy.prediction import as_tensor, predict
from bucketrank.detectors import Detector
from bucketrank.drawing import draw
from bucketrank.evaluation import coco_records
from bucketrank.training.weights import Meta, load_model

JSON = "predictions.json"
PICTURES = "pictures"
QUALITY = 92  # of the JPEGs


@dataclass
class Predictions:
    """What was found, as a document in COCO's format whose annotations have a score."""

    meta: Meta
    threshold: float
    images: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, drawn: str, size: tuple[int, int], found: dict[str, Tensor]) -> None:
        """One image of (height, width) and its detections."""
        number = len(self.images) + 1
        self.images.append({"id": number, "file_name": name, "drawn": drawn, "height": size[0], "width": size[1]})
        masks = "masks" in found
        for record in coco_records(found, image_id=number, categories=self.meta.category_ids, masks=masks):
            x, y, width, height = record["bbox"]
            record["bbox"] = [round(value, 3) for value in (x, y, width, height)]
            extra = {"id": len(self.annotations) + 1, "area": round(width * height, 3), "iscrowd": 0}
            self.annotations.append(record | extra)

    def document(self) -> dict[str, Any]:
        """Ready for JSON."""
        categories = zip(self.meta.category_ids, self.meta.classes, strict=True)
        return {
            "info": {"description": "detections by bucketrank predict", "threshold": self.threshold},
            "images": self.images,
            "categories": [{"id": number, "name": name} for number, name in categories],
            "annotations": self.annotations,
        }


def predict_files(
    weights: Path | str,
    sources: Sequence[Path],
    out: Path | str,
    *,
    threshold: float | None = None,
    device: str | None = None,
    batch: int = 1,
    console: Console | None = None,
) -> int:
    """Predict on the pictures among ``sources``, folders read with all below them, and write to the folder ``out``.

    ``out`` gets ``predictions.json`` and, in ``pictures/``, the drawn pictures. Detections from ``threshold`` on are
    drawn and written; None takes the one stored with the weights. A file that cannot be read is reported and left out.
    Returns how many these were.
    """
    out = Path(out)
    console = console or Console()
    refuse_foreign(out)
    model, meta = load_model(weights)
    limit = meta.threshold if threshold is None else threshold
    files = find_pictures(sources, leave_out=out)
    if not files:
        listed = ", ".join(str(source) for source in sources)
        raise DataError(f"{listed}: no pictures found; looked for files ending in {', '.join(sorted(SUFFIXES))}")
    (out / PICTURES).mkdir(parents=True, exist_ok=True)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    predictions = Predictions(meta, limit)
    failed = _run(model, files, predictions, out, batch=batch, console=console)
    (out / JSON).write_text(json.dumps(predictions.document(), indent=1) + "\n", encoding="utf-8")

    chosen = "given" if threshold is not None else "chosen on the validation set" if limit else "none was chosen"
    console.print(
        f"{counted(len(predictions.images), 'picture')}, {counted(len(predictions.annotations), 'detection')} with a "
        f"score of at least {limit:.3g} ({chosen})",
        highlight=False,
        soft_wrap=True,
    )
    for path in (out / PICTURES, out / JSON):
        console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    if failed:
        console.print(f"{counted(failed, 'file')} could not be read", style="bold red", highlight=False)
    return failed


def find_pictures(sources: Iterable[Path], *, leave_out: Path) -> list[tuple[Path, str]]:
    """The files and the names to report them by: those given, and those with a picture's suffix below a folder.

    Each file comes once; what lies in ``leave_out``, the folder to write to, is not read.
    """
    written = leave_out.resolve()
    found: dict[Path, tuple[Path, str]] = {}
    for source in sources:
        if source.is_dir():
            below = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
            pairs = [(path, path.relative_to(source).as_posix()) for path in below]
        else:
            pairs = [(source, source.name)]
        for path, name in pairs:
            place = path.resolve()
            if not place.is_relative_to(written):
                found.setdefault(place, (path, name))
    return list(found.values())


def refuse_foreign(out: Path) -> None:
    """Raise if the folder to write to holds something else than earlier predictions."""
    if out.exists() and not (out.is_dir() and ((out / JSON).is_file() or not any(out.iterdir()))):
        raise DataError(f"{out}: is there already and holds no predictions; give a new folder by --out")


def free_name(name: str, taken: set[str]) -> str:
    """The name of the drawn picture of ``name``, another than those taken, whatever the case of its letters.

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


def _run(
    model: Detector,
    files: Sequence[tuple[Path, str]],
    predictions: Predictions,
    out: Path,
    *,
    batch: int,
    console: Console,
) -> int:
    failed = 0
    taken: set[str] = set()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("predicting", total=len(files))
        for first in range(0, len(files), batch):
            part = files[first : first + batch]
            read = [(name, _read(path)) for path, name in part]
            group = [(name, pixels) for name, pixels in read if not isinstance(pixels, DataError)]
            for error in [pixels for _, pixels in read if isinstance(pixels, DataError)]:
                failed += 1
                progress.console.print(f"left out: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
            images = [as_tensor(pixels) for _, pixels in group]
            detections = predict(model, images, threshold=predictions.threshold, batch=batch)
            for (name, pixels), found in zip(group, detections, strict=True):
                drawn = f"{PICTURES}/{free_name(name, taken)}"
                (out / drawn).parent.mkdir(parents=True, exist_ok=True)
                draw(pixels, found, classes=predictions.meta.classes).save(out / drawn, quality=QUALITY)
                predictions.add(name, drawn, pixels.shape[:2], found)
            progress.update(task, advance=len(part))
    return failed


def _read(path: Path) -> Pixels | DataError:
    try:
        return read_image(path, upright=True)
    except DataError as error:
        return error
