"""The study ``regret``: how far each loss ends behind the best loss of a data set, over many data sets.

The regret of a loss on a data set is the best mean AP of any loss minus its own; 0 is best. The worst and the mean
regret over the data sets say what always taking this loss may cost. The runs come from the ``losses.json`` files
of finished studies.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from benchmarks.documents import markdown_table
from benchmarks.figures import save_figure
from benchmarks.study.grid import LOSS_TITLES, OURS
from benchmarks.study.losses import QUARTER, step_at
from benchmarks.study.runs import RunRecord, StudyError, read_records
from benchmarks.study.tables import DASH
from bucketrank.evaluation.bootstrap import Values
from bucketrank.output import BLUE, GREY, INK, STYLE
from bucketrank.weights.atomic import write_text

NUM_REPLICATES = 10_000
LEVEL = 95  # per cent of the replicates in an interval


class RunKey(NamedTuple):
    """What a run was trained on and with, from its command."""

    recipe: str
    data: str
    loss: str
    seed: int

    @classmethod
    def of(cls, record: RunRecord) -> RunKey:
        """Parse the command of a record; StudyError if it is not one of ``study losses``."""
        _, _, recipe, *words = shlex.split(record.command)
        values = dict(zip(words[::2], words[1::2], strict=False))
        try:
            return cls(recipe, values["--data"], values["--loss"], int(values["--trainer.seed"]))
        except (KeyError, ValueError) as error:
            raise StudyError(
                f"--merge: {record.name}: expected a run of study losses, got another; leave its file out"
            ) from error


@dataclass(frozen=True)
class SetRuns:
    """The runs of all compared losses on one data set, at one fraction of the steps.

    ``aps`` (losses, seeds) are the APs on all validation images, ``draws`` (losses, seeds, B) those in bootstrap draws
    of the images. Draw b has the same images for all losses and seeds.
    """

    data: str
    seeds: tuple[int, ...]
    step: int
    aps: Values
    draws: Values

    def replicates(self, random: np.random.Generator, count: int) -> Values:
        """Return the mean APs over seeds (losses, count) as they vary with images and seeds.

        Images are drawn with replacement, the same for all losses. The noise of the seeds has Student's distribution,
        with one deviation for all losses, because three seeds say too little about that of a single loss. What a seed
        changes for all losses alike is no noise.
        """
        usable = np.isfinite(self.draws).all((0, 1))  # a draw may contain no object
        if not usable.any():
            return np.full((len(self.aps), count), np.nan)
        draws = self.draws[..., usable].mean(1)
        images = draws[:, random.integers(draws.shape[1], size=count)] - draws.mean(1, keepdims=True)
        means = self.aps.mean(1, keepdims=True)
        replicates: Values = means + images
        if freedom := (self.aps.shape[0] - 1) * (self.aps.shape[1] - 1):
            rest = self.aps - means - self.aps.mean(0) + self.aps.mean()
            deviation = np.sqrt((rest**2).sum() / freedom / len(self.seeds))
            replicates += deviation * random.standard_t(freedom, images.shape)
        return replicates


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, and its range if any one data set is left out (None for a single set)."""

    value: float
    low: float
    high: float
    without_one: tuple[float, float] | None

    def cell(self) -> str:
        """Format the value with its interval."""
        return f"{self.value:.1f} ({self.low:.1f} to {self.high:.1f})"

    def range_cell(self) -> str:
        """Format the range if one set is left out."""
        return DASH if self.without_one is None else "{:.1f} to {:.1f}".format(*self.without_one)


@dataclass(frozen=True)
class LossRegret:
    """The regret of one loss: by data set, the worst and the mean.

    ``smallest_worst`` and ``smallest_mean`` are the shares of the replicates in which no other loss has a smaller one.
    """

    loss: str
    by_set: dict[str, float]
    worst: Estimate
    mean: Estimate
    smallest_worst: float
    smallest_mean: float


@dataclass(frozen=True)
class Regret:
    """The regret of all losses at the end and at a quarter of the steps; ``left_out`` lack runs on some data set."""

    end: tuple[LossRegret, ...]
    quarter: tuple[LossRegret, ...]
    sets: dict[str, tuple[int, ...]]  # seeds by data set
    steps: dict[str, tuple[int, int]]  # evaluations by data set: nearest to a quarter, and the last
    left_out: tuple[str, ...] = ()


