"""The results of a study: the table with the paper's numbers, the verdicts on the claims, and the figures.

Tables are written as Markdown, CSV, LaTeX and JSON.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.documents import markdown_table
from benchmarks.figures import LOSS_COLOURS, save_figure
from benchmarks.study.grid import SCORED, Row
from benchmarks.study.plan import Arm, PaperPlan, scored
from benchmarks.study.runs import RunRecord, StudyRun
from benchmarks.study.steps import StepMeasurements
from benchmarks.timing import Samples, Spread, ratio
from bucketrank.output import STYLE
from bucketrank.settings.paper import paper_rows


@dataclass(frozen=True)
class SeedMean:
    """The mean and the standard deviation over seeds; the deviation of a single seed is NaN."""

    mean: float
    deviation: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> SeedMean:
        """Return the mean of ``values`` with the deviation of the sample.

        >>> SeedMean.of([40.0, 42.0])
        SeedMean(mean=41.0, deviation=1.414..., values=(40.0, 42.0))
        """
        known = len(values) > 1 and not any(map(math.isnan, values))
        deviation = statistics.stdev(values) if known else math.nan
        return cls(statistics.fmean(values), deviation, tuple(values))


@dataclass(frozen=True)
class RowResult:
    """A row with its learning ``rate`` and its finished ``runs``.

    ``seconds`` is the time per step, ``to_scored`` its ratio to the score-based loss on the same detector. ``paper``
    holds the paper's numbers for the row: its APs and seconds.
    """

    row: Row
    rate: float | None
    runs: tuple[StudyRun, ...]
    paper: dict[str, float]
    seconds: float | None = None
    to_scored: Spread | None = None

    def mean(self, metric: str = "AP") -> SeedMean | None:
        """Return the mean of a metric over the seeds; None without a finished run."""
        return SeedMean.of([run.metric(metric) for run in self.runs]) if self.runs else None

    @property
    def scored(self) -> bool:
        """Whether the loss is score-based, not ranking-based."""
        return self.row.loss in SCORED

    @property
    def epochs(self) -> int | None:
        """The epochs of the runs; None without a finished run."""
        return self.runs[0].load().schedule.epochs if self.runs else None


@dataclass(frozen=True)
class StudyOutcome:
    """The plan of a study with its results, step measurements by detector, and failed runs by name."""

    plan: PaperPlan
    results: tuple[RowResult, ...]
    measured: dict[str, StepMeasurements]
    failed: dict[str, str]

    def of(self, detector: str) -> list[RowResult]:
        """Return the results of one detector."""
        return [result for result in self.results if result.row.detector == detector]

    @property
    def detectors(self) -> list[str]:
        """The detectors, in the order of the table."""
        return list(dict.fromkeys(result.row.detector for result in self.results))

    @property
    def missing(self) -> int:
        """The number of runs that are not finished."""
        return sum(self.plan.seeds - len(result.runs) for result in self.results)


def collect(plan: PaperPlan, measured: dict[str, StepMeasurements], failed: dict[str, str]) -> StudyOutcome:
    """Collect the results of all finished runs."""
    return StudyOutcome(plan, tuple(_result(plan, arm, measured) for arm in plan.arms), measured, failed)


def _result(plan: PaperPlan, arm: Arm, measured: dict[str, StepMeasurements]) -> RowResult:
    row, choice = arm.row, plan.chosen(arm)
    runs = tuple(run for run in plan.runs(arm) if run.finished)
    return RowResult(row, choice and choice.rate, runs, published(row), *_seconds(plan, row, runs, measured))


def _seconds(
    plan: PaperPlan, row: Row, runs: Sequence[StudyRun], measured: dict[str, StepMeasurements]
) -> tuple[float | None, Spread | None]:
    """Return the seconds per step and their ratio to the score-based row.

    Without a step measurement, the seconds are those that the runs logged, without a ratio.
    """
    samples: dict[str, Samples] = measured[row.detector].samples if row.detector in measured else {}
    if row.key in samples:
        other = scored(plan.rows, row)
        to_scored = None if other is None or other.key not in samples else ratio(samples[row.key], samples[other.key])
        return Spread.of(list(samples[row.key].values())).median, to_scored
    # The first logged interval is left out: it includes loading and compiling.
    logged = [seconds for run in runs for count, seconds in run.step_seconds()[1:] for _ in range(count)]
    return (statistics.median(logged) if logged else None), None


def published(row: Row) -> dict[str, float]:
    """Return the paper's numbers for the row; empty for exact losses, which the paper does not have."""
    return next((dict(published.numbers) for published in paper_rows() if row.paper == published.recipe), {})


