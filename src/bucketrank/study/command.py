"""The command ``study``: measure steps, train what is not trained yet, write it up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bucketrank.data import DataError, find_splits
from bucketrank.data.convert.cityscapes import CATEGORIES as CITYSCAPES
from bucketrank.study.claims import claims
from bucketrank.study.execute import Queue, StoppedError
from bucketrank.study.figures import draw
from bucketrank.study.grid import STUDIES, Study
from bucketrank.study.measure import Measured, measure, measured
from bucketrank.study.plan import Plan, choose_rows
from bucketrank.study.results import Outcome, collect
from bucketrank.study.tables import VERDICTS, cells, head, notes, to_csv, to_json, to_latex, to_markdown
from bucketrank.training.atomic import write_text


def run(plan: Plan, *, rounds: int, console: Console | None = None) -> int:
    """The whole study; returns the exit status: 1 if a training failed, 130 if it was stopped."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=160)  # into a file or a log: as wide as the table is
    say = _teller(console)
    say(f"{plan.study.title} ({plan.study.tables}): {plan.total} trainings; everything goes to {plan.out}")
    queue = Queue(console, plan.total)
    found: dict[str, Measured] = {}
    stopped = ""
    try:
        if not plan.paper:
            found = measure(plan, rounds=rounds, say=say)
            plan = replace(plan, seconds=_medians(found))
        for row in plan.families():
            if len(plan.factors) > 1:
                queue.train(plan.trials(row))
        for seed in range(plan.seeds):
            # A row whose trials have all failed has no rate, and no trainings; the table shows that.
            queue.train([run for row in plan.rows for run in plan.results(row) if run.seed == seed])
    except (StoppedError, KeyboardInterrupt) as error:
        stopped = str(error) or "stopped; the same command goes on from there"
    outcome = collect(plan, found or measured(plan), queue.failed)
    write(outcome)
    show(outcome, console)
    if stopped:
        sys.stderr.write(f"bucketrank: study: {stopped}\n")
        return 130
    return 1 if queue.failed else 0


def prepare(
    name: str,
    *,
    data: Path,
    out: Path,
    seeds: int,
    paper: bool,
    factors: tuple[float, ...],
    only: str | None = None,
    flags: tuple[str, ...] = (),
) -> Plan:
    """The plan of the study of that name; StudyError if there is nothing to train."""
    study: Study = STUDIES[name]
    rows = choose_rows(study, paper=paper, dataset=dataset_of(data) if paper else "COCO", only=only)
    return Plan(study, rows, paper, data, out, seeds, factors, flags)


def dataset_of(data: Path) -> str:
    """COCO, LVIS or Cityscapes, by the classes; DataError if they cannot be read."""
    splits = find_splits(data)
    split = splits.val or splits.train
    if split is None:
        raise DataError(f"{data}: there are no annotations; see docs/data.md for layouts")
    categories = split.read()["categories"]
    if not isinstance(categories, list) or not all(isinstance(each, dict) for each in categories):
        raise DataError(f"{split.annotations}: expected categories to be a list of objects; run bucketrank check-data")
    if categories and all("frequency" in category for category in categories):
        return "LVIS"
    names = {str(each.get("name")) for each in categories}
    return "Cityscapes" if names == set(CITYSCAPES.values()) else "COCO"


def commands(plan: Plan) -> list[str]:
    """Every training as a command; where a learning rate is to be chosen, with the recipe's own."""
    found: dict[str, str] = {}
    for row in plan.families():
        found |= {trial.name: trial.command for trial in plan.trials(row) if len(plan.factors) > 1}
    for seed in range(plan.seeds):
        for row in plan.rows:
            each = plan.run(row, rate=plan.usual_rate(row), seed=seed)
            found.setdefault(each.name, each.command)
    return list(found.values())


def write(outcome: Outcome) -> None:
    """The tables and the figures, into the study's folder."""
    out, name = outcome.plan.out, outcome.plan.study.name
    out.mkdir(parents=True, exist_ok=True)
    figures = draw(outcome, out)
    write_text(out / f"{name}.md", to_markdown(outcome, figures))
    write_text(out / f"{name}.csv", to_csv(outcome))
    write_text(out / f"{name}.tex", to_latex(outcome))
    write_text(out / f"{name}.json", to_json(outcome))


def show(outcome: Outcome, console: Console) -> None:
    """The table and the claims, in the terminal."""
    table = Table(*head(outcome), title=outcome.plan.study.title, title_justify="left", title_style="bold")
    for number, each in enumerate(outcome.results):
        if number and each.row.detector != outcome.results[number - 1].row.detector:
            table.add_section()
        table.add_row(*cells(outcome, each), style="bold" if each.row.method == "exact" else "")
    console.print(table)
    say = _teller(console)
    for line in notes(outcome):
        say(line)
    for claim in claims(outcome):
        say(f"{VERDICTS[claim.holds]:>14}  {claim.detector}: {claim.claim}: {claim.measured}")
    say(f"Written: {outcome.plan.out / outcome.plan.study.name}.md, .csv, .tex, .json and figures")


def _medians(found: dict[str, Measured]) -> dict[str, float]:
    return {key: median(each.values()) for one in found.values() for key, each in one.samples.items()}


def _teller(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)
