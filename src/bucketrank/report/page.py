"""Write the report: measure the runs, and render all sections into one HTML file without external resources."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bucketrank import __version__
from bucketrank.devices import resolve_device
from bucketrank.errors import DataError, printable
from bucketrank.output import progress_bar, say
from bucketrank.report.built import describe_loss
from bucketrank.report.chart import COLOURS, Html, control, join, keys, table, tag
from bucketrank.report.confusion import confusion_section
from bucketrank.report.images import StoredImages, image_figure
from bucketrank.report.measurements import Measurement, measure_run
from bucketrank.report.ranked_lists import legend, ranked_lists
from bucketrank.report.run_folder import RunFolder, read_folders
from bucketrank.report.sections import (
    CALIBRATION_COLUMNS,
    calibration_row,
    class_table,
    curves,
    metrics_table,
    precision_recall,
    reliability,
    settings_section,
)
from bucketrank.settings import LossSettings, loss_spec
from bucketrank.weights.atomic import require_writable, write_text

GENERATOR = "bucketrank report"
MAX_NAMES = 4  # runs named in the heading; with more runs, it only gives their number
IOU_TYPES = ("boxes", "masks")
SCRIPTS = ("tip.js", "chart.js", "images.js", "ranked_lists.js", "tabs.js")


@dataclass(frozen=True)
class ReportedRun:
    """A run folder and the measurement of its weights, or the reasons why there is none."""

    folder: RunFolder
    measurement: Measurement | None
    gaps: list[str]


def write_report(
    runs: Path | str | Sequence[Path | str],
    out: Path | str = "report.html",
    *,
    data: Path | str | None = None,
    images: int = 6,
    max_images: int | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> Path:
    """Write an HTML page about the run folders ``runs`` to the file ``out`` and return its path.

    The page needs no other files. The weights of each run are measured on the validation images (the first
    ``max_images``, by default all) of the data set it was trained on, or of the folder ``data``, on the torch device
    ``device`` (auto: cuda if available). The page shows the ``images`` best and as many worst ones. Where files or data
    are missing, the page says so and shows the rest. Progress is printed to ``console``, by default the terminal.
    Raises DataError if a folder is not a run folder.
    """
    console = console or Console()
    out = Path(out)
    _check(out, images=images, max_images=max_images)
    resolve_device(device)
    reported = []
    folders = read_folders([Path(run) for run in ([runs] if isinstance(runs, str | Path) else runs)])
    with progress_bar(console) as progress:
        for folder in folders:
            measurement, gaps = _measure(folder, data, progress, images=images, max_images=max_images, device=device)
            reported.append(ReportedRun(folder, measurement, gaps))
            for gap in [*folder.gaps, *gaps]:
                say(console, printable(f"{folder.name}: {gap}"), style="yellow")
    text = render_page(reported)
    try:
        write_text(out, text)
    except OSError as error:
        raise DataError(f"{out}: cannot be written ({error}); choose another file with --out") from error
    say(console, f"wrote {printable(out)} ({len(text.encode()) / 1e6:.1f} MB)")
    return out


def _check(out: Path, *, images: int, max_images: int | None) -> None:
    if images < 1:
        raise DataError(f"write_report: images: expected at least 1, got {images}")
    if max_images is not None and max_images < 1:
        raise DataError(f"write_report: max_images: expected at least 1, got {max_images}")
    require_writable(out, "report.html")
    if out.exists():
        with out.open("rb") as file:
            if GENERATOR.encode() not in file.read(1000):
                raise DataError(f"{out}: already exists and is not a bucketrank report; choose another file with --out")


def _measure(
    folder: RunFolder,
    data: Path | str | None,
    progress: Progress,
    *,
    images: int,
    max_images: int | None,
    device: str,
) -> tuple[Measurement | None, list[str]]:
    """Measure the weights of a run; if that is not possible, return None and the reason, unless the folder names it."""
    data_folder = folder.data if data is None else Path(data)
    if folder.weights is None:
        return None, []
    if data_folder is None:
        return None, [
            "The run folder does not name its data: give the folder with --data to see images and AP per class."
        ]
    if not data_folder.exists():
        return None, [
            f"The data is no longer at {data_folder}: give its folder with --data to see precision and recall, images, "
            "ranked lists and AP per class."
        ]
    task = progress.add_task(folder.name, total=None)
    try:
        measurement = measure_run(
            folder,
            data_folder,
            images=images,
            max_images=max_images,
            device=device,
            advance=lambda done, total: progress.update(task, completed=done, total=total),
        )
    except (OSError, ValueError) as error:  # unusable data, weights or recipe, or NaN scores
        return None, [f"The weights could not be measured: {error}"]
    return measurement, []


def render_page(runs: Sequence[ReportedRun]) -> str:
    """Render the whole page."""
    folders = [run.folder for run in runs]
    stored = StoredImages()
    panels = [_panel(number, run, stored) for number, run in enumerate(runs)]
    content = join(
        _section("runs", "Runs", _runs(runs)),
        _section("curves", "Curves", join(_run_buttons(folders), curves(folders))),
        _section("numbers", "Average precision", _average_precision(runs)),
        _section("images", "Validation images", tag("div", *panels, class_="panels")),
    )
    names = ", ".join(folder.name for folder in folders) if len(runs) <= MAX_NAMES else f"{len(runs)} runs"
    script = "".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_asset("page.html")).substitute(
        title=join(f"{names}: report"),
        heading=join(names),
        generator=GENERATOR,
        digest=digest,
        style=_asset("page.css"),
        content=content,
        images=stored.html(),
        version=__version__,
        date=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        script=script,
    )


def _asset(name: str) -> str:
    return resources.files("bucketrank.report").joinpath("assets", name).read_text(encoding="utf-8")


def _section(name: str, title: str, content: Html) -> Html:
    return tag("section", tag("h2", title, id=f"{name}-title"), content, id=name, aria_labelledby=f"{name}-title")


def _runs(runs: Sequence[ReportedRun]) -> Html:
    cards = [_card(number, run) for number, run in enumerate(runs)]
    built = [None if run.measurement is None else run.measurement.built for run in runs]
    return join(tag("div", *cards, class_="cards"), settings_section([run.folder for run in runs], built))


def _card(number: int, run: ReportedRun) -> Html:
    recipe, environment, measurement = run.folder.recipe, run.folder.environment, run.measurement
    commit = environment.get("commit")
    changed = " with local changes" if environment.get("modified") else ""
    facts = {
        "detector": recipe.detector.name + (f" on {recipe.backbone_name}" if recipe.backbone_name else ""),
        "loss": describe_loss(recipe.loss),
        "data": str(measurement.data if measurement else run.folder.data or "unknown"),
        "weights": measurement.weights.name if measurement else "not measured",
        "commit": f"{str(commit)[:12]}{changed}" if commit else "unknown",
        "machine": _machine(environment),
        "started": str(environment.get("date", "unknown")).replace("T", " ").replace("+00:00", " UTC"),
    }
    rows = [join(tag("dt", key), tag("dd", value)) for key, value in facts.items()]
    gaps = [*run.folder.gaps, *run.gaps]
    missing = tag("ul", *(tag("li", gap) for gap in gaps), class_="gaps") if gaps else Html("")
    return tag("article", tag("h3", _swatch(number), run.folder.name), tag("dl", *rows), missing, class_="card")


def _machine(environment: dict[str, Any]) -> str:
    words = [str(environment[key]) for key in ("gpu", "processor") if environment.get(key)]
    cores = environment.get("cores")
    if isinstance(cores, int):
        words.append(f"{cores} core{'s' * (cores != 1)}")
    versions = environment.get("versions")
    if isinstance(versions, dict) and versions.get("torch"):
        words.append(f"torch {versions['torch']}")
    return ", ".join(words) or "unknown"


def _run_buttons(folders: Sequence[RunFolder]) -> Html:
    buttons = [
        tag("button", _swatch(number), folder.name, type="button", data_run=number, aria_pressed="true")
        for number, folder in enumerate(folders)
    ]
    return tag("div", *buttons, class_="legend", role="group", aria_label="Runs in the charts", hidden=len(folders) < 2)


def _swatch(number: int) -> Html:
    return tag("span", class_=f"swatch c{number % COLOURS}", aria_hidden="true")


def _average_precision(runs: Sequence[ReportedRun]) -> Html:
    parts: list[Html] = []
    compare = _comparable(runs)
    for iou_type in IOU_TYPES:
        metrics = {run.folder.name: row for run in runs if (row := _metrics(run, iou_type))}
        if metrics:
            caption = f"AP and AR of {iou_type} in per cent. {_source(runs)}"
            parts += [tag("h3", iou_type.capitalize()), metrics_table(metrics, compare=compare, caption=caption)]
    measured = {run.folder.name: run.measurement for run in runs if run.measurement is not None}
    for iou_type in IOU_TYPES:
        per_class = {
            name: each.results[iou_type].per_class for name, each in measured.items() if iou_type in each.results
        }
        if per_class:
            caption = f"AP of {iou_type} per class in per cent; - if the images have no object of the class."
            class_rows = class_table(per_class, compare=compare, caption=caption)
            parts += [tag("h3", f"{iou_type.capitalize()} per class"), class_rows]
    if measured:
        rows = [[name, *calibration_row(each)] for name, each in measured.items()]
        caption = "Calibration errors of the boxes, from 0 to 1: 0 if detections are right as often as scores say."
        parts += [tag("h3", "Calibration"), table(["run", *CALIBRATION_COLUMNS], rows, caption=caption)]
    return join(*parts) if parts else tag("p", "No numbers yet: these runs have not been evaluated.")


def _metrics(run: ReportedRun, iou_type: str) -> dict[str, float]:
    """Get the metrics of the measurement or, without one, the last row of validation.csv."""
    if run.measurement is not None:
        result = run.measurement.results.get(iou_type)
        return {} if result is None else result.columns
    prefix = f"{iou_type}/"
    row = run.folder.validation.last()
    metrics = {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
    return metrics if any(math.isfinite(value) for value in metrics.values()) else {}


def _source(runs: Sequence[ReportedRun]) -> str:
    """Name the source of the numbers, once for all runs with the same source."""
    by_source: dict[str, list[str]] = {}
    for run in runs:
        if run.measurement is not None:
            weights, count, total = run.measurement.weights.name, run.measurement.images, run.measurement.total
            source = f"{weights} on {count:,} of {total:,} images"
        elif run.folder.validation.steps:
            source = f"step {run.folder.validation.steps[-1]:,} in validation.csv, as logged during training"
        else:
            continue
        by_source.setdefault(source, []).append(run.folder.name)
    if len(by_source) == 1:
        text = f"Source: {next(iter(by_source))}."
    else:
        text = " ".join(f"{', '.join(names)}: {source}." for source, names in by_source.items())
    return text + (" The best values are in bold." if len(runs) > 1 and _comparable(runs) else "")


def _comparable(runs: Sequence[ReportedRun]) -> bool:
    """Return whether all numbers belong to the same images, as far as we know; runs without numbers do not count."""
    measured = {
        (replace(each.split, annotations=each.split.annotations.resolve(), labels=None), each.images)
        for run in runs
        if (each := run.measurement) is not None
    }
    logged = {run.folder.data for run in runs if run.measurement is None and run.folder.validation.steps}
    return (len(measured) == 1 and not logged) or (not measured and len(logged) == 1 and None not in logged)


def _panel(number: int, run: ReportedRun, stored: StoredImages) -> Html:
    title = tag("h3", _swatch(number), run.folder.name, class_="name")
    if run.measurement is None:
        needed = "Precision and recall, images and ranked lists need the weights and the data."
        content = tag("p", " ".join([needed, *run.folder.gaps, *run.gaps]))
    else:
        content = _measurement(run.measurement, run.folder, stored, colour=number % COLOURS)
    return tag("div", title, content, class_="panel", id=f"run-{number}", data_name=run.folder.name)


def _measurement(measurement: Measurement, folder: RunFolder, stored: StoredImages, *, colour: int) -> Html:
    threshold, class_names = measurement.meta.threshold, measurement.class_names
    best, worst = measurement.best, measurement.worst
    masks = "masks" in measurement.results
    groups = []
    for title, images in (("Best", best), ("Worst", worst)):
        if images:
            figures = [
                image_figure(stored, measurement.split, image, class_names, threshold=threshold, masks=masks)
                for image in images
            ]
            groups.append(join(tag("h5", title), tag("div", *figures, class_="gallery")))
    shown = [*best, *worst]
    present = {each.category for image in shown for each in image.detections}
    present |= {each.category for image in shown for each in image.objects}
    options = [tag("option", "all classes", value="")]
    options += [tag("option", name, value=key) for key, name in class_names.items() if key in present]
    slider = tag("input", type="range", min=0, max=1000, step=1, class_="score")
    controls = tag(
        "div",
        control("Class ", tag("select", *options, class_="class")),
        control("Minimum score ", slider, tag("output", f"{threshold:.3g}")),
        control(tag("input", type="checkbox", checked=True, class_="ground-truth"), " ground truth"),
        tag("button", "Reset to stored threshold", type="button", class_="reset"),
        class_="controls scripted",
    )
    shapes = {
        "correct": "correct detection",
        "wrong": "wrong detection",
        "detected": "detected object",
        "missed": "missed object",
    }
    about = (
        f"The images with the highest and the lowest F1 at the stored threshold ({threshold:.3g}); boxes match at an "
        "IoU of 0.5. Solid boxes are detections, dashed boxes are ground truth. Point at a box to see its class, score "
        "and IoU."
    )
    gallery = tag("div", controls, *groups, class_="images", data_threshold=f"{threshold:.8g}")
    return join(
        tag("h4", "Precision and recall"),
        precision_recall(measurement, colour=colour),
        tag("h4", "Reliability of the scores"),
        reliability(measurement, colour=colour),
        tag("h4", "Confusion at the stored threshold"),
        confusion_section(measurement.confusion, class_names, threshold=threshold),
        tag("h4", "Best and worst images"),
        tag("p", about),
        keys(shapes),
        gallery if groups else tag("p", "No image has objects or detections."),
        tag("h4", "Ranked lists and gradients"),
        *_ranked_lists(measurement, folder.recipe.loss),
    )


def _ranked_lists(measurement: Measurement, loss: LossSettings) -> list[Html]:
    if loss_spec(loss.name).criterion is None:
        return [tag("p", "No ranked lists: the loss is part of the model, which does not show its gradients.")]
    calibration = measurement.meta.calibration
    undone = calibration is not None and calibration.method == "platt"
    explained = legend(loss, candidates=bool(measurement.candidates), calibrated=undone)
    return [explained, ranked_lists(measurement, loss)]
