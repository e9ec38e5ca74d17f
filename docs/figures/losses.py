"""AP over steps, rates and empty images, and the regret over all data sets: python -m docs.figures.losses.

The files ``losses-atss*.json`` of the assets are each the ``losses.json`` of a ``python -m benchmarks study losses``.
The curves come from the first of them, the regret from all. Runs whose rates were chosen by longer trials, in
``losses-trials-300-*.json``, replace the others.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.study.grid import LOSS_TITLES
from benchmarks.study.regret import FigureColours, Regret, compute_regret, draw_regret, read_runs
from docs.figures.regimes import over_empty, read_empty
from docs.figures.theme import ASSETS, Palette, save

STUDY = ASSETS / "losses-atss.json"
STUDIES = sorted(ASSETS.glob("losses-atss*.json"), key=lambda path: (len(path.name), path.name))
LONGER_TRIALS = sorted(ASSETS.glob("losses-trials-300-*.json"))
NAMES = {
    "bccd": "blood cells",
    "road_signs": "road signs",
    "nuclei": "nuclei",
    "cacao": "cacao",
    "apples": "apples",
    "raccoon": "raccoon",
}
SIZE = (3.1, 2.6)  # inches; three of them stand in a row, or below each other on a phone
DRAWN = ("rs", "focal", "qfl", "vfl", "bce")  # RS and its rivals, in the order of the legend; the tables have more


def with_longer_trials(of_set: dict[str, Any]) -> dict[str, Any]:
    """Replace the losses whose rates were chosen by longer trials."""
    sets = [each for path in LONGER_TRIALS for each in json.loads(path.read_text(encoding="utf-8"))["sets"]]
    longer = {entry["loss"]: entry for each in sets if each["data"] == of_set["data"] for entry in each["losses"]}
    return of_set | {"losses": [longer.get(entry["loss"], entry) for entry in of_set["losses"]]}


def colour(loss: str, palette: Palette) -> str:
    """Return the colour of a loss; the same in all figures."""
    return dict(zip(DRAWN, (*palette.series, palette.rival, palette.point), strict=True))[loss]


def over_steps(data: dict[str, Any], palette: Palette) -> Figure:
    """Draw the mean AP over the seeds at each evaluation, and the range of the seeds as a band."""
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    curves = {entry["loss"]: entry["curve"] for entry in data["losses"]}
    for loss in (loss for loss in DRAWN if loss in curves):
        steps, aps = curves[loss][0], np.array(curves[loss][1])
        _line(axes, loss, steps, aps.mean(0), palette)
        axes.fill_between(steps, aps.min(0), aps.max(0), color=colour(loss, palette), alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel="AP", xlim=(0, None), ylim=(0, None))
    return _finish(figure, axes, data["data"], legend="lower right")


def over_rates(name: str, trials: list[dict[str, Any]], palette: Palette) -> Figure:
    """Draw the AP of the trials, on held-out training images, over the learning rate."""
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    rates = sorted({trial["lr"] for trial in trials})
    for loss in DRAWN:
        aps = {trial["lr"]: trial["metrics"]["AP"] for trial in trials if trial["loss"] == loss}
        if aps:
            _line(axes, loss, sorted(aps), [aps[rate] for rate in sorted(aps)], palette)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(rates, [f"{1000 * rate:g}" for rate in rates])
    axes.set(xlabel="learning rate, in thousandths", ylabel="AP of a short trial", ylim=(0, None))
    return _finish(figure, axes, name, legend="best")


def regret_figure(regret: Regret, palette: Palette) -> Figure:
    """Draw the regret of every loss, RS in the colour that it has in the curves."""
    return draw_regret(regret, FigureColours(colour("rs", palette), palette.point, palette.text))


def _line(axes: Axes, loss: str, x: Any, y: Any, palette: Palette) -> None:
    width = 2.4 if loss == "rs" else 1.4
    axes.plot(x, y, color=colour(loss, palette), marker="o", markersize=3, linewidth=width, label=LOSS_TITLES[loss])


def _finish(figure: Figure, axes: Axes, title: str, *, legend: Literal["best", "lower right"]) -> Figure:
    axes.set_title(NAMES[title], fontsize=10, loc="left", fontweight="bold")
    axes.legend(loc=legend, fontsize=8)
    return figure


if __name__ == "__main__":
    study = json.loads(STUDY.read_text(encoding="utf-8"))
    for each in study["sets"]:
        name = each["data"]
        save(f"losses-steps-{name.replace('_', '-')}", partial(over_steps, with_longer_trials(each)))
        of_set = [trial for trial in study["trials"] if trial["data"] == name and trial["usual_boxes"]]
        save(f"losses-rates-{name.replace('_', '-')}", partial(over_rates, name, of_set))
    save("losses-empty", partial(over_empty, read_empty()))
    save("losses-regret", partial(regret_figure, compute_regret(read_runs([*STUDIES, *LONGER_TRIALS]))))
