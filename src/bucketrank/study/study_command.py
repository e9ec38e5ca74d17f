"""The command ``study``: time steps, train the runs that are not finished, write tables and figures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bucketrank.data import find_splits
from bucketrank.data.convert.cityscapes import CATEGORIES as CITYSCAPES
from bucketrank.errors import DataError
from bucketrank.settings.flags import parse_flags as parse_setting_flags
from bucketrank.study.claims import claims
from bucketrank.study.grid import STUDIES, Study
from bucketrank.study.loss_comparison import LossComparison
from bucketrank.study.loss_document import title, write_losses
from bucketrank.study.loss_outcome import collect_losses
from bucketrank.study.run_queue import RESUME, RunQueue, StoppedError
from bucketrank.study.step_measurements import StepMeasurements, load_measurements, measure_steps
from bucketrank.study.study_figures import draw_study
from bucketrank.study.study_plan import StudyPlan, choose_rows
from bucketrank.study.study_results import StudyOutcome, collect
from bucketrank.study.study_tables import (
    VERDICTS,
    column_names,
    notes,
    row_cells,
    to_csv,
    to_json,
    to_latex,
    to_markdown,
)
from bucketrank.weights.atomic import write_text

WIDTH = 160  # columns when the output is no terminal, enough for the table


def run_study(plan: StudyPlan, *, rounds: int, console: Console | None = None) -> int:
    """Run the whole study and return the exit status: 1 if a run failed, 130 if the study was stopped."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    say = _printer(console)
    say(f"{plan.study.title} ({plan.study.tables}): {plan.total} runs; all files go to {plan.out}")
    queue = RunQueue(console, plan.total, total_length=plan.total)
    measurements: dict[str, StepMeasurements] = {}
    stopped = ""
    try:
        if not plan.paper:
            measurements = measure_steps(plan.out, plan.first_runs(), rounds=rounds, say=say)
            plan = replace(plan, seconds=_medians(measurements))
        for row in plan.families():
            if len(plan.factors) > 1:
                queue.train(plan.trials(row))
        for seed in range(plan.seeds):
            # A row whose trials all failed has no learning rate and no runs; the table shows that.
            queue.train([run for row in plan.rows for run in plan.results(row) if run.seed == seed])
    except (StoppedError, KeyboardInterrupt) as error:
        stopped = str(error) or f"stopped; {RESUME}"
    outcome = collect(plan, measurements or load_measurements(plan.out), queue.failed)
    write_study(outcome)
    show_study(outcome, console)
    if stopped:
        sys.stderr.write(f"bucketrank: study: {stopped}\n")
        return 130
    return 1 if queue.failed else 0


def run_loss_comparison(plan: LossComparison, *, rounds: int, console: Console | None = None) -> int:
    """Run the study ``losses`` and return the exit status: 1 if a run failed, 130 if the study was stopped."""
    console = console or Console()
    say = _printer(console)
    names = ", ".join(data.name for data in plan.data)
    say(f"{title(plan)}, on {names}: {plan.total} runs; all files go to {plan.out}")
    queue = RunQueue(console, plan.total, total_length=plan.total_length)
    stopped = ""
    try:
        measure_steps(plan.out, {plan.detector.title: plan.first_runs()}, rounds=rounds, say=say)
        for data in plan.data:
            for loss in plan.losses:
                queue.train(plan.rate_trials(data, loss))
                plan = replace(plan, failed=frozenset(queue.failed))
                queue.train(plan.trials(data, loss))  # now with the other box balance at the best rate
                plan = replace(plan, failed=frozenset(queue.failed))
        for seed in range(plan.seeds):
            queue.train([run for data in plan.data for loss in plan.losses for run in plan.runs(data, loss)[seed:][:1]])
    except (StoppedError, KeyboardInterrupt) as error:
        stopped = str(error) or f"stopped; {RESUME}"
    timed = load_measurements(plan.out).get(plan.detector.title)
    write_losses(plan, collect_losses(plan), timed, failed=queue.failed)
    say(f"Written: {plan.out / 'losses.md'}, losses.json and figures")
    if stopped:
        sys.stderr.write(f"bucketrank: study: {stopped}\n")
        return 130
    return 1 if queue.failed else 0


def plan_study(
    name: str,
    *,
    data: Path,
    out: Path,
    seeds: int,
    paper: bool,
    factors: tuple[float, ...],
    only: str | None = None,
    flags: tuple[str, ...] = (),
) -> StudyPlan:
    """Return the plan of a study; StudyError if it has no rows to train."""
    study: Study = STUDIES[name]
    layout = parse_setting_flags(flags).get("data.layout")
    dataset = dataset_of(data, layout=None if layout == "auto" else layout) if paper else "COCO"
    rows = choose_rows(study, paper=paper, dataset=dataset, only=only)
    return StudyPlan(study, rows, paper, data, out, seeds, factors, flags)


def dataset_of(data: Path, *, layout: str | None = None) -> str:
    """Return COCO, LVIS or Cityscapes, depending on the classes; DataError if the classes cannot be read."""
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


def training_commands(plan: StudyPlan) -> list[str]:
    """Return the command of every run; rows whose learning rate is not chosen yet have the rate of the recipe."""
    commands: dict[str, str] = {}
    for row in plan.families():
        commands |= {trial.name: trial.command for trial in plan.trials(row) if len(plan.factors) > 1}
    for seed in range(plan.seeds):
        for row in plan.rows:
            run = plan.run(row, rate=plan.usual_rate(row), seed=seed)
            commands.setdefault(run.name, run.command)
    return list(commands.values())


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
    table = Table(*column_names(outcome), title=outcome.plan.study.title, title_justify="left", title_style="bold")
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
