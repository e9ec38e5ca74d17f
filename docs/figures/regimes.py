"""Figure and tables of the regimes on the results page: empty images, look-alikes, rare classes.

The files in the assets are each the ``losses.json`` of a study: ``losses-empty-SET-SHARE.json`` of a data set with that
percentage of empty training images, ``losses-memory-SET-SHARE.json`` of the same with a score memory,
``losses-look-alikes-SET.json`` of one class among others. ``losses-mal-SET.json`` has the trials that chose MAL's rate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from benchmarks.documents import markdown_table
from benchmarks.study.grid import LOSS_TITLES, OURS
from benchmarks.study.losses import difference_cells
from benchmarks.study.regret import RunKey
from benchmarks.study.runs import RunRecord
from benchmarks.study.tables import DASH, SeedMean, with_deviation
from bucketrank.evaluation import Difference, paired_difference
from docs.figures.theme import ASSETS, Palette

EMPTY = re.compile(r"losses-empty-(?P<data>\w+)-(?P<share>\d+)\.json")
LOOK_ALIKES = {"bccd": "platelets among blood cells", "road_signs": "green lights among road signs"}
EMPTY_SETS = {"bccd": "blood cells", "road_signs": "road signs"}  # data sets with empty images
MEMORY_SET = "bccd"
MEMORY_SHARES = (90, 97)  # the percentages of empty images with which a score memory was tried
RARE_SET = "cacao"  # the data set with rare classes
RARE_SIGNS = ("do_not_turn_l", "left_right_lane")  # the classes of road signs with fewer than 10 training objects
SIZE = (4.0, 3.0)  # inches per panel
Study = dict[str, Any]


def read(name: str) -> Study:
    """Read a study in the assets."""
    document: Study = json.loads((ASSETS / f"losses-{name}.json").read_text(encoding="utf-8"))
    return document


def read_empty() -> dict[str, dict[int, Study]]:
    """Read the studies with empty images by data set and percentage, in ascending order."""
    names = [name for path in ASSETS.glob("losses-empty-*.json") if (name := EMPTY.fullmatch(path.name))]
    return {
        data: {
            share: read(f"empty-{data}-{share}")
            for share in sorted(int(name["share"]) for name in names if name["data"] == data)
        }
        for data in EMPTY_SETS
    }


def aps(study: Study) -> dict[str, list[float]]:
    """Return the AP of each seed at the end, by loss, of a study on one data set."""
    (of_set,) = study["sets"]
    return {entry["loss"]: [run[-1] for run in entry["curve"][1]] for entry in of_set["losses"]}


def over_empty(studies: Mapping[str, Mapping[int, Study]], palette: Palette) -> Figure:
    """Draw the AP of each loss over the share of empty images, one panel per data set; bars span the seeds."""
    width, height = SIZE
    size = (width * len(studies), height)
    figure, (panels,) = plt.subplots(1, len(studies), figsize=size, layout="constrained", squeeze=False)
    ours, focal, qfl = palette.series
    styles: dict[str, dict[str, Any]] = {
        "rs": {"color": ours, "linewidth": 2.4},
        "ap": {"color": ours, "linestyle": "--"},
        "focal": {"color": focal},
        "qfl": {"color": qfl},
        "vfl": {"color": palette.rival},
        "mal": {"color": palette.point},
    }
    for axes, (data, by_share) in zip(panels, studies.items(), strict=True):
        for number, (loss, style) in enumerate(styles.items()):
            places = np.arange(len(by_share)) + 0.03 * (number - (len(styles) - 1) / 2)
            values = np.array([aps(study)[loss] for study in by_share.values()])
            means = values.mean(1)
            spread = [means - values.min(1), values.max(1) - means]
            line = {"linewidth": 1.4, **style}
            axes.errorbar(places, means, yerr=spread, marker="o", markersize=3, label=LOSS_TITLES[loss], **line)
        axes.set_xticks(range(len(by_share)), [f"{share} %" for share in by_share])
        axes.set_title(EMPTY_SETS[data], fontsize=10, loc="left", fontweight="bold")
        axes.set(xlabel="training images without objects", ylabel="AP", ylim=(0, None))
    panels[0].legend(loc="lower left", fontsize=8, ncols=2)
    return figure


def side_by_side(studies: Mapping[str, Study]) -> str:
    """Return one row per loss: its mean AP, and the difference of RS to it, in each study of one data set."""
    losses = list(aps(next(iter(studies.values()))))
    rows = []
    for loss in losses:
        cells = [
            (f"{np.mean(aps(each)[loss]):.1f}", rs_minus(each["sets"][0], "end", loss)) for each in studies.values()
        ]
        rows.append([LOSS_TITLES[loss], *chain.from_iterable(cells)])
    columns = chain.from_iterable((f"AP: {title}", "RS minus this") for title in studies)
    return markdown_table(["loss", *columns], rows)


def rs_minus(of_set: Mapping[str, Any], share: str, loss: str) -> str:
    """Return the cell with the difference of RS to a loss, at a quarter or at the end; a dash for RS itself."""
    return DASH if loss == OURS else " ".join(difference_cells(Difference(**of_set["rs_minus"][share][loss])))


def memory_table(plain: Mapping[int, Study], memory: Mapping[int, Study]) -> str:
    """Return one row per loss: AP without and with a score memory, and the difference, by share of empty images."""
    rows = []
    for loss in aps(next(iter(memory.values()))):
        cells = []
        for share, remembered in memory.items():
            pair = [_runs(study, loss) for study in (plain[share], remembered)]
            last = max(pair[0][0].bootstrap)
            difference = paired_difference(*([run.bootstrap[last] for run in runs] for runs in reversed(pair)))
            cells += [f"{np.mean([run.metrics['AP'] for run in runs]):.1f}" for runs in pair]
            cells.append(" ".join(difference_cells(difference)))
        rows.append([LOSS_TITLES[loss], *cells])
    columns = chain.from_iterable((f"AP, {share} % empty", "with memory", "difference") for share in memory)
    return markdown_table(["loss", *columns], rows)


def _runs(study: Study, loss: str) -> list[RunRecord]:
    return [RunRecord.from_json(run) for run in study["runs"] if f" --loss {loss} " in run["command"]]


def class_table(runs: Mapping[RunKey, RunRecord], data: str, classes: Sequence[str] = ()) -> str:
    """Return one row per loss: the AP of these classes (default: all) on a data set, with the deviation over seeds."""
    by_loss: dict[str, list[Mapping[str, float]]] = {}
    for key, run in runs.items():
        if key.data == data:
            by_loss.setdefault(key.loss, []).append(run.class_ap)
    names = classes or list(next(iter(by_loss.values()))[0])
    rows = []
    for loss, seeds in by_loss.items():
        means = (SeedMean.of([of_run[name] for of_run in seeds]) for name in names)
        rows.append([LOSS_TITLES[loss], *(with_deviation(mean.mean, mean.deviation) for mean in means)])
    return markdown_table(["AP by class", *names], rows)
