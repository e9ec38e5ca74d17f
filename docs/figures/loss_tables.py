"""Renew the tables of losses on the results page: python -m docs.figures.loss_tables.

The tables come from the files ``losses-*.json`` of the assets, each the ``losses.json`` of a
``python -m benchmarks study losses``, and from ``fine-tuning.json``. A block that begins with ``<!-- losses: NAME -->``
and ends with ``<!-- end -->`` gets the table NAME. Read the text around the blocks again afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.documents import markdown_table
from benchmarks.study.grid import LOSS_TITLES, OURS
from benchmarks.study.losses import COLUMNS, difference_cells
from benchmarks.study.regret import Regret, RunKey, compute_regret, read_runs, regret_after, set_rows, title_of
from benchmarks.study.runs import RunRecord
from benchmarks.study.tables import DASH, SeedMean, with_deviation
from bucketrank.evaluation import paired_difference
from docs.figures.losses import LONGER_TRIALS, NAMES, STUDIES, STUDY
from docs.figures.regimes import (
    LOOK_ALIKES,
    MEMORY_SET,
    MEMORY_SHARES,
    RARE_SET,
    RARE_SIGNS,
    class_table,
    memory_table,
    read,
    read_empty,
    rs_minus,
    side_by_side,
)
from docs.figures.theme import ASSETS

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "results.md",)
EARLY = 100  # steps of the table of the first steps
BLOCK = re.compile(r"(?<=^<!-- losses: )([\w ]+) -->\n.*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)
PUBLISHED = {  # detector: its study of losses as published
    "ATSS": "losses-published-atss.json",
    "RetinaNet": "losses-published-retinanet.json",
    "PAA": "losses-published-paa.json",
    "Faster R-CNN": "losses-published-faster-rcnn.json",
    "Cascade R-CNN": "losses-published-cascade-rcnn.json",
}


@dataclass(frozen=True)
class Studies:
    """The studies behind the tables."""

    one_head: dict[str, Any]  # seven losses in one head of ATSS
    more: list[dict[str, Any]]  # the same on other data sets
    runs: dict[RunKey, RunRecord]  # of all these; runs after longer trials replace the others
    regret: Regret  # of these runs
    empty: dict[str, dict[int, dict[str, Any]]]  # with empty training images, by data set and percentage
    memory: dict[int, dict[str, Any]]  # the same with a score memory, by percentage
    look_alikes: dict[str, dict[str, Any]]  # one class among others, by data set
    longer_trials: list[dict[str, Any]]  # losses whose rates were chosen by longer trials
    published: dict[str, dict[str, Any]]  # losses as published, by detector
    tuned: dict[str, Any]  # RetinaNet of torchvision, fine-tuned with its own loss and with RS
    retinanet: dict[str, Any]  # one head of RetinaNet
    masks: dict[str, Any]  # Mask R-CNN
    co_detr: dict[str, Any]
    bucketed: dict[str, Any]  # ATSS with the bucketed approximation of RS

    @classmethod
    def read(cls) -> Studies:
        """Read the files of the assets."""
        runs = read_runs([*STUDIES, *LONGER_TRIALS])
        names = ("retinanet", "mask-rcnn", "published-brs-detr", "bucketed-atss")
        return cls(
            _read(STUDY),
            [_read(path) for path in STUDIES if path != STUDY],
            runs,
            compute_regret(runs),
            read_empty(),
            {share: read(f"memory-{MEMORY_SET}-{share}") for share in MEMORY_SHARES},
            {name: read(f"look-alikes-{name}") for name in LOOK_ALIKES},
            [_read(path) for path in LONGER_TRIALS],
            {detector: _read(ASSETS / name) for detector, name in PUBLISHED.items()},
            _read(ASSETS / "fine-tuning.json"),
            *(read(name) for name in names),
        )

    @property
    def every(self) -> list[dict[str, Any]]:
        """All studies."""
        others = (self.retinanet, self.masks, self.co_detr, self.bucketed)
        empty = (study for by_share in self.empty.values() for study in by_share.values())
        regimes = (*empty, *self.memory.values(), *self.look_alikes.values(), *self.longer_trials)
        return [self.one_head, *self.more, *regimes, *others, *self.published.values()]


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def tables(studies: Studies) -> dict[str, str]:
    """Return the Markdown tables by name."""
    by_name = {"regret": regret_table(studies.regret), "differences": differences_table(studies.runs)}
    by_name["first steps"] = early_table(read_runs(STUDIES))
    for data, by_share in studies.empty.items():
        by_name[f"empty {NAMES[data]}"] = side_by_side({f"{share} % empty": study for share, study in by_share.items()})
    by_name["memory"] = memory_table(studies.empty[MEMORY_SET], studies.memory)
    by_name["look alikes"] = side_by_side({LOOK_ALIKES[name]: study for name, study in studies.look_alikes.items()})
    by_name["longer trials"] = trials_table(studies)
    by_name["rare classes"] = class_table(studies.runs, RARE_SET)
    by_name["rare signs"] = class_table(
        read_runs([ASSETS / "losses-empty-road_signs-0.json"]), "road_signs", RARE_SIGNS
    )
    (nuclei,) = studies.masks["sets"]
    columns, *rows = nuclei["masks_and_boxes"]
    doubling = [rows[number] for number in (0, 1, 3, 7, -1)]  # after 38, 76, 152, 304 and 456 steps
    by_name["masks and boxes"] = markdown_table(columns, doubling)
    for name, of_detectors in {
        "retinanet": {"RetinaNet": studies.retinanet},
        "published": studies.published,
        "co detr": {"Co-DETR": studies.co_detr},
    }.items():
        by_name[name] = detector_table(of_detectors)
    by_name["fine tuning"] = studies.tuned["table"].replace("road_signs", NAMES["road_signs"])
    by_name["bucketed"] = bucketed_table(studies.published["ATSS"], studies.bucketed)
    return by_name


def differences_table(runs: Mapping[RunKey, RunRecord]) -> str:
    """Return the AP of RS on every data set, and one row per other loss with the differences of RS to it."""
    sets = list(dict.fromkeys(key.data for key in runs))
    by_loss: dict[str, dict[str, list[RunRecord]]] = {}
    for key, run in sorted(runs.items(), key=lambda item: item[0].seed):
        by_loss.setdefault(key.loss, {}).setdefault(key.data, []).append(run)
    own = by_loss.pop(OURS)
    means = [SeedMean.of([run.metrics["AP"] for run in own[data]]) for data in sets]
    rows = [["RS", *(with_deviation(mean.mean, mean.deviation) for mean in means)]]
    for loss, theirs in by_loss.items():
        differences = (
            paired_difference(*([run.bootstrap[max(run.bootstrap)] for run in each[data]] for each in (own, theirs)))
            for data in sets
        )
        rows.append([f"RS minus {LOSS_TITLES[loss]}", *(" ".join(difference_cells(each)) for each in differences)])
    return markdown_table(["AP", *(NAMES[data] for data in sets)], rows)


def trials_table(studies: Studies) -> str:
    """Return what trials of 125 and of 300 steps chose, and the AP after training with it."""
    usual = {each["data"]: each for study in (studies.one_head, *studies.more) for each in study["sets"]}
    shown = [COLUMNS.index(name) for name in ("lr", "boxes", "AP")]
    rows = []
    for of_set in (each for study in studies.longer_trials for each in study["sets"]):
        before = {row[0]: row for row in usual[of_set["data"]]["rows"]}
        rows += [
            [NAMES[of_set["data"]], row[0], *(each[at] for each in (before[row[0]], row) for at in shown)]
            for row in of_set["rows"]
        ]
    columns = ["data", "loss", "lr of 125 steps", "boxes", "AP", "lr of 300 steps", "boxes", "AP"]
    return markdown_table(columns, rows)


def early_table(runs: Mapping[RunKey, RunRecord]) -> str:
    """Return, for each loss, how far it is behind the best loss of each data set after about EARLY steps."""
    regrets, steps = regret_after(runs, EARLY)
    rows = [
        [
            LOSS_TITLES[of_loss.loss],
            *(f"{value:.1f}" for value in of_loss.by_set.values()),
            of_loss.worst.cell(),
            of_loss.mean.cell(),
        ]
        for of_loss in regrets
    ]
    names = (f"{NAMES[data]} ({step})" for data, step in steps.items())
    return markdown_table(["AP behind the best", *names, "worst (95 %)", "mean (95 %)"], rows)


def regret_table(regret: Regret) -> str:
    """Return, for each loss, how far it ends behind the best loss of each data set, and intervals of worst and mean."""
    names = [NAMES.get(data, title_of(data)) for data in regret.sets]
    rows = [
        [*row[: len(names) + 1], of_loss.worst.cell(), of_loss.mean.cell()]
        for row, of_loss in zip(set_rows(regret), regret.end, strict=True)
    ]
    return markdown_table(["AP behind the best loss", *names, "worst (95 %)", "mean (95 %)"], rows)


def detector_table(studies: dict[str, dict[str, Any]]) -> str:
    """Return one row per detector and loss: AP at a quarter and at the end, and the differences of RS."""
    rows = []
    for detector, study in studies.items():
        (of_set,) = study["sets"]
        ratios = {title: ratio for title, _, ratio in study["steps"]["rows"]}
        for number, (entry, row) in enumerate(zip(of_set["losses"], of_set["rows"], strict=True)):
            shown = dict(zip(COLUMNS, row, strict=True))
            early, late = (rs_minus(of_set, share, entry["loss"]) for share in ("quarter", "end"))
            results = [shown["AP at a quarter"], early, shown["AP"], late]
            time, _, _ = ratios[shown["loss"]].partition(" ")  # drops the quartiles
            rows.append(["" if number else detector, shown["loss"], shown["lr"], *results, time])
    names = ["AP after 146 steps", "RS minus this", "AP after 600 steps", "RS minus this", "time of a step"]
    return markdown_table(["detector", "loss", "lr", *names], rows)


def bucketed_table(exact: dict[str, Any], bucketed: dict[str, Any]) -> str:
    """Return the results of RS by its two methods, and the difference of exact to bucketed."""
    records = [
        [RunRecord.from_json(run) for run in study["runs"] if " --loss rs " in run["command"]]
        for study in (exact, bucketed)
    ]
    last = max(records[0][0].bootstrap)
    difference = paired_difference(*([record.bootstrap[last] for record in of_method] for of_method in records))
    rows = []
    for method, study in (("exact", exact), ("bucketed", bucketed)):
        shown = dict(zip(COLUMNS, study["sets"][0]["rows"][0], strict=True))
        columns = ("lr", "AP at a quarter", "AP")
        compared = DASH if method == "exact" else " ".join(difference_cells(difference))
        rows.append([method, *(shown[column] for column in columns), compared])
    names = ["lr", "AP after 146 steps", "AP after 600 steps", "exact minus this"]
    return markdown_table(["RS", *names], rows)


def renew(page: str, studies: Studies) -> str:
    """Return the page with the tables of the studies in its blocks; KeyError if one does not exist."""
    available = tables(studies)
    return BLOCK.sub(lambda match: f"{match[1]} -->\n\n{available[match[1]]}\n\n", page)


if __name__ == "__main__":
    studies = Studies.read()
    for path in PAGES:
        path.write_text(renew(path.read_text(encoding="utf-8"), studies), encoding="utf-8")
