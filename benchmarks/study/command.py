"""Run a study: time steps, train unfinished runs, write tables and figures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.session import wide_console
from benchmarks.study.losses import collect_losses, write_losses
from benchmarks.study.plan import LossPlan, PaperPlan, StudyPlan
from benchmarks.study.runs import RESUME, RunQueue, StoppedError
from benchmarks.study.steps import StepMeasurements, load_measurements, measure_steps
from benchmarks.study.tables import (
    VERDICTS,
    StudyOutcome,
    claims,
    collect,
    column_names,
    draw_study,
    notes,
    row_cells,
    to_csv,
    to_json,
    to_latex,
    to_markdown,
)
from bucketrank.data import find_splits
from bucketrank.data.convert.formats import CATEGORIES as CITYSCAPES
from bucketrank.errors import DataError
from bucketrank.weights.atomic import write_text


def run_study(plan: StudyPlan, *, rounds: int) -> int:
    """Run the whole study and return the exit status: 1 if a run failed, 130 if the study was stopped."""
    console = wide_console()
    say = _printer(console)
    say(f"{_opening(plan)}: {plan.total} runs; all files go to {plan.out}")
    queue = RunQueue(console, plan.total, total_length=plan.total_length)
    stopped = ""
    try:
        if not (isinstance(plan, PaperPlan) and plan.paper):
            measured = measure_steps(plan.out, plan.first_runs(), rounds=rounds, say=say)
            plan = replace(plan, seconds=_medians(measured))
        for arm in plan.families():
            queue.train(plan.rate_trials(arm))
            plan = replace(plan, failed=frozenset(queue.failed))
            queue.train(plan.trials(arm))  # now with the other box balances at the best rate
            plan = replace(plan, failed=frozenset(queue.failed))
        for seed in range(plan.seeds):
            # An arm whose trials all failed has no learning rate and no runs; the tables show that.
            queue.train([run for arm in plan.arms for run in plan.runs(arm)[seed:][:1]])
    except (StoppedError, KeyboardInterrupt) as error:
        stopped = str(error) or f"stopped; {RESUME}"
    _publish(plan, queue.failed, console)
    if stopped:
        sys.stderr.write(f"python -m benchmarks: study: {stopped}\n")
        return 130
    return 1 if queue.failed else 0


def _opening(plan: StudyPlan) -> str:
    if isinstance(plan, PaperPlan):
        return f"{plan.title} ({plan.study.tables})"
    return f"{plan.title}, on {', '.join(dict.fromkeys(arm.data.name for arm in plan.arms))}"


def _publish(plan: StudyPlan, failed: dict[str, str], console: Console) -> None:
    """Write and print the results of all finished runs."""
    measured = load_measurements(plan.out)
    if isinstance(plan, PaperPlan):
        outcome = collect(plan, measured, failed)
        write_study(outcome)
        show_study(outcome, console)
    elif isinstance(plan, LossPlan):
        write_losses(plan, collect_losses(plan), measured.get(plan.detector.title), failed=failed)
        _printer(console)(f"Written: {plan.out / 'losses.md'}, losses.json and figures")


def dataset_of(data: Path, *, layout: str | None = None) -> str:
    """Identify COCO, LVIS or Cityscapes by the classes; DataError if the classes cannot be read."""
    splits = find_splits(data, layout=layout)
    split = splits.val or splits.train
    if split is None:
        raise DataError(f"{data}: expected annotations, got none; see docs/data.md for layouts")
    categories = split.read()["categories"]
    if not isinstance(categories, list) or not all(isinstance(category, dict) for category in categories):
        raise DataError(f"{split.annotations}: expected categories to be a list of objects; run bucketrank check-data")
    if categories and all("frequency" in category for category in categories):
        return "LVIS"
    names = {str(category.get("name")) for category in categories}
    return "Cityscapes" if names == set(CITYSCAPES.values()) else "COCO"


def write_study(outcome: StudyOutcome) -> None:
    """Write the tables and the figures to the folder of the study."""
    out, name = outcome.plan.out, outcome.plan.study.name
    out.mkdir(parents=True, exist_ok=True)
    figures = draw_study(outcome, out)
    write_text(out / f"{name}.md", to_markdown(outcome, figures))
    write_text(out / f"{name}.csv", to_csv(outcome))
    write_text(out / f"{name}.tex", to_latex(outcome))
    write_text(out / f"{name}.json", to_json(outcome))


def show_study(outcome: StudyOutcome, console: Console) -> None:
    """Print the table, the notes and the claims."""
    table = Table(*column_names(outcome), title=outcome.plan.title, title_justify="left", title_style="bold")
    for number, result in enumerate(outcome.results):
        if number and result.row.detector != outcome.results[number - 1].row.detector:
            table.add_section()
        table.add_row(*row_cells(outcome, result), style="bold" if result.row.method == "exact" else "")
    console.print(table)
    say = _printer(console)
    for line in notes(outcome):
        say(line)
    for claim in claims(outcome):
        say(f"{VERDICTS[claim.holds]:>14}  {claim.detector}: {claim.claim}: {claim.measured}")
    say(f"Written: {outcome.plan.out / outcome.plan.study.name}.md, .csv, .tex, .json and figures")


def _medians(measurements: dict[str, StepMeasurements]) -> dict[str, float]:
    """Return the median seconds per step by row."""
    return {key: median(samples.values()) for each in measurements.values() for key, samples in each.samples.items()}


def _printer(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)
