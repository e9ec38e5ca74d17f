"""Predict: detections in images from Python, and in image files with drawings and one JSON file as the result."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as rle_codec
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from torch import Tensor, nn

from bucketrank.data.annotations import path_inside
from bucketrank.data.images import BROKEN, SUFFIXES, Pixels, read_image, rgb8
from bucketrank.data.problems import counted
from bucketrank.detectors import Detector
from bucketrank.devices import resolve_device
from bucketrank.drawing import draw
from bucketrank.errors import DataError, first_line, printable
from bucketrank.evaluation.evaluator import coco_records
from bucketrank.inference.detections import Detections
from bucketrank.output import progress_bar, say
from bucketrank.weights.atomic import MAX_NAME_BYTES, TEMPORARY, shortened, write, write_text
from bucketrank.weights.files import Meta, describe_scores
from bucketrank.weights.load import load_model

ImageInput = str | Path | Image.Image | NDArray[np.uint8] | Tensor

JSON_NAME = "predictions.json"
IMAGE_FOLDER = "pictures"
DESCRIPTION = "detections by bucketrank predict"  # marks predictions.json and, as a comment, every drawn JPEG file
JPEG_QUALITY = 92
MAX_FLOAT = 1.5  # bicubic resizing leaves the range from 0 to 1 a little; more is another range of values
MAX_JPEG_SIDE = 65_500  # pixels; the encoder refuses more
# Exceptions that a detector may raise for one image, such as lack of device memory.
FAILURES = (ArithmeticError, LookupError, MemoryError, RuntimeError, ValueError)


def predict(
    model: nn.Module,
    images: ImageInput | Iterable[ImageInput],
    *,
    threshold: float | None = None,
    batch_size: int = 1,
    device: str = "auto",
) -> list[Detections]:
    """Detect objects in each image; the detections are sorted by score and are tensors on the CPU.

    ``images`` is one image or several; the result is a list in either case. An image is a file name, a PIL image, an
    array (H, W, 3) of uint8, or a tensor (3, H, W) of uint8 or of floats from 0 to 1. ``threshold`` is the minimum
    score to report. By default it is the threshold stored with the weights, which ``load_model`` sets on the model with
    the class names; a model that was not loaded from a weights file reports all detections, without names. The
    detector ``model`` is moved to ``device`` (auto: cuda if available, else cpu), stays there, and takes
    ``batch_size`` images at a time.

    >>> from bucketrank.detectors import build
    >>> small = {"channels": 32, "min_size": 96, "max_size": 128}
    >>> model = build("atss", num_classes=3, backbone="test_resnet", **small)
    >>> # An untrained detector finds 100 detections with low scores in every image.
    >>> (detections,) = predict(model, torch.zeros(3, 80, 100))
    >>> {name: tuple(value.shape) for name, value in detections.items()}
    {'boxes': (100, 4), 'scores': (100,), 'labels': (100,)}
    """
    if batch_size < 1:
        raise ValueError(f"predict: expected a batch_size of at least 1, got {batch_size}")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"predict: expected a threshold from 0 to 1, got {threshold}")
    min_score = float(getattr(model, "stored_threshold", 0.0)) if threshold is None else threshold
    resolved = resolve_device(device)
    was_training = model.training
    model.to(resolved).eval()
    predictions: list[Detections] = []
    classes = getattr(model, "stored_classes", ())
    try:
        with torch.inference_mode():
            for batch in _batches(as_several(images), batch_size):
                detections = model([as_tensor(image).to(resolved) for image in batch])
                predictions += [Detections(_at_least(each, min_score), classes) for each in detections]
    finally:
        model.train(was_training)
    return predictions


def as_tensor(image: ImageInput) -> Tensor:
    """Convert an image to a detector input: a tensor (3, H, W) of floats from 0 to 1.

    The EXIF orientation of a file is applied, so that photographs are upright.
    """
    if isinstance(image, str | Path):
        if Path(image).is_dir() or not Path(image).exists():
            got = "a folder; list its files" if Path(image).is_dir() else "no such file; correct the path"
            raise DataError(f"{image}: expected an image file, got {got}")
        image = read_image(Path(image), upright=True)
    if isinstance(image, Image.Image):
        image = rgb8(image)
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise ValueError(f"predict: expected an array (H, W, 3) of uint8, got {image.shape} of {image.dtype}")
        image = torch.from_numpy(np.ascontiguousarray(image).copy()).permute(2, 0, 1)
    if not isinstance(image, Tensor):
        raise _not_an_image(image)
    if not image.numel():
        raise ValueError(f"predict: expected an image with pixels, got shape {tuple(image.shape)}")
    if image.is_floating_point():
        lowest, highest = (float(each) for each in image.aminmax())
        if not highest <= MAX_FLOAT:  # also refuses NaN
            raise ValueError(f"predict: expected floats from 0 to 1, got {highest:g}; divide values up to 255 by 255")
        if lowest < 1 - MAX_FLOAT:
            raise ValueError(f"predict: expected floats from 0 to 1, got {lowest:g}; do not normalise the image")
        return image.float()
    if image.dtype != torch.uint8:
        raise ValueError(
            f"predict: expected a tensor (3, H, W) of uint8 or of floats from 0 to 1, got {image.dtype}; "
            "convert values from 0 to 255 with image.to(torch.uint8)"
        )
    return image.float() / 255


def as_several(images: ImageInput | Iterable[ImageInput]) -> Iterable[ImageInput]:
    """Return one image as a list; arrays and tensors of several images have four dimensions."""
    if isinstance(images, str | Path | Image.Image):
        return [images]
    if isinstance(images, np.ndarray | Tensor):
        return list(images) if images.ndim == 4 else [images]
    if not isinstance(images, Iterable) or isinstance(images, bytes | Mapping):
        raise _not_an_image(images)
    return images


def _not_an_image(value: object) -> TypeError:
    return TypeError(f"predict: expected a file name, PIL image, array or tensor, got {type(value).__name__}")


def _batches(images: Iterable[ImageInput], size: int) -> Iterator[list[ImageInput]]:
    remaining = iter(images)
    while batch := list(islice(remaining, size)):
        yield batch


def _at_least(detections: dict[str, Tensor], threshold: float) -> dict[str, Tensor]:
    kept = detections["scores"] >= threshold
    return {name: values[kept].cpu() for name, values in detections.items()}


def find_images(sources: Iterable[Path], *, skip: Path) -> list[tuple[Path, str]]:
    """List the image files among ``sources`` and in their folders, each with a unique name for the results.

    The name is the path relative to the source folder or, if there are several sources, to their common parent folder.
    Each file is listed once. Files in ``skip``, the output folder, are left out. Raises DataError if a source does not
    exist.
    """
    skipped = skip.resolve()
    sources = list(sources)
    for source in sources:
        if not source.exists():
            raise DataError(
                f"{source}: expected an image or a folder of images, got no such file or folder; correct the path"
            )
    bases = [os.path.abspath(source if source.is_dir() else source.parent) for source in sources]  # noqa: PTH100
    base = os.path.commonpath(bases) if bases else ""
    files: dict[Path, tuple[Path, str]] = {}
    for source in sources:
        if source.is_dir():
            paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        else:
            paths = [source]
        for path in paths:
            resolved = path.resolve()
            if not resolved.is_relative_to(skipped):
                files.setdefault(resolved, (path, Path(os.path.relpath(path, base)).as_posix()))
    return list(files.values())


def drawn_names(names: Sequence[str]) -> list[str]:
    """Choose a unique path below pictures/, ending in .jpg, for the drawn image of each name.

    Names that differ only in case count as equal, because some file systems do not distinguish them. A name that is too
    long for a file system is shortened.

    >>> drawn_names(["a/cat.png", "b/cat.png", "a/cat.JPG"])
    ['pictures/a/cat.jpg', 'pictures/b/cat.jpg', 'pictures/a/cat-2.jpg']
    """
    # A folder may have the name of a file: cat.jpg/1.png next to cat.png.
    taken = {str(parent).lower() for name in names for parent in PurePosixPath(name).parents}
    drawn = []
    for name in names:
        number = 1
        while (chosen := _drawn_name(name, number)).lower() in taken:
            number += 1
        taken.add(chosen.lower())
        drawn.append(f"{IMAGE_FOLDER}/{chosen}")
    return drawn


def _drawn_name(name: str, number: int) -> str:
    path = PurePosixPath(name)
    suffix = f"{'' if number == 1 else f'-{number}'}.jpg"
    return path.with_name(shortened(path.stem, MAX_NAME_BYTES - len(suffix)) + suffix).as_posix()


def require_replaceable(out: Path, drawn: Iterable[str] = ()) -> None:
    """Raise DataError if a file in ``out`` that ``bucketrank predict`` did not write would be overwritten.

    The folder must be new or empty, or hold earlier predictions, complete or interrupted. ``drawn`` are the images to
    write, relative to ``out``.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out}: expected a folder, got a file; choose a new folder with --out")
    document = out / JSON_NAME
    if os.path.lexists(document):
        if not _is_our_document(document):
            raise DataError(f"{document}: was not written by bucketrank predict; choose a new folder with --out")
    elif any(path.name != IMAGE_FOLDER and not _is_temporary(path) for path in out.iterdir()) or not all(
        _is_temporary(path) or _is_our_drawing(path) for path in (out / IMAGE_FOLDER).rglob("*") if not path.is_dir()
    ):
        raise DataError(f"{out}: already exists and holds no predictions; choose a new folder with --out")
    for name in drawn:
        require_our_drawing(out / name)


