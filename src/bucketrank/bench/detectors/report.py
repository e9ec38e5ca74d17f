"""A study of the detectors as JSON, as Markdown and on the terminal."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from bucketrank.bench.bars import Bar
from bucketrank.bench.detectors.contenders import (
    BUCKETED,
    EXACT,
    FOCAL,
    NAMES,
    PAIRWISE,
    SCORED_TITLES,
    TITLES,
    USUAL,
)
from bucketrank.bench.detectors.measure import split_rounds
from bucketrank.bench.detectors.paper import T_ITER, WHERE
from bucketrank.bench.detectors.split import HOW
from bucketrank.bench.detectors.study import Result, Settings, Study, spell_image_size
from bucketrank.bench.machine import busy, in_words
from bucketrank.bench.numbers import seconds_in_words, significant
from bucketrank.bench.tables import (
    TARGETS,
    TIMES,
    bar_row,
    busy_note,
    json_document,
    markdown_table,
    show_bars,
    write_documents,
)
from bucketrank.bench.timing import Spread

if TYPE_CHECKING:
    from rich.console import Console

# T_iter with the exact method over T_iter with the score-based loss on the same candidates, at most.
TO_FOCAL = 1.05
RULES = {
    "step": "forward, backward and optimiser (SGD with momentum and weight decay, at a learning rate of 0: the"
    " arithmetic is done, the weights stay, and every step meets the same proposals), float32, random weights",
    "time": "the contenders of a detector take turns in one run, in changing order; median, first and third quartile;"
    " a ratio is the median of the ratios of steps in the same round",
    "loss": HOW,
    "by the loss": "1 + (the loss's time - focal loss's time) / the step with focal loss: the ratio if the steps"
    " differed in the loss alone, without the noise of all the rest",
    "focal": "the score-based loss on the same candidates: every anchor and every proposal, with the ranking loss's"
    " anchors and box loss; under it ATSS and PAA keep the branch that predicts centerness or IoU",
    "usual": "what the detector is usually trained with: cross-entropy on 256 anchors and 512 proposals an image for"
    " the R-CNNs, else focal loss with the detector's own anchors",
    "estimate": "the step with the exact method, and the loss alone timed on its logits with a part of the positives,"
    " continued along the formula for the operations",
}
LEGEND = {
    EXACT: "rs/exact",
    BUCKETED: "rs/bucketed",
    PAIRWISE: "rs/pairwise",
    FOCAL: "focal, same candidates",
    USUAL: "usual baseline",
}


def bars(study: Study) -> list[Bar]:
    """The target of every detector."""
    judged, told = [], busy(study.machine)
    for detector in study.settings.detectors:
        found = study.find(detector, EXACT).to_focal
        if found is not None:
            spread = (found.median, found.low, found.high)
            judged.append(
                Bar("T_iter rs/exact / focal", TITLES[detector], *spread, TO_FOCAL, at_most=True, disturbed=told)
            )
    return judged


def to_json(study: Study) -> str:
    """Everything, to the single step."""
    return json_document("detectors", study.settings.command(), RULES, study, bars(study))


def size_of(settings: Settings) -> str:
    """What was trained, and on what."""
    images = f"{settings.batch} image{'s' * (settings.batch != 1)}"
    objects = f"{settings.objects} object{'s' * (settings.objects != 1)}"
    return (
        f"{settings.backbone}, {spell_image_size(settings.image_size)} pixels, {images} with {objects} each, "
        f"{settings.classes} classes, {settings.channels} channels, {settings.proposals:,} proposals in the R-CNNs"
    )


def time_cell(result: Result, *, quartiles: bool) -> str:
    """Median and spread, or the reason why there is none."""
    if result.seconds is None:
        return "n/a" if result.estimated_seconds is None else f"skipped, ≈ {seconds_in_words(result.estimated_seconds)}"
    median, low, high = result.seconds.median, result.seconds.low, result.seconds.high
    if quartiles:
        return seconds_in_words(median, low, high)
    return f"{seconds_in_words(median)} ±{50 * (high - low) / median:.0f} %"


def times_cell(ratio: Spread | None, *, quartiles: bool = False) -> str:
    """A ratio."""
    if ratio is None:
        return ""
    spread = f" [{ratio.low:.3f}, {ratio.high:.3f}]" if quartiles else ""
    return f"{ratio.median:.3f}{TIMES}{spread}"


def loss_cells(result: Result) -> tuple[str, str, str]:
    """The loss's time, its share of the step, and the ratio to focal that the loss alone would make."""
    if result.loss_seconds is None or result.share is None:
        return "", "", ""
    share = f"{100 * result.share.median:.1f} %"
    return seconds_in_words(result.loss_seconds.median), share, times_cell(result.loss_to_focal)


def head_cells(result: Result) -> tuple[str, str]:
    """The logits that the loss of each head takes, and the positives among the candidates."""
    logits = [f"{head.candidates:,}" + (f"{TIMES}{head.classes}" if head.classes > 1 else "") for head in result.heads]
    return _added(logits), _added([f"{head.positives:,}" for head in result.heads])


def _added(cells: list[str]) -> str:
    """As a sum; the layers of a decoder, which are alike, in brackets."""
    runs = [(cell, len(list(run))) for cell, run in groupby(cells)]
    return " + ".join(cell if count == 1 else f"{count} ({cell})" for cell, count in runs)