def read_runs(files: Sequence[Path]) -> dict[RunKey, RunRecord]:
    """Read the final runs in the files of ``study losses``; runs of later files replace those of earlier ones.

    Raises StudyError if they do not fit together.
    """
    runs: dict[RunKey, RunRecord] = {}
    for file in files:
        for name, record in read_records(file).items():
            if not name.endswith("-trial"):
                runs[RunKey.of(record)] = record
    if not runs:
        raise StudyError("--merge: expected finished runs of study losses, got none; train them first")
    if len(recipes := sorted({key.recipe for key in runs})) > 1:
        raise StudyError(f"--merge: expected runs of one recipe, got {', '.join(recipes)}; leave the others out")
    return runs


def compute_regret(runs: Mapping[RunKey, RunRecord]) -> Regret:
    """Compute the regret of every loss that has runs on every data set.

    On a data set, the seeds that all these losses have in common count.
    """
    by_set = _by_set(runs)
    losses, every = _common_losses(by_set), list(dict.fromkeys(key.loss for key in runs))
    early, late = (
        [_set_runs(data, {loss: of_set[loss] for loss in losses}, share) for data, of_set in by_set.items()]
        for share in (QUARTER, 1.0)
    )
    return Regret(
        end=_regrets(losses, late),
        quarter=_regrets(losses, early),
        sets={each.data: each.seeds for each in late},
        steps={first.data: (first.step, last.step) for first, last in zip(early, late, strict=True)},
        left_out=tuple(loss for loss in every if loss not in losses),
    )


def regret_after(runs: Mapping[RunKey, RunRecord], step: int) -> tuple[tuple[LossRegret, ...], dict[str, int]]:
    """Compute the regrets at the evaluations nearest to a step, and return these by data set.

    The intervals are over seeds alone: records have bootstrap draws of the images only at a quarter and at the end.
    """
    by_set = _by_set(runs)
    losses = _common_losses(by_set)
    sets = []
    for data, of_set in by_set.items():
        seeds, chosen, steps = _matched(data, {loss: of_set[loss] for loss in losses})
        position = min(range(len(steps)), key=lambda number: abs(steps[number] - step))
        aps = np.array([[record.curve[1][position] for record in of_loss] for of_loss in chosen])
        sets.append(SetRuns(data, seeds, steps[position], aps, aps[..., None]))
    return _regrets(losses, sets), {each.data: each.step for each in sets}


def _by_set(runs: Mapping[RunKey, RunRecord]) -> dict[str, dict[str, dict[int, RunRecord]]]:
    by_set: dict[str, dict[str, dict[int, RunRecord]]] = {}
    for key, record in runs.items():
        by_set.setdefault(key.data, {}).setdefault(key.loss, {})[key.seed] = record
    return by_set