SAME_GRADIENT = 1e-4  # maximum relative difference that float32 rounding explains in a whole detector
AS_LONG = 1.05  # maximum time ratio to the score-based loss


@dataclass(frozen=True)
class Claim:
    """A claim about a detector, the measured numbers, and whether the claim holds; None if they are inconclusive."""

    claim: str
    detector: str
    measured: str
    holds: bool | None


def claims(outcome: StudyOutcome) -> list[Claim]:
    """Return every claim for which the results have numbers."""
    answers = []
    for detector in outcome.detectors:
        results = outcome.of(detector)
        rows = {(result.row.loss, result.row.method): result for result in results if result.row.like is None}
        pairwise = rows.get(("rs", "pairwise"))
        for loss in ("rs", "ap"):
            if (loss, "exact") in rows and (loss, "pairwise") in rows:
                answers += _exact_is_pairwise(outcome, rows[loss, "exact"], rows[loss, "pairwise"])
        ranking = rows.get(("rs", "exact")) or rows.get(("rs", "bucketed"))
        scored = next((result for result in rows.values() if result.scored), None)
        if ranking and scored:
            answers += [*_more_accurate(ranking, scored), *_as_fast(ranking)]
        if pairwise:
            answers += [claim for result in results for claim in _longer_is_better(result, pairwise)]
    return answers


def _exact_is_pairwise(outcome: StudyOutcome, exact: RowResult, pairwise: RowResult) -> list[Claim]:
    detector, loss = exact.row.detector, exact.row.loss
    answers = []
    difference = outcome.measured[detector].gradients.get(loss) if detector in outcome.measured else None
    if difference is not None:
        claim = f"{loss.upper()}: the gradients of exact equal those of pairwise"
        measured = f"largest difference {difference:.1e} of the largest entry, in the first step"
        answers.append(Claim(claim, detector, measured, difference < SAME_GRADIENT))
    exact_ap, pairwise_ap = exact.mean(), pairwise.mean()
    if exact_ap and pairwise_ap:
        claim = f"{loss.upper()}: exact and pairwise end with the same AP, within seed noise"
        gain, noise = exact_ap.mean - pairwise_ap.mean, _noise(exact_ap, pairwise_ap)
        measured = f"{exact_ap.mean:.1f} and {pairwise_ap.mean:.1f} AP: {gain:+.1f}"
        if math.isnan(noise):
            answers.append(Claim(claim, detector, f"{measured}; a single seed has no deviation", None))
        else:
            measured += f"; the seeds' deviation is {noise:.1f}"
            answers.append(Claim(claim, detector, measured, abs(gain) <= 2 * noise))
    return answers


def _noise(one: SeedMean, other: SeedMean) -> float:
    """Compute the standard deviation of a difference between two means."""
    return math.sqrt(one.deviation**2 / len(one.values) + other.deviation**2 / len(other.values))


def _more_accurate(ranking: RowResult, scored: RowResult) -> list[Claim]:
    ranking_ap, scored_ap = ranking.mean(), scored.mean()
    if not (ranking_ap and scored_ap):
        return []
    theirs = {run.seed: run.metric() for run in scored.runs}
    pairs = [(run.metric(), theirs[run.seed]) for run in ranking.runs if run.seed in theirs]
    wins = sum(ranked > by_score for ranked, by_score in pairs)
    measured = f"{ranking_ap.mean:.1f} against {scored_ap.mean:.1f} AP ({scored.row.title})"
    measured += f"; ahead with {wins} of {len(pairs)} seeds"
    holds = wins == len(pairs) if len(pairs) > 1 else None  # one seed may be chance
    claim = "the ranking loss ends with more AP than the score-based one"
    return [Claim(claim, ranking.row.detector, measured, holds)]


def _as_fast(ranking: RowResult) -> list[Claim]:
    ratio = ranking.to_scored
    if ratio is None:
        return []
    claim = f"training takes as long as with the score-based loss (at most {AS_LONG:g} times)"
    measured = f"{ratio.median:.2f} times its time per step (quartiles {ratio.low:.2f} to {ratio.high:.2f})"
    return [Claim(claim, ranking.row.detector, measured, ratio.median <= AS_LONG)]


