"""A study's results as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from bucketrank.bench.tables import markdown_table
from bucketrank.study.claims import claims
from bucketrank.study.latex import latex_table
from bucketrank.study.results import METRICS, Outcome, Result

DASH = "\N{EN DASH}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
VERDICTS = {True: "yes", False: "no", None: "cannot be told"}


def head(outcome: Outcome) -> list[str]:
    """The names of the columns."""
    counted = ["#H"] if outcome.plan.study.counted else []
    ours = ["epochs", "lr", "T_iter (s)", "to score-based", *METRICS]
    return ["detector", "loss", *counted, *ours, "paper's T_iter", *(f"paper's {name}" for name in METRICS)]


def cells(outcome: Outcome, result: Result) -> list[str]:
    """One row, for people."""
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
    """A mean, and the deviation where there is one.

    >>> with_deviation(41.26, 0.51), with_deviation(41.26, math.nan)
    ('41.3 \N{PLUS-MINUS SIGN} 0.5', '41.3')
    """
    return f"{mean:.1f}" if math.isnan(deviation) else f"{mean:.1f} {PLUS_MINUS} {deviation:.1f}"


def _or_dash(value: float | None, form: str = "") -> str:
    return DASH if value is None else format(value, form)


def to_markdown(outcome: Outcome, figures: Sequence[tuple[str, str]]) -> str:
    """The whole study: what was asked, the table, the claims, the figures and where the numbers come from."""
    plan, study = outcome.plan, outcome.plan.study
    lines = [f"# {study.title}", "", f"The study `{study.name}`: {study.tables} of the paper.", ""]
    lines += [markdown_table(head(outcome), [cells(outcome, each) for each in outcome.results]), ""]
    if study.others and plan.paper:
        others = [[name, *(f"{value:.1f}" for value in values)] for name, values in study.others.items()]
        lines += ["Published by others, not trained here:", "", markdown_table(["detector", *METRICS], others), ""]
    lines += [*(f"- {note}" for note in notes(outcome)), ""]
    answers = [[each.claim, each.detector, each.measured, VERDICTS[each.holds]] for each in claims(outcome)]
    if answers:
        lines += ["## The claims", "", markdown_table(["claim", "detector", "measured", "holds"], answers), ""]
    for name, text in figures:
        lines += [f"![{text}]({name})", ""]
    if outcome.failed:
        lines += ["## Failed", "", *(f"- `{name}`: {words}" for name, words in outcome.failed.items()), ""]
    return "\n".join(lines)


def notes(outcome: Outcome) -> list[str]:
    """How the numbers came about, in sentences."""
    plan = outcome.plan
    seeds = f"mean {PLUS_MINUS} deviation over {plan.seeds} seeds" if plan.seeds > 1 else "one seed"
    where = "masks where the detector has them, otherwise of boxes"
    found = [f"AP of {where}, in per cent, after the last epoch; {seeds}."]
    if len(plan.factors) > 1:
        tried = ", ".join(f"{factor:g}" for factor in plan.factors)
        found.append(
            f"Learning rate: for every loss the best of the recipe's times {tried}, by AP with seed 0; the methods of "
            "a loss share it."
        )
    if outcome.measured:
        found.append(
            "T_iter: median of whole steps (forward, backward, optimiser) on the data at hand, the losses of a "
            "detector taking turns in one process; the ratio is the median over rounds."
        )
    else:
        found.append("T_iter: median of the steps as the trainings wrote it down.")
    if outcome.missing:
        found.append(f"Not complete: {outcome.missing} trainings have not come to their end.")
    return [*found, *provenance(outcome)]


def provenance(outcome: Outcome) -> list[str]:
    """Commits, machines and data of the trainings."""
    plan = outcome.plan
    places = [run.environment for each in outcome.results for run in each.runs]
    commits = sorted({_commit(place) for place in places})
    machines = sorted({f"{place['processor']}, {place['cores']} cores, {_threads(place)}" for place in places})
    measured = [outcome.measured[detector].machine for detector in outcome.detectors if detector in outcome.measured]
    timed = sorted({f"{_threads(place)}, {_commit(place)}" for place in measured})
    steps = f" Steps timed with {'; '.join(timed)}." if timed else ""
    data = plan.data.name
    return [f"Data: `{data}`. Trained on {'; '.join(machines)}; {', '.join(commits)}.{steps}"] if places else []


def _threads(place: dict[str, Any]) -> str:
    count = place["torch_threads"]
    return f"{count} thread{'s' * (count != 1)}"


def _commit(place: dict[str, Any]) -> str:
    if place["commit"] is None:
        return "no commit"
    return f"commit {place['commit'][:7]}" + (" with local changes" if place["modified"] else "")


def to_csv(outcome: Outcome) -> str:
    """One line a row, numbers only."""
    text = io.StringIO()
    spread = [f"{name} {part}" for name in METRICS for part in ("mean", "deviation")]
    names = ["detector", "loss", "method", "hyperparameters", "epochs", "lr", "seeds", "seconds", "to_scored", *spread]
    paper = ["paper_seconds", *(f"paper_{name}" for name in METRICS)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *paper])
    for each in outcome.results:
        means = [each.mean(name) for name in METRICS]
        numbers = [number for mean in means for number in ((mean.mean, mean.deviation) if mean else (None, None))]
        row, ratio = each.row, each.to_scored.median if each.to_scored else None
        about = [row.detector, row.loss, row.method, row.hyperparameters, each.epochs, each.rate, len(each.runs)]
        theirs = [each.paper.get("seconds"), *(each.paper.get(name) for name in METRICS)]
        writer.writerow([*about, *map(_number, [each.seconds, ratio, *numbers]), *theirs])
    return text.getvalue()


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.6g}"


def to_latex(outcome: Outcome) -> str:
    """A table for a paper; a line between two detectors."""
    groups = [[cells(outcome, each) for each in outcome.of(detector)] for detector in outcome.detectors]
    return latex_table(outcome.plan.study.title, head(outcome), groups)


def to_json(outcome: Outcome) -> str:
    """Every training with its numbers and its command."""
    rows = []
    for each in outcome.results:
        runs = [
            {
                "name": run.name,
                "command": run.command,
                "seed": run.seed,
                "curve": run.curve(),
                **_environment(run.environment),
            }
            | {name: run.metric(name) for name in METRICS}
            for run in each.runs
        ]
        about = {"detector": each.row.detector, "loss": each.row.loss, "method": each.row.method, "lr": each.rate}
        rows.append(about | {"seconds": each.seconds, "paper": each.paper, "runs": runs})
    stated = [vars(each) for each in claims(outcome)]
    document = {"study": outcome.plan.study.name, "rows": rows, "claims": stated, "failed": outcome.failed}
    return json.dumps(document, indent=1) + "\n"


def _environment(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("commit", "modified", "processor", "date")}
