"""Commands for trained detectors: eval, predict, calibrate, export, report and convert-weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from bucketrank.cli.arguments import require, require_device, require_min, say_next
from bucketrank.errors import UsageError, printable
from bucketrank.settings.choices import MAX_PIXELS, CalibrationMethod, CalibrationTarget, LayoutName

Weights = Annotated[Path, "weights file, folder of a run or of save_pretrained, or owner/name on the hub"]
Data = Annotated[Path | None, "folder of the data set (default: the one the run was trained on)"]
DataLayout = Annotated[
    LayoutName | None, "layout of the data folder (default: that of the run without DATA, else the one that fits)"
]
Device = Annotated[str, "a torch device, like cpu or cuda:0; auto is cuda if available"]
First = Annotated[int | None, "evaluate only the first N images"]
Batch = Annotated[int, "images per batch"]


def evaluate(
    weights: Weights,
    data: Data = None,
    *,
    split: Annotated[Literal["val", "train", "test"], "images to evaluate on"] = "val",
    layout: DataLayout = None,
    batch: Batch = 1,
    workers: Annotated[int, "data-loading workers"] = 0,
    device: Device = "auto",
    max_images: First = None,
    detections: Annotated[Path | None, "file for the detections, in COCO result format"] = None,
    given_boxes: Annotated[bool, "Mask R-CNN: also evaluate its masks in the ground-truth boxes"] = False,
) -> None:
    """Evaluate a trained detector on a data set: AP by COCO or LVIS rules."""
    from rich.console import Console

    from bucketrank.inference.evaluation import evaluate, print_evaluation

    require_min("--batch", batch, 1)
    require_min("--workers", workers, 0)
    require_min("--max-images", max_images, 1)
    require_device(device)
    chosen = _choose_data(weights, data, layout)
    evaluation = evaluate(
        weights,
        chosen.folder,
        split=split,
        layout=chosen.layout,
        holdout=chosen.holdout,
        batch_size=batch,
        workers=workers,
        device=device,
        max_images=max_images,
        detections=detections,
        given_boxes=given_boxes,
    )
    print_evaluation(Console(), evaluation)
    run = _run_folder(weights)
    say_next(*(["export", weights] if run is None else ["report", run]))


def _run_folder(weights: Path) -> Path | None:
    """Return the run folder that holds the weights; None if they are somewhere else."""
    folder = weights if weights.is_dir() else weights.parent
    return folder if (folder / "recipe.yaml").is_file() else None


class _ChosenData(NamedTuple):
    folder: Path
    layout: LayoutName | None
    holdout: float | None


def _choose_data(weights: Path, data: Path | None, layout: LayoutName | None) -> _ChosenData:
    """Return the data set that the user names or, without one, that of the run, with its layout and its hold-out."""
    from bucketrank.settings import load_recipe
    from bucketrank.training.folder import stored_data_folder
    from bucketrank.weights.files import find_weights

    if data is not None:
        return _ChosenData(data, layout, None)
    run = _run_folder(weights)
    stored = None if run is None else stored_data_folder(run)
    if not weights.exists():
        raise UsageError(
            f"{weights}: expected a run folder or a weights file, got no such file or folder; for a detector on the "
            "hub, also give the data set, as --data"
        )
    if run is None or stored is None:
        if weights.is_dir():
            find_weights(weights)  # raises if there are none
        raise UsageError(
            f"{weights}: expected the folder of the data set after it, or as --data, because it is not in a run folder"
        )
    settings = load_recipe(run / "recipe.yaml").data
    return _ChosenData(stored, layout or settings.chosen_layout, settings.holdout)


def predict(
    weights: Weights,
    images: Annotated[list[Path], "image files, or folders that are searched recursively"],
    *,
    out: Annotated[Path, "folder for the drawn images and predictions.json"] = Path("predictions"),
    threshold: Annotated[
        float | None, "minimum score to report (default: the threshold stored with the weights)"
    ] = None,
    device: Device = "auto",
    batch: Batch = 1,
) -> int:
    """Detect objects in images: draw them and write them as JSON (exit status 1 if an image was skipped)."""
    from bucketrank.inference.prediction import predict_files

    require_min("--batch", batch, 1)
    if threshold is not None and not 0 <= threshold <= 1:
        raise UsageError(f"--threshold: expected a score from 0 to 1, got {threshold:g}")
    require_device(device)
    skipped = predict_files(weights, images, out, threshold=threshold, device=device, batch_size=batch)
    if not skipped:
        say_next("export", weights)
    return int(skipped > 0)


def calibrate(
    weights: Annotated[Path, "folder of a run, or its weights.safetensors"],
    data: Data = None,
    *,
    out: Annotated[Path | None, "the file to write (default: replace WEIGHTS)"] = None,
    split: Annotated[Literal["train", "val"], "images to fit on"] = "train",
    layout: DataLayout = None,
    target: Annotated[CalibrationTarget, "match: probability of an IoU of at least 0.5; iou: expected IoU"] = "match",
    per_class: Annotated[bool, "fit each class on its own"] = False,
    method: Annotated[
        CalibrationMethod, "platt for sigmoid scores; temperature for a softmax, may change the order"
    ] = "platt",
    max_images: Annotated[int, "maximum number of images"] = 500,
    device: Device = "auto",
) -> None:
    """Turn the scores of a detector into probabilities, without changing their order or AP."""
    from rich.console import Console

    from bucketrank.inference.evaluation import calibrate_weights
    from bucketrank.output import say
    from bucketrank.weights.files import find_weights

    require_min("--max-images", max_images, 1)
    if per_class and method == "temperature":
        raise UsageError("--per-class: expected --method platt, got temperature, which classes share")
    require_device(device)
    chosen = _choose_data(weights, data, layout)
    calibration = calibrate_weights(
        weights,
        chosen.folder,
        out,
        split=split,
        layout=chosen.layout,
        holdout=chosen.holdout,
        target=target,
        per_class=per_class,
        method=method,
        max_images=max_images,
        device=device,
    )
    say(Console(), printable(f"{calibration}\nwrote {out or find_weights(weights)}"))
    say_next("eval", out or weights, *([] if data is None and out is None else [chosen.folder]))


def export(
    weights: Weights,
    *,
    out: Annotated[Path, "the file to write"] = Path("model.onnx"),
    size: Annotated[
        str | None, "HEIGHTxWIDTH of the images it will get (default: that of --image, or a square of min_size)"
    ] = None,
    image: Annotated[Path | None, "image for the comparison with torch (default: drawn shapes)"] = None,
) -> None:
    """Export a detector to ONNX and verify that onnxruntime matches torch."""
    require("export")
    from bucketrank.inference.onnx import export_weights

    agreement = export_weights(weights, out, size=None if size is None else _parse_size(size), image=image)
    sys.stdout.write(f"{agreement}\nwrote {printable(out)}\n")


def _parse_size(text: str) -> tuple[int, int]:
    try:
        height, width = (int(side) for side in text.lower().split("x"))
    except ValueError:
        height = width = 0
    if min(height, width) < 1:
        raise UsageError(f"--size: expected HEIGHTxWIDTH like 480x640, got {text!r}")
    if height * width > MAX_PIXELS:
        raise UsageError(f"--size: expected at most {MAX_PIXELS:,} pixels, got {text!r}; choose a smaller size")
    return height, width


def report(
    runs: Annotated[list[Path], "run folders, as train writes them"],
    *,
    out: Annotated[Path, "the page to write"] = Path("report.html"),
    data: Annotated[Path | None, "folder of the data set (default: the one each run was trained on)"] = None,
    images: Annotated[int, "number of best and of worst images to show"] = 6,
    max_images: First = None,
    device: Device = "auto",
) -> None:
    """Write one page about runs: curves, AP, precision and recall, best and worst images, ranked lists."""
    from bucketrank.report.page import write_report

    require_min("--images", images, 1)
    require_min("--max-images", max_images, 1)
    require_device(device)
    write_report(runs, out, data=data, images=images, max_images=max_images, device=device)


def convert_weights(
    file: Annotated[Path, "MMDetection 2 or 3 checkpoint, .pth"],
    *,
    out: Annotated[Path, "model file to write"] = Path("model.safetensors"),
    detector: Annotated[
        Literal["atss", "paa"] | None, "needed if neither the checkpoint nor its name tells ATSS from PAA"
    ] = None,
    classes: Annotated[str | None, "class names in order, separated by commas, if the checkpoint has none"] = None,
    threshold: Annotated[float, "minimum score to report"] = 0.3,
    ema: Annotated[bool, "take the EMA weights (names that start with ema_)"] = False,
) -> None:
    """Convert a published checkpoint to a model file for eval, predict, train --init, export and report."""
    from rich.console import Console

    from bucketrank.output import say
    from bucketrank.weights.atomic import require_no_input
    from bucketrank.weights.files import require_replaceable
    from bucketrank.weights.published import convert_published

    if not 0 <= threshold <= 1:
        raise UsageError(f"--threshold: expected a score from 0 to 1, got {threshold}")
    require_no_input(out, [file])
    require_replaceable(out, "model.safetensors")
    names = None if classes is None else [name.strip() for name in classes.split(",")]
    converted = convert_published(file, out, detector=detector, classes=names, threshold=threshold, ema=ema)
    say(Console(), f"{out}: {converted}")