def _longer_is_better(result: RowResult, pairwise: RowResult) -> list[Claim]:
    longer_ap, pairwise_ap = result.mean(), pairwise.mean()
    if result.row.like is None or not (longer_ap and pairwise_ap):
        return []
    claim = f"{result.row.title}: more epochs in the time saved give more AP"
    measured = f"{longer_ap.mean:.1f} AP after {result.epochs} epochs"
    measured += f", {pairwise_ap.mean:.1f} after {pairwise.epochs} by pairwise"
    holds = longer_ap.mean > pairwise_ap.mean if result.epochs != pairwise.epochs else None
    return [Claim(claim, result.row.detector, measured, holds)]


DASH = "\N{EN DASH}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
VERDICTS = {True: "yes", False: "no", None: "inconclusive"}


def column_names(outcome: StudyOutcome) -> list[str]:
    """Return the names of the columns; #H is the number of hyper-parameters, T_iter the seconds per step."""
    counted = ["#H"] if outcome.plan.study.counted else []
    metrics = outcome.plan.study.metrics
    ours = ["epochs", "lr", "T_iter (s)", "to score-based", *metrics]
    return ["detector", "loss", *counted, *ours, "paper's T_iter", *(f"paper's {name}" for name in metrics)]


def row_cells(outcome: StudyOutcome, result: RowResult) -> list[str]:
    """Return the cells of one row."""
    counted = [_or_dash(result.row.hyperparameters)] if outcome.plan.study.counted else []
    metrics = outcome.plan.study.metrics
    return [
        result.row.detector,
        result.row.title,
        *counted,
        _or_dash(result.epochs),
        DASH if result.rate is None else f"{result.rate:g}",
        DASH if result.seconds is None else f"{result.seconds:.2f}",
        DASH if result.to_scored is None else f"{result.to_scored.median:.2f}",
        *(_mean_cell(result.mean(name)) for name in metrics),
        _or_dash(result.paper.get("seconds"), ".2f"),
        *(_or_dash(result.paper.get(name), ".1f") for name in metrics),
    ]


def with_deviation(mean: float, deviation: float) -> str:
    """Format a mean with its deviation, unless that is NaN.

    >>> with_deviation(41.26, 0.51), with_deviation(41.26, math.nan)
    ('41.3 \N{PLUS-MINUS SIGN} 0.5', '41.3')
    """
    return f"{mean:.1f}" if math.isnan(deviation) else f"{mean:.1f} {PLUS_MINUS} {deviation:.1f}"


def _mean_cell(mean: SeedMean | None) -> str:
    """Format a mean; a dash without finished runs, or if the data has no object of that size."""
    return DASH if mean is None or math.isnan(mean.mean) else with_deviation(mean.mean, mean.deviation)


def _or_dash(value: float | None, form: str = "") -> str:
    return DASH if value is None else format(value, form)