def _common_losses(by_set: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return the losses with runs on every data set; StudyError if there are fewer than two."""
    every = dict.fromkeys(loss for of_set in by_set.values() for loss in of_set)
    losses = [loss for loss in every if all(loss in of_set for of_set in by_set.values())]
    if len(losses) < 2:
        raise StudyError(
            f"--merge: expected at least two losses with runs on all of {', '.join(by_set)}, got {len(losses)}"
        )
    return losses


def _matched(
    data: str, records: Mapping[str, Mapping[int, RunRecord]]
) -> tuple[tuple[int, ...], list[list[RunRecord]], list[int]]:
    """Return the seeds that all losses have, their records (losses, seeds), and the steps of their evaluations."""
    seeds = sorted(set.intersection(*(set(of_loss) for of_loss in records.values())))
    if not seeds:
        raise StudyError(f"--merge: {data}: expected a seed that all losses have, got none; train the missing runs")
    chosen = [[of_loss[seed] for seed in seeds] for of_loss in records.values()]
    evaluations = {tuple(record.curve[0]) for of_loss in chosen for record in of_loss}
    if len(evaluations) > 1:
        lengths = ", ".join(str(steps[-1]) for steps in sorted(evaluations))
        raise StudyError(
            f"--merge: {data}: expected runs of one length with the same evaluations, got runs that end after "
            f"{lengths} steps; leave one of the files out"
        )
    (steps,) = evaluations
    return tuple(seeds), chosen, list(steps)


def _set_runs(data: str, records: Mapping[str, Mapping[int, RunRecord]], share: float) -> SetRuns:
    seeds, chosen, steps = _matched(data, records)
    step = step_at(steps, share)
    for record in (each for of_loss in chosen for each in of_loss):
        if step not in record.bootstrap:
            raise StudyError(
                f"--merge: {record.name}: expected bootstrap draws after step {step}, got none; train it again"
            )
    position = steps.index(step)
    aps = np.array([[record.curve[1][position] for record in of_loss] for of_loss in chosen])
    draws = np.array([[record.bootstrap[step].draws for record in of_loss] for of_loss in chosen])
    return SetRuns(data, seeds, step, aps, draws)


def _regrets(losses: Sequence[str], sets: Sequence[SetRuns]) -> tuple[LossRegret, ...]:
    """Compute the regrets of all losses; in each replicate, the best loss of a set is the best one of that replicate.

    Images and seeds are drawn independently for each data set.
    """
    random = np.random.default_rng(0)
    values = np.array([_behind(each.aps.mean(1)) for each in sets])  # (sets, losses)
    drawn = np.array([_behind(each.replicates(random, NUM_REPLICATES)) for each in sets])  # (sets, losses, replicates)
    regrets = []
    for number, loss in enumerate(losses):
        own = values[:, number]
        others = [np.delete(own, left_out) for left_out in range(len(own))] if len(own) > 1 else []
        worst, mean = (
            Estimate(
                float(summary(own)),
                *_interval(float(summary(own)), summary(drawn[:, number], axis=0)),
                _range([float(summary(each)) for each in others]),
            )
            for summary in (np.max, np.mean)
        )
        by_set = {each.data: float(value) for each, value in zip(sets, own, strict=True)}
        smallest = (float((of_all[number] <= of_all.min(0)).mean()) for of_all in (drawn.max(0), drawn.mean(0)))
        regrets.append(LossRegret(loss, by_set, worst, mean, *smallest))
    return tuple(regrets)


def _behind(aps: Values) -> Values:
    """Compute how far each loss (first axis) is behind the best."""
    behind: Values = aps.max(0) - aps
    return behind


def _interval(regret: float, replicates: NDArray[np.float64]) -> tuple[float, float]:
    """Return an interval around a regret, from the upper end of its replicates mirrored at it to that upper end.

    Noise moves a regret up, because it is never negative, and the replicates once more. Percentiles on both sides would
    therefore lie above the true regret most of the time.
    """
    high = float(np.percentile(replicates, (100 + LEVEL) / 2))
    return max(0.0, 2 * regret - high), high


def _range(values: Sequence[float]) -> tuple[float, float] | None:
    return (min(values), max(values)) if values else None


def title_of(data: str) -> str:
    """Return the name of a data set in tables."""
    return data.replace("_", " ").replace("-", " ")


def set_rows(regret: Regret) -> list[list[str]]:
    """Return one row per loss: its regret on every data set, the worst and the mean."""
    numbers = {each.loss: (*each.by_set.values(), each.worst.value, each.mean.value) for each in regret.end}
    return [[LOSS_TITLES[loss], *(f"{value:.1f}" for value in of_loss)] for loss, of_loss in numbers.items()]


SUMMARY_COLUMNS = (
    *("worst (95 %)", "without one set", "smallest in", "mean (95 %)", "without one set", "smallest in"),
    *("at a quarter: worst (95 %)", "mean (95 %)"),
)


def summary_rows(regret: Regret) -> list[list[str]]:
    """Return one row per loss: the cells of SUMMARY_COLUMNS after its title."""
    return [
        [
            LOSS_TITLES[late.loss],
            *(late.worst.cell(), late.worst.range_cell(), f"{late.smallest_worst:.0%}"),
            *(late.mean.cell(), late.mean.range_cell(), f"{late.smallest_mean:.0%}"),
            *(early.worst.cell(), early.mean.cell()),
        ]
        for late, early in zip(regret.end, regret.quarter, strict=True)
    ]


def to_markdown(regret: Regret) -> str:
    """Return the page: one table, how it was computed, and the figure."""
    names = [title_of(data) for data in regret.sets]
    table = [
        [row[0], *per_set[1 : 1 + len(names)], *row[1:]]
        for row, per_set in zip(summary_rows(regret), set_rows(regret), strict=True)
    ]
    seeds = ", ".join(
        f"{title_of(data)} {len(of_set)} ({regret.steps[data][1]:,} steps, a quarter: {regret.steps[data][0]:,})"
        for data, of_set in regret.sets.items()
    )
    lines = [
        "# Regret: AP behind the best loss",
        "",
        markdown_table(["loss", *names, *SUMMARY_COLUMNS], table),
        "",
        "Regret is the best mean AP of any loss on a data set minus this loss's; small is good. Intervals: "
        f"{NUM_REPLICATES:,} draws of images, the same for all losses, with noise of the seeds; the best loss of a set "
        "is chosen in each draw; *smallest in* is the share of draws in which no other loss has a smaller one. A "
        "regret is never negative, so noise moves it up, and the draws once more: the lower end of an interval is the "
        "upper end of the draws, mirrored at the value.",
        "",
        f"Seeds: {seeds}.",
    ]
    if regret.left_out:
        left_out = ", ".join(LOSS_TITLES.get(loss, loss) for loss in regret.left_out)
        lines += ["", f"Left out, because they have no runs on some data set: {left_out}."]
    return "\n".join([*lines, "", "![Regret by loss](regret.svg)", ""])


def to_json(regret: Regret) -> dict[str, Any]:
    """Return all numbers of the page."""
    return {
        **{
            name: [{**vars(each), "worst": vars(each.worst), "mean": vars(each.mean)} for each in regrets]
            for name, regrets in (("end", regret.end), ("quarter", regret.quarter))
        },
        "seeds": regret.sets,
        "steps": regret.steps,
        "left_out": regret.left_out,
    }


class FigureColours(NamedTuple):
    """The colours of the figure: our loss, the others, and text."""

    ours: str = BLUE
    others: str = GREY
    text: str = INK


SIZE = (7.4, 3.6)  # inches


def draw_regret(regret: Regret, colours: FigureColours | None = None) -> Figure:
    """Draw the worst and the mean regret of each loss, with intervals; the loss with the smallest is on top."""
    colours = colours or FigureColours()
    figure = Figure(figsize=SIZE, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    order = sorted(range(len(regret.end)), key=lambda number: regret.end[number].worst.value)
    for axes, title, regrets in zip(
        panels, ("at the end", "after a quarter of the steps"), (regret.end, regret.quarter), strict=True
    ):
        for place, number in enumerate(order):
            each = regrets[number]
            colour = colours.ours if each.loss == OURS else colours.others
            _draw_estimate(axes, place - 0.17, each.worst, colour, marker="o")
            _draw_estimate(axes, place + 0.2, each.mean, colour, marker="D")
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=colours.text)
        axes.set(xlabel="AP behind the best loss", xlim=(0, None))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
    panels[0].set_yticks(range(len(order)), [LOSS_TITLES[regret.end[number].loss] for number in order])
    panels[0].set_ylim(len(order) - 0.5, -0.5)
    entries = [
        Line2D([], [], color=colours.text, marker="o", markersize=6, linewidth=1, label="worst set"),
        Line2D(
            *([], []), color=colours.text, marker="D", markersize=4.5, markerfacecolor="none", linewidth=1, label="mean"
        ),
        Line2D([], [], color=colours.text, linewidth=1, label="95 % interval"),
        Line2D([], [], color=colours.text, linewidth=5, alpha=0.35, label="one set left out"),
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _draw_estimate(axes: Axes, y: float, estimate: Estimate, colour: str, *, marker: str) -> None:
    if estimate.without_one is not None:
        axes.plot(estimate.without_one, (y, y), color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
    axes.plot((estimate.low, estimate.high), (y, y), color=colour, linewidth=1)
    filled = marker == "o"
    size, face = (6, colour) if filled else (4.5, "none")
    axes.plot([estimate.value], [y], marker=marker, color=colour, markersize=size, markerfacecolor=face, clip_on=False)


def run_regret(files: Sequence[Path], out: Path) -> list[Path]:
    """Write ``regret.md``, ``regret.json`` and the figure to the folder ``out``; return the paths."""
    regret = compute_regret(read_runs(files))
    out.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figures = save_figure(draw_regret(regret), out, "regret")
    write_text(out / "regret.md", to_markdown(regret))
    write_text(out / "regret.json", json.dumps(to_json(regret), indent=1) + "\n")
    return [out / "regret.md", out / "regret.json", *figures]
