"""From run folders to the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bucketrank.data import DataError
from bucketrank.report.folder import RunFolder, read_folders
from bucketrank.report.measure import Measured, measure
from bucketrank.report.page import GENERATOR, Subject, page
from bucketrank.training.atomic import write_text


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
    """Write one page about the run folders to the file ``out``, which needs nothing else; returns its path.

    Each run's weights are measured on the data it was trained with, or on the folder ``data``; ``most`` takes only the
    first so many validation images. ``images`` is how many of the best and of the worst are shown. What a folder does
    not have, or where its data is gone, the page says so and shows the rest. DataError if a folder is no run.
    """
    console = console or Console()
    out = Path(out)
    _check(out, images=images, most=most)
    subjects = []
    folders = read_folders([Path(run) for run in runs])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for run in folders:
            gaps: list[str] = []
            measured = _measured(run, data, gaps, progress, images=images, most=most, device=device)
            subjects.append(Subject(run, measured, gaps))
            for gap in [*run.gaps, *gaps]:
                console.print(f"{run.name}: {gap}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    text = page(subjects)
    try:
        write_text(out, text)
    except OSError as error:
        raise DataError(f"{out}: cannot be written ({error}); give another file by --out") from error
    size = len(text.encode()) / 1e6
    console.print(f"wrote {out} ({size:.1f} MB)", highlight=False, markup=False, soft_wrap=True)
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
                raise DataError(f"{out}: is there already and is no report; give another file by --out")


def _measured(
    run: RunFolder,
    data: Path | str | None,
    gaps: list[str],
    progress: Progress,
    *,
    images: int,
    most: int | None,
    device: str,
) -> Measured | None:
    """What the weights find; None if that cannot be measured, and ``gaps`` tells why."""
    folder = run.data if data is None else Path(data)
    if run.weights is None:
        return None
    if folder is None:
        gaps.append("The run does not tell its data: give the folder by --data to see images, and AP by class.")
        return None
    if not folder.is_dir():
        gaps.append(
            f"The data is not at {folder} any more: give its folder by --data to see precision and recall, images, the "
            "ranked list and AP by class."
        )
        return None
    task = progress.add_task(run.name, total=None)
    try:
        return measure(
            run,
            folder,
            images=images,
            most=most,
            device=device,
            advance=lambda done, total: progress.update(task, completed=done, total=total),
        )
    except (OSError, ValueError) as error:  # of data, weights or recipe; or a run whose scores are no numbers
        gaps.append(f"The weights could not be measured: {error}")
        return None