def to_markdown(outcome: StudyOutcome, figures: Sequence[tuple[str, str]]) -> str:
    """Format the study as Markdown: table, notes, claims, figures and failed runs."""
    plan, study = outcome.plan, outcome.plan.study
    lines = [f"# {study.title}", "", f"The study `{study.name}`: {study.tables} of the paper.", ""]
    rows = [row_cells(outcome, result) for result in outcome.results]
    lines += [markdown_table(column_names(outcome), rows), ""]
    if study.others and plan.paper:
        others = [[name, *(f"{value:.1f}" for value in values)] for name, values in study.others.items()]
        lines += [
            "Published by others, not trained here:",
            "",
            markdown_table(["detector", *study.metrics], others),
            "",
        ]
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
    """Write notes on how the numbers were obtained."""
    plan = outcome.plan
    seeds = f"mean {PLUS_MINUS} deviation over {plan.seeds} seeds" if plan.seeds > 1 else "one seed"
    metric = "masks where the detector has them, otherwise of boxes"
    sentences = [f"AP of {metric}, in per cent, after the last epoch; {seeds}.", *_mask_ap(outcome)]
    if plan.trials_per_family:
        tried = ", ".join(f"{factor:g}" for factor in plan.factors)
        sentences.append(
            f"Learning rate: for every loss the best of the recipe's times {tried}, by AP on held-out "
            "training images; the methods of a loss share it."
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


def _mask_ap(outcome: StudyOutcome) -> list[str]:
    """Return a sentence with the mask AP of rows for which the paper has the AP of boxes; nothing without such rows."""
    boxed = [(result, result.mean("mask AP")) for result in outcome.results if result.row.of_boxes]
    known = [f"{result.row.title} {_mean_cell(mean)}" for result, mean in boxed if mean and not math.isnan(mean.mean)]
    return [f"Here the AP is that of boxes, like the paper's. Mask AP: {', '.join(known)}."] if known else []


def _origin(outcome: StudyOutcome) -> list[str]:
    """Return a sentence with the data, machines and commits of the runs; nothing without a finished run."""
    runs = [run.environment for result in outcome.results for run in result.runs]
    if not runs:
        return []
    commits = sorted({_commit(machine) for machine in runs})
    machines = sorted({_processor(machine) for machine in runs})
    timers = [outcome.measured[detector].machine for detector in outcome.detectors if detector in outcome.measured]
    timed = sorted({f"{_threads(machine)}, {_commit(machine)}" for machine in timers})
    steps = f" Steps timed with {'; '.join(timed)}." if timed else ""
    data = outcome.plan.data.name
    return [f"Data: `{data}`. Trained on {'; '.join(machines)}; {', '.join(commits)}.{steps}"]


def _processor(machine: Mapping[str, Any]) -> str:
    """Return the processor with its cores and threads, which the record of a merged run does not hold."""
    if "cores" not in machine:
        return str(machine["processor"])
    return f"{machine['processor']}, {machine['cores']} cores, {_threads(machine)}"


def _threads(machine: Mapping[str, Any]) -> str:
    count = machine["torch_threads"]
    return f"{count} thread{'s' * (count != 1)}"


def _commit(machine: Mapping[str, Any]) -> str:
    if machine["commit"] is None:
        return "no commit"
    return f"commit {machine['commit'][:7]}" + (" with local changes" if machine["modified"] else "")


def to_csv(outcome: StudyOutcome) -> str:
    """Format one CSV line per row, with plain numbers."""
    text = io.StringIO()
    metrics = outcome.plan.study.metrics
    spread = [f"{name} {part}" for name in metrics for part in ("mean", "deviation")]
    names = ["detector", "loss", "method", "hyperparameters", "epochs", "lr", "seeds", "seconds", "to_scored", *spread]
    paper = ["paper_seconds", *(f"paper_{name}" for name in metrics)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *paper])
    for result in outcome.results:
        means = [result.mean(name) for name in metrics]
        numbers = [number for mean in means for number in ((mean.mean, mean.deviation) if mean else (None, None))]
        row, ratio = result.row, result.to_scored.median if result.to_scored else None
        settings = [row.detector, row.loss, row.method, row.hyperparameters, result.epochs, result.rate]
        published = [result.paper.get("seconds"), *(result.paper.get(name) for name in metrics)]
        measured = map(_number, [result.seconds, ratio, *numbers])
        writer.writerow([*settings, len(result.runs), *measured, *published])
    return text.getvalue()


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.6g}"


def to_latex(outcome: StudyOutcome) -> str:
    """Format a LaTeX table with a rule between detectors."""
    groups = [[row_cells(outcome, result) for result in outcome.of(detector)] for detector in outcome.detectors]
    return latex_table(outcome.plan.study.title, column_names(outcome), groups)


def to_json(outcome: StudyOutcome) -> str:
    """Return all rows with the names of their runs, and the records of all finished trials and runs."""
    plan = outcome.plan
    rows = [
        {
            "detector": result.row.detector,
            "loss": result.row.loss,
            "method": result.row.method,
            "lr": result.rate,
            "seconds": result.seconds,
            "paper": result.paper,
            "runs": [run.name for run in result.runs],
        }
        for result in outcome.results
    ]
    trials = [trial for arm in plan.families() for trial in plan.trials(arm) if trial.finished]
    runs = [run for result in outcome.results for run in result.runs]
    document = {
        "study": plan.study.name,
        "rows": rows,
        "claims": [vars(claim) for claim in claims(outcome)],
        "failed": outcome.failed,
        "trials": [RunRecord.of(trial).to_json() for trial in trials],
        "runs": [RunRecord.of(run).to_json() for run in runs],
    }
    return json.dumps(document, indent=1) + "\n"


SYMBOLS = {
    "\N{PLUS-MINUS SIGN}": r"$\pm$",
    "\N{EN DASH}": "--",
    "\N{ALMOST EQUAL TO}": r"$\approx$",
    "\N{MICRO SIGN}": r"$\mu$",
}
SPECIAL = {"\\": r"\textbackslash{}", **{letter: "\\" + letter for letter in "#_%&${}"}}


def latex_table(title: str, head: Sequence[str], groups: Sequence[Sequence[Sequence[str]]]) -> str:
    r"""Format a LaTeX table with a rule between row groups; it needs the package booktabs.

    >>> print(latex_table("Times", ["loss", "T_iter"], [[["RS", "0.5 %"]]]))
    % Times; needs \usepackage{booktabs}
    \begin{tabular}{lr}
    \toprule
    loss & T\_iter \\
    \midrule
    RS & 0.5 \% \\
    \bottomrule
    \end{tabular}
    <BLANKLINE>
    """
    lines = [
        f"% {title}; needs \\usepackage{{booktabs}}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
    ]
    lines.append(_line(head))
    for group in groups:
        lines += [r"\midrule", *map(_line, group)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(_escape, cells)) + r" \\"


