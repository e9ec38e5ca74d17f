"""The results of a study as Markdown, CSV, LaTeX and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from bucketrank.bench.bench_documents import markdown_table
from bucketrank.study.claims import claims
from bucketrank.study.latex import latex_table
from bucketrank.study.study_results import METRICS, RowResult, StudyOutcome

DASH = "\N{EN DASH}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
VERDICTS = {True: "yes", False: "no", None: "inconclusive"}


def column_names(outcome: StudyOutcome) -> list[str]:
    """Return the names of the columns; #H is the number of hyper-parameters, T_iter the seconds per step."""
    counted = ["#H"] if outcome.plan.study.counted else []
    ours = ["epochs", "lr", "T_iter (s)", "to score-based", *METRICS]
    return ["detector", "loss", *counted, *ours, "paper's T_iter", *(f"paper's {name}" for name in METRICS)]


def row_cells(outcome: StudyOutcome, result: RowResult) -> list[str]:
    """Return the cells of one row."""
    counted = [_or_dash(result.row.hyperparameters)] if outcome.plan.study.counted else []
    means = [result.mean(name) for name in METRICS]
    return [
        result.row.detector,
        result.row.title,
        *counted,
        _or_dash(result.epochs),
        DASH if result.rate is None else f"{result.rate:g}",
        DASH if result.seconds is None else f"{result.seconds:.2f}",
        DASH if result.to_scored is None else f"{result.to_scored.median:.2f}",
        *(DASH if mean is None else with_deviation(mean.mean, mean.deviation) for mean in means),
        _or_dash(result.paper.get("seconds"), ".2f"),
        *(_or_dash(result.paper.get(name), ".1f") for name in METRICS),
    ]


def with_deviation(mean: float, deviation: float) -> str:
    """Return a mean with its deviation, if that is a number.

    >>> with_deviation(41.26, 0.51), with_deviation(41.26, math.nan)
    ('41.3 \N{PLUS-MINUS SIGN} 0.5', '41.3')
    """
    return f"{mean:.1f}" if math.isnan(deviation) else f"{mean:.1f} {PLUS_MINUS} {deviation:.1f}"


def _or_dash(value: float | None, form: str = "") -> str:
    return DASH if value is None else format(value, form)


def to_markdown(outcome: StudyOutcome, figures: Sequence[tuple[str, str]]) -> str:
    """Return the whole study: the table, the notes, the claims, the figures and the failed runs."""
    plan, study = outcome.plan, outcome.plan.study
    lines = [f"# {study.title}", "", f"The study `{study.name}`: {study.tables} of the paper.", ""]
    rows = [row_cells(outcome, result) for result in outcome.results]
    lines += [markdown_table(column_names(outcome), rows), ""]
    if study.others and plan.paper:
        others = [[name, *(f"{value:.1f}" for value in values)] for name, values in study.others.items()]
        lines += ["Published by others, not trained here:", "", markdown_table(["detector", *METRICS], others), ""]
    lines += [*(f"- {note}" for note in notes(outcome)), ""]
    answers = [[claim.claim, claim.detector, claim.measured, VERDICTS[claim.holds]] for claim in claims(outcome)]
    if answers:
        lines += ["## The claims", "", markdown_table(["claim", "detector", "measured", "holds"], answers), ""]
    for name, caption in figures:
        lines += [f"![{caption}]({name})", ""]
    if outcome.failed:
        lines += ["## Failed", "", *(f"- `{name}`: {error}" for name, error in outcome.failed.items()), ""]
    return "\n".join(lines)


def notes(outcome: StudyOutcome) -> list[str]:
    """Return sentences that say how the numbers were obtained."""
    plan = outcome.plan
    seeds = f"mean {PLUS_MINUS} deviation over {plan.seeds} seeds" if plan.seeds > 1 else "one seed"
    metric = "masks where the detector has them, otherwise of boxes"
    sentences = [f"AP of {metric}, in per cent, after the last epoch; {seeds}."]
    if len(plan.factors) > 1:
        tried = ", ".join(f"{factor:g}" for factor in plan.factors)
        sentences.append(
            f"Learning rate: for every loss the best of the recipe's times {tried}, by AP with seed 0; the methods of "
            "a loss share it."
        )
    if outcome.measured:
        sentences.append(
            "T_iter: median seconds of whole steps (forward, backward, optimiser) on the data of the study, the losses "
            "of a detector taking turns in one process; the ratio is the median over rounds."
        )
    else:
        sentences.append("T_iter: median seconds of the steps, as logged by the runs.")
    if outcome.missing:
        sentences.append(f"Not complete: {outcome.missing} runs are not finished.")
    return [*sentences, *_origin(outcome)]