def notes(study: Study) -> list[str]:
    """What a reader has to know about the numbers, with what was left out and why."""
    lines = [*busy_note(study.machine), f"Measured with {size_of(study.settings)}."]
    rounds, more = study.settings.rounds, split_rounds(study.settings)
    lines.append(f"{rounds} rounds for T_iter, {more} more for the loss's part of it.")
    skipped = [r for r in study.results if r.skipped]
    return [*lines, *(f"{TITLES[r.detector]}, {r.title}: skipped, {r.skipped}." for r in skipped)]


def to_markdown(study: Study, figure: str) -> str:
    """Tables for people, with what they were measured on."""
    detectors = study.settings.detectors
    grid = [(TITLES[detector], *(_grid_cell(study.find(detector, name)) for name in NAMES)) for detector in detectors]
    details = []
    for detector in detectors:
        for name in NAMES:
            result = study.find(detector, name)
            ratios = times_cell(result.to_focal, quartiles=True), times_cell(result.to_usual, quartiles=True)
            times = time_cell(result, quartiles=True)
            details.append((TITLES[detector], result.title, times, *ratios, *loss_cells(result), *head_cells(result)))
    usual = "; ".join(f"{TITLES[name]}: {SCORED_TITLES[name][1]}" for name in detectors)
    parts = [
        "# Detectors: seconds per iteration",
        f"`{study.settings.command()}`",
        f"{size_of(study.settings)}. Measured on: {in_words(study.machine)}.",
        f"![Seconds per iteration, and the loss's part of them]({figure})",
        "## T_iter",
        "Median · ratio to focal loss on the same candidates · the loss's share of the step.",
        markdown_table(("detector", *LEGEND.values()), grid),
        f"Usual baselines: {usual}.",
        "## Targets",
        markdown_table(TARGETS, [bar_row(bar) for bar in bars(study)]),
        "## Beside the paper",
        f"The paper's T_iter in seconds ({WHERE}), and ours. Ratios carry over better than seconds do.",
        markdown_table(
            (
                "detector",
                "paper: RS",
                "paper: BRS",
                "paper: score-based",
                "paper: BRS / score-based",
                "paper: others",
                "rs/pairwise",
                "rs/bucketed",
                "rs/exact",
                "usual",
                "rs/exact / usual",
            ),
            [_beside(study, detector) for detector in detectors],
        ),
        "## Details",
        "Median [quartiles]; candidates times classes that the loss of each head takes, and positives.",
        markdown_table(("detector", "loss", "T_iter", "/ focal", "/ usual", *DETAILS), details),
        "## How it was measured",
        "\n".join(f"- {name}: {rule}." for name, rule in RULES.items()),
        "## Notes",
        "\n".join(f"- {line}" for line in notes(study)),
    ]
    return "\n\n".join(parts) + "\n"


DETAILS = ("loss's time", "share", "/ focal by the loss", "candidates", "positives")


def _grid_cell(result: Result) -> str:
    if result.seconds is None:
        return time_cell(result, quartiles=False)
    return f"{seconds_in_words(result.seconds.median)} · {times_cell(result.to_focal)} · {loss_cells(result)[1]}"


def _beside(study: Study, detector: str) -> tuple[str, ...]:
    published = T_ITER[detector]
    over = ""
    if published.bucketed and published.scored:
        over = f"{published.bucketed / published.scored:.2f}{TIMES}"
    ours = []
    for name in (PAIRWISE, BUCKETED, EXACT, USUAL):
        found = study.find(detector, name)
        ours.append(f"≈ {significant(found.estimated_seconds)}" if found.skipped and found.estimated_seconds else "")
        if found.seconds is not None:
            ours[-1] = significant(found.seconds.median)
    times = ["" if x is None else f"{x:.2f}" for x in published[:3]]
    return (TITLES[detector], *times, over, published.others, *ours, times_cell(study.find(detector, EXACT).to_usual))


def show(study: Study, console: Console) -> None:
    """Prints the table: a row a contender, a section a detector."""
    from rich.table import Table

    wide = console.width >= 130
    title = "Seconds per iteration (median ± half the quartile range; ratios of steps in the same round)"
    table = Table("", "loss", title=title, title_justify="left", title_style="bold")
    for head in ("T_iter", "/ focal", "/ usual", *(DETAILS if wide else DETAILS[:2])):
        table.add_column(head, justify="right")
    for detector in study.settings.detectors:
        for name in NAMES:
            result = study.find(detector, name)
            cells = [time_cell(result, quartiles=False), times_cell(result.to_focal), times_cell(result.to_usual)]
            cells += [*loss_cells(result), *head_cells(result)] if wide else loss_cells(result)[:2]
            # The first row of a section names its detector; exact is what the table is about.
            label = TITLES[detector] if name == NAMES[0] else ""
            style = "bold" if name == EXACT else "dim" if name in (FOCAL, USUAL) else ""
            table.add_row(label, result.title, *cells, style=style)
        table.add_section()
    console.print(table)
    show_bars(bars(study), console)
    for line in notes(study):
        console.print(f"· {line}", style="dim", highlight=False)
    console.print(in_words(study.machine), style="dim", highlight=False)


def write(study: Study, out: Path) -> list[Path]:
    """JSON, Markdown, PNG and SVG in ``out``."""
    from bucketrank.bench.detectors.figure import draw_study

    documents = {"detectors.json": to_json(study), "detectors.md": to_markdown(study, "detectors.svg")}
    return [*write_documents(out, documents), *draw_study(study, out)]