def _escape(text: str) -> str:
    text = "".join(SPECIAL.get(letter, letter) for letter in text)
    return "".join(SYMBOLS.get(letter, letter) for letter in text)


LINES = {"pairwise": ":", "bucketed": "--"}
ALPHAS = {"pairwise": 0.45, "bucketed": 0.7}
PANEL = (4.2, 3.2)  # width and height in inches
MIN_LINE = 3  # evaluations of a run


def draw_study(outcome: StudyOutcome, out: Path) -> list[tuple[str, str]]:
    """Write the figures as PNG and SVG; return the name of each SVG with a caption."""
    captions = []
    with mpl.rc_context(STYLE):
        for name, caption, panel, has_numbers in (
            ("t_iter", "Seconds of a training step by loss", _bars, _timed),
            ("ap_over_steps", "AP over the steps of training", _over_steps, _trained),
            ("ap_over_time", "AP over training time", _over_time, _trained),
        ):
            figure = _panels(outcome, panel, has_numbers)
            if figure is not None:
                save_figure(figure, out, name)
                captions.append((f"{name}.svg", caption))
    return captions


def _timed(result: RowResult) -> bool:
    return result.seconds is not None


def _trained(result: RowResult) -> bool:
    return bool(result.runs)


def _panels(
    outcome: StudyOutcome, panel: Callable[[Axes, Sequence[RowResult]], None], has_numbers: Callable[[RowResult], bool]
) -> Figure | None:
    """Return a figure with one panel per detector; None if no detector has numbers for it."""
    shown = [(name, [result for result in outcome.of(name) if has_numbers(result)]) for name in outcome.detectors]
    shown = [(name, results) for name, results in shown if results]
    if not shown:
        return None
    figure = Figure(figsize=(PANEL[0] * len(shown), PANEL[1]), layout="constrained")
    for axes, (name, results) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.set_title(name, loc="left", fontweight="bold", fontsize=10)
        panel(axes, results)
    return figure


def _bars(axes: Axes, results: Sequence[RowResult]) -> None:
    names = [result.row.title for result in results]
    seconds = [result.seconds or 0.0 for result in results]
    positions = np.arange(len(results))
    colours = [LOSS_COLOURS[result.row.loss] for result in results]
    bars = axes.barh(positions, seconds, color=colours, height=0.65)
    for bar, result in zip(bars, results, strict=True):
        bar.set_alpha(ALPHAS.get(result.row.method, 1.0))
    axes.bar_label(bars, labels=[f"{value:.2f}" for value in seconds], padding=3, fontsize=8)
    axes.set_yticks(positions, names)
    axes.invert_yaxis()
    axes.set(xlabel="seconds per step", xlim=(0, 1.15 * max(seconds)))


def _over_steps(axes: Axes, results: Sequence[RowResult]) -> None:
    _curves(axes, results, lambda result: 1.0)
    axes.set(xlabel="step", ylabel="AP in per cent")


def _over_time(axes: Axes, results: Sequence[RowResult]) -> None:
    _curves(axes, results, lambda result: (result.seconds or 0.0) / 60)
    axes.set(xlabel="training time in minutes (steps times T_iter)", ylabel="AP in per cent")


def _curves(axes: Axes, results: Sequence[RowResult], scale: Callable[[RowResult], float]) -> None:
    """Draw the mean over seeds as a line, and a band from the lowest to the highest seed.

    Fewer than MIN_LINE evaluations are drawn as dots with ranges, because a line would suggest values in between.
    """
    for result in results:
        curves = [run.curve() for run in result.runs]
        steps = np.asarray(curves[0][0]) * scale(result)
        values = np.asarray([curve for _, curve in curves if len(curve) == len(steps)])
        mean, low, high = values.mean(axis=0), values.min(axis=0), values.max(axis=0)
        colour, title = LOSS_COLOURS[result.row.loss], result.row.title
        if len(steps) < MIN_LINE:
            axes.errorbar(steps, mean, [mean - low, high - mean], fmt="o", color=colour, markersize=4, label=title)
            continue
        line = LINES.get(result.row.method, "-")
        axes.plot(steps, mean, line, color=colour, marker="o", markersize=3, label=title)
        if len(values) > 1:
            axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=7, loc="lower right")