def _origin(outcome: StudyOutcome) -> list[str]:
    """Return a sentence with the data, machines and commits of the runs; nothing without a finished run."""
    runs = [run.environment for result in outcome.results for run in result.runs]
    if not runs:
        return []
    commits = sorted({_commit(machine) for machine in runs})
    machines = sorted({f"{machine['processor']}, {machine['cores']} cores, {_threads(machine)}" for machine in runs})
    timers = [outcome.measured[detector].machine for detector in outcome.detectors if detector in outcome.measured]
    timed = sorted({f"{_threads(machine)}, {_commit(machine)}" for machine in timers})
    steps = f" Steps timed with {'; '.join(timed)}." if timed else ""
    data = outcome.plan.data.name
    return [f"Data: `{data}`. Trained on {'; '.join(machines)}; {', '.join(commits)}.{steps}"]


def _threads(machine: dict[str, Any]) -> str:
    count = machine["torch_threads"]
    return f"{count} thread{'s' * (count != 1)}"


def _commit(machine: dict[str, Any]) -> str:
    if machine["commit"] is None:
        return "no commit"
    return f"commit {machine['commit'][:7]}" + (" with local changes" if machine["modified"] else "")


def to_csv(outcome: StudyOutcome) -> str:
    """Return one line per row, with plain numbers."""
    text = io.StringIO()
    spread = [f"{name} {part}" for name in METRICS for part in ("mean", "deviation")]
    names = ["detector", "loss", "method", "hyperparameters", "epochs", "lr", "seeds", "seconds", "to_scored", *spread]
    paper = ["paper_seconds", *(f"paper_{name}" for name in METRICS)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *paper])
    for result in outcome.results:
        means = [result.mean(name) for name in METRICS]
        numbers = [number for mean in means for number in ((mean.mean, mean.deviation) if mean else (None, None))]
        row, ratio = result.row, result.to_scored.median if result.to_scored else None
        settings = [row.detector, row.loss, row.method, row.hyperparameters, result.epochs, result.rate]
        published = [result.paper.get("seconds"), *(result.paper.get(name) for name in METRICS)]
        measured = map(_number, [result.seconds, ratio, *numbers])
        writer.writerow([*settings, len(result.runs), *measured, *published])
    return text.getvalue()


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.6g}"


def to_latex(outcome: StudyOutcome) -> str:
    """Return a LaTeX table with a line between two detectors."""
    groups = [[row_cells(outcome, result) for result in outcome.of(detector)] for detector in outcome.detectors]
    return latex_table(outcome.plan.study.title, column_names(outcome), groups)


def to_json(outcome: StudyOutcome) -> str:
    """Return all rows with their runs, and the numbers and the command of each run."""
    rows = []
    for result in outcome.results:
        runs = [
            {
                "name": run.name,
                "command": run.command,
                "seed": run.seed,
                "curve": run.curve(),
                **_environment(run.environment),
            }
            | {name: run.metric(name) for name in METRICS}
            for run in result.runs
        ]
        row = {"detector": result.row.detector, "loss": result.row.loss, "method": result.row.method}
        rows.append(row | {"lr": result.rate, "seconds": result.seconds, "paper": result.paper, "runs": runs})
    answers = [vars(claim) for claim in claims(outcome)]
    document = {"study": outcome.plan.study.name, "rows": rows, "claims": answers, "failed": outcome.failed}
    return json.dumps(document, indent=1) + "\n"


def _environment(machine: dict[str, Any]) -> dict[str, Any]:
    return {name: machine[name] for name in ("commit", "modified", "processor", "date")}
