"""The report of run folders, written as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bucketrank.data import DataError
from bucketrank.devices import resolve_device
from bucketrank.model_files.atomic import write_text
from bucketrank.report.measurements import Measurement, measure_run
from bucketrank.report.page import GENERATOR, ReportedRun, render_page
from bucketrank.report.run_folder import RunFolder, read_folders
from bucketrank.suggestions import printable


def write_report(
    runs: Sequence[Path | str],
    out: Path | str = "report.html",
    *,
    data: Path | str | None = None,
    images: int = 6,
    most: int | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> Path:
    """Write an HTML page about the run folders ``runs`` to the file ``out`` and return its path.

    The page needs no other files. The weights of each run are measured on the validation images of the data set it was
    trained on, or of the folder ``data``; ``most`` limits them to the first images. ``images`` is the number of best
    images to show, and of worst ones. Where files or data are missing, the page says so and shows the rest. DataError
    if a folder is not a run folder.

    Args:
        runs: run folders.
        out: the file to write.
        data: folder of another data set to measure on.
        images: number of best and of worst images to show.
        most: measure only the first N images; by default all.
        device: a torch device; auto is cuda if available.
        console: where progress is printed; by default the terminal.
    """
    console = console or Console()
    out = Path(out)
    _check(out, images=images, most=most)
    resolve_device(device)
    reported = []
    folders = read_folders([Path(run) for run in runs])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for folder in folders:
            gaps: list[str] = []
            measurement = _measure(folder, data, gaps, progress, images=images, most=most, device=device)
            reported.append(ReportedRun(folder, measurement, gaps))
            for gap in [*folder.gaps, *gaps]:
                line = printable(f"{folder.name}: {gap}")
                console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
    text = render_page(reported)
    try:
        write_text(out, text)
    except OSError as error:
        raise DataError(f"{out}: cannot be written ({error}); choose another file with --out") from error
    size = len(text.encode()) / 1e6
    console.print(f"wrote {printable(out)} ({size:.1f} MB)", highlight=False, markup=False, soft_wrap=True)
    return out


def _check(out: Path, *, images: int, most: int | None) -> None:
    if images < 1:
        raise DataError(f"report: --images: expected at least 1, got {images}")
    if most is not None and most < 1:
        raise DataError(f"report: --most: expected at least 1, got {most}")
    if out.is_dir():
        raise DataError(f"{out}: expected a file to write, got a folder; give --out {out / 'report.html'}")
    if out.exists():
        with out.open("rb") as file:
            if GENERATOR.encode() not in file.read(1000):
                raise DataError(f"{out}: already exists and is not a bucketrank report; choose another file with --out")


def _measure(
    folder: RunFolder,
    data: Path | str | None,
    gaps: list[str],
    progress: Progress,
    *,
    images: int,
    most: int | None,
    device: str,
) -> Measurement | None:
    """Measure the weights of a run; if that is not possible, return None and add the reason to ``gaps``."""
    data_folder = folder.data if data is None else Path(data)
    if folder.weights is None:
        return None
    if data_folder is None:
        gaps.append(
            "The run folder does not name its data: give the folder with --data to see images and AP per class."
        )
        return None
    if not data_folder.is_dir():
        gaps.append(
            f"The data is no longer at {data_folder}: give its folder with --data to see precision and recall, images, "
            "ranked lists and AP per class."
        )
        return None
    task = progress.add_task(folder.name, total=None)
    try:
        return measure_run(
            folder,
            data_folder,
            images=images,
            most=most,
            device=device,
            advance=lambda done, total: progress.update(task, completed=done, total=total),
        )
    except (OSError, ValueError) as error:  # from data, weights or recipe, or because scores are NaN
        gaps.append(f"The weights could not be measured: {error}")
        return None