def require_our_drawing(path: Path) -> None:
    """Raise DataError if the file exists and :func:`save_drawing` did not write it."""
    if os.path.lexists(path) and not _is_our_drawing(path):
        raise DataError(f"{path}: was not written by bucketrank predict; choose a new folder with --out")


def save_drawing(image: Image.Image, path: Path) -> None:
    """Write a drawn image as JPEG, atomically, with the comment that marks it as ours."""
    if max(image.size) > MAX_JPEG_SIDE:
        scale = MAX_JPEG_SIDE / max(image.size)
        image = image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))
    # Encode in memory: on a full disk, Pillow's error is only "encoder error -2".
    content = io.BytesIO()
    image.save(content, format="JPEG", quality=JPEG_QUALITY, comment=DESCRIPTION)
    write(path, lambda temporary: temporary.write_bytes(content.getbuffer()))


def _is_our_document(path: Path) -> bool:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return False
    info = document.get("info") if isinstance(document, dict) else None
    return isinstance(info, dict) and info.get("description") == DESCRIPTION


def _is_temporary(path: Path) -> bool:
    """Return whether another call is writing this file, or a killed call left it."""
    return TEMPORARY.fullmatch(path.name) is not None and not path.is_symlink()


def _is_our_drawing(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with Image.open(path, formats=["JPEG"]) as image:
            return image.info.get("comment") == DESCRIPTION.encode()
    except BROKEN:
        return False


@dataclass
class Predictions:
    """All detections of a call, collected for one JSON document in COCO format whose annotations have a score."""

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
        """Build the JSON document."""
        categories = zip(self.meta.category_ids, self.meta.classes, strict=True)
        return {
            "info": {"description": DESCRIPTION, "threshold": self.threshold},
            "images": self.images,
            "categories": [{"id": category_id, "name": name} for category_id, name in categories],
            "annotations": self.annotations,
        }


def predict_files(
    weights: Path | str,
    sources: Sequence[Path | str],
    out: Path | str,
    *,
    threshold: float | None = None,
    device: str = "auto",
    batch_size: int = 1,
) -> int:
    """Predict on image files and write the results to the folder ``out``; return the number of skipped files.

    ``weights`` is a weights file, a run folder, a ``save_pretrained`` folder, or a hub repository. ``sources`` are
    image files and folders; folders are searched recursively. ``out`` gets ``predictions.json`` and, in ``pictures/``,
    the images with their detections drawn. ``threshold`` is the minimum score to draw and write (default: the threshold
    stored with the weights); ``device`` and ``batch_size`` are those of :func:`predict`. An image that cannot be read,
    or on which the detector fails, is reported and skipped. Raises DataError, before anything is written, if a source
    does not exist, or if ``out`` has files that would be overwritten and are not earlier predictions.
    """
    if threshold is not None and not 0 <= threshold <= 1:
        raise DataError(f"threshold: expected a score from 0 to 1, got {threshold}")
    if batch_size < 1:
        raise ValueError(f"predict_files: expected a batch_size of at least 1, got {batch_size}")
    out = Path(out)
    console = Console()
    resolve_device(device)
    require_replaceable(out)
    files = find_images([Path(source) for source in sources], skip=out)
    model, meta = load_model(weights)
    min_score = meta.threshold if threshold is None else threshold
    if not files:
        listed = ", ".join(str(source) for source in sources)
        raise DataError(f"{listed}: expected images, found no file that ends in {', '.join(sorted(SUFFIXES))}")
    drawn = drawn_names([name for _, name in files])
    require_replaceable(out, drawn)
    (out / IMAGE_FOLDER).mkdir(parents=True, exist_ok=True)
    stale = _drawn_before(out) - set(drawn)
    predictions = Predictions(meta, min_score)
    skipped = _predict_all(model, files, drawn, predictions, out, batch_size=batch_size, device=device, console=console)
    write_text(out / JSON_NAME, json.dumps(predictions.document(), indent=1) + "\n")
    for name in stale:
        if _is_our_drawing(out / name):
            (out / name).unlink()

    if threshold is not None:
        source = "as given"
    else:
        source = "chosen on the validation set" if min_score else "the weights have no threshold"
    summary = f"{counted(len(predictions.images), 'image')}, {counted(len(predictions.annotations), 'detection')}"
    say(console, f"{summary} with a score of at least {min_score:.3g} ({source})\n{describe_scores(meta)}")
    for path in (out / IMAGE_FOLDER, out / JSON_NAME):
        say(console, f"wrote {printable(path)}")
    if skipped:
        say(console, f"skipped {counted(skipped, 'file')}, listed above", style="bold red")
    return skipped


def _drawn_before(out: Path) -> set[str]:
    """Return the drawings that earlier predictions in ``out`` list; those of other images do not belong to new ones."""
    try:
        images = json.loads((out / JSON_NAME).read_text(encoding="utf-8"))["images"]
        return {str(path_inside(image["drawn"])) for image in images}
    except (DataError, FileNotFoundError, KeyError, RecursionError, TypeError, ValueError):
        return set()


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
    with progress_bar(console) as progress:
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
                say(progress.console, f"skipped: {printable(error)}", style="red")
            skipped += len(errors)
            progress.update(task, advance=len(batch))
    return skipped


def _detections_or_errors(
    model: Detector, images: dict[int, Pixels], *, threshold: float, device: str
) -> dict[int, Detections | DataError]:
    """Detect in a batch; if it fails, try each image separately."""
    batch = list(images.values())
    try:
        results = predict(model, batch, threshold=threshold, batch_size=max(1, len(batch)), device=device)
        return dict(zip(images, results, strict=True))
    except FAILURES as error:
        if len(images) == 1:
            (pixels,) = batch
            size = f"{pixels.shape[1]} x {pixels.shape[0]} pixels"
            text = f"the detector failed on this image of {size} ({first_line(error)})"
            return dict.fromkeys(images, DataError(text))
    separate: dict[int, Detections | DataError] = {}
    for number, pixels in images.items():
        separate |= _detections_or_errors(model, {number: pixels}, threshold=threshold, device=device)
    return separate


def _pixels_or_error(path: Path) -> Pixels | DataError:
    try:
        return read_image(path, upright=True)
    except DataError as error:
        return error
