"""Renew the tables of losses in README and on the pages: python -m docs.figures.loss_tables.

The tables come from the files ``losses-*.json`` of the assets, each the ``losses.json`` of a
``python -m benchmarks study losses``. A block that begins with ``<!-- losses: NAME -->`` and ends with
``<!-- end -->`` gets the table NAME. Read the text around the blocks again afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.documents import markdown_table
from benchmarks.study.grid import LOSS_TITLES
from benchmarks.study.losses import COLUMNS, STEP_COLUMNS, difference_cells
from benchmarks.study.runs import RunRecord
from benchmarks.study.tables import DASH, SeedMean, with_deviation
from bucketrank.evaluation import Difference, paired_difference
from docs.figures.losses import NAMES, STUDY
from docs.figures.theme import ASSETS

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "detectors" / "brs-detr.md")
BLOCK = re.compile(r"(?<=^<!-- losses: )([\w ]+) -->\n.*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)
PUBLISHED = {  # detector: its study of losses as published
    "ATSS": "losses-published-atss.json",
    "RetinaNet": "losses-published-retinanet.json",
    "PAA": "losses-published-paa.json",
    "Faster R-CNN": "losses-published-faster-rcnn.json",
    "Cascade R-CNN": "losses-published-cascade-rcnn.json",
}
CLASSES = {"RBC": "red cells", "WBC": "white cells", "Platelets": "platelets"}  # of the blood cells


@dataclass(frozen=True)
class Studies:
    """The studies behind the tables.

    ``one_head`` has seven losses in one head of ATSS and ``retinanet`` in one head of RetinaNet. ``masks`` is Mask
    R-CNN for 228 steps, ``longer_masks`` for 456. ``published`` has the other detectors as published, by their titles,
    ``co_detr`` is Co-DETR, and ``bucketed`` is ATSS with the bucketed approximation of RS.
    """

    one_head: dict[str, Any]
    retinanet: dict[str, Any]
    masks: dict[str, Any]
    longer_masks: dict[str, Any]
    published: dict[str, dict[str, Any]]
    co_detr: dict[str, Any]
    bucketed: dict[str, Any]

    @classmethod
    def read(cls) -> Studies:
        """Read the files of the assets."""
        published = {detector: _read(ASSETS / name) for detector, name in PUBLISHED.items()}
        names = ("retinanet", "mask-rcnn", "mask-rcnn-456", "published-brs-detr", "bucketed-atss")
        retinanet, masks, longer_masks, co_detr, bucketed = (_read(ASSETS / f"losses-{name}.json") for name in names)
        return cls(_read(STUDY), retinanet, masks, longer_masks, published, co_detr, bucketed)

    @property
    def every(self) -> list[dict[str, Any]]:
        """All studies."""
        others = (self.retinanet, self.masks, self.longer_masks, self.co_detr, self.bucketed)
        return [self.one_head, *others, *self.published.values()]


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def tables(studies: Studies) -> dict[str, str]:
    """Return the Markdown tables by name."""
    study = studies.one_head
    names = ["data", "RS minus", "after 250 steps", "verdict", "after 1,000 steps", "verdict"]
    headline = [[NAMES[row[0]], *row[1:]] for each in study["sets"] for row in each["headline"]]
    by_name = {"headline": markdown_table(names, headline)}
    by_name |= {NAMES[each["data"]]: markdown_table(COLUMNS, each["rows"]) for each in study["sets"]}
    by_name["steps"] = markdown_table([*STEP_COLUMNS, "ratio to focal"], study["steps"]["rows"])
    by_name["rates"] = rate_table(study["trials"], "mean AP over the rates", lambda aps: f"{fmean(aps):.1f}")
    by_name["rates of the best"] = rate_table(
        study["trials"], "mean AP divided by the best", lambda aps: f"{fmean(aps) / max(aps):.0%}"
    )
    (nuclei,), (longer_nuclei,) = studies.masks["sets"], studies.longer_masks["sets"]
    columns, *rows = longer_nuclei["masks_and_boxes"]
    by_name |= {"masks": mask_table(nuclei, studies.masks["runs"]), "masks and boxes": markdown_table(columns, rows)}
    for name, of_detectors in {
        "retinanet": {"RetinaNet": studies.retinanet},
        "published": studies.published,
        "co detr": {"Co-DETR": studies.co_detr},
    }.items():
        by_name[name] = detector_table(of_detectors)
        by_name[f"{name} by class"] = class_table(of_detectors)
        by_name[f"{name} by rate"] = trial_table(of_detectors)
    by_name["bucketed"] = bucketed_table(studies.published["ATSS"], studies.bucketed)
    return by_name


def detector_table(studies: dict[str, dict[str, Any]]) -> str:
    """Return one row per detector and loss: AP at a quarter and at the end, and the differences of RS."""
    rows = []
    for detector, study in studies.items():
        (of_set,) = study["sets"]
        ratios = {title: ratio for title, _, ratio in study["steps"]["rows"]}
        for number, (entry, row) in enumerate(zip(of_set["losses"], of_set["rows"], strict=True)):
            shown = dict(zip(COLUMNS, row, strict=True))
            early, late = (_rs_minus(of_set["rs_minus"][share], entry["loss"]) for share in ("quarter", "end"))
            results = [shown["AP at a quarter"], early, shown["AP"], late]
            costs = [shown["steps to 80%"], ratios[shown["loss"]]]
            rows.append(["" if number else detector, shown["loss"], shown["lr"], *results, *costs])
    names = ["AP after 146 steps", "RS minus this", "AP after 600 steps", "RS minus this", "steps to 80%"]
    return markdown_table(["detector", "loss", "lr", *names, "time of a step"], rows)


def _rs_minus(differences: dict[str, dict[str, float]], loss: str) -> str:
    return " ".join(difference_cells(Difference(**differences[loss]))) if loss in differences else DASH


def class_table(studies: dict[str, dict[str, Any]]) -> str:
    """Return one row per detector and loss: the mean AP of each class over the seeds at the end."""
    rows = []
    for detector, study in studies.items():
        (of_set,) = study["sets"]
        for number, entry in enumerate(of_set["losses"]):
            runs = [run["class_ap"] for run in study["runs"] if f" --loss {entry['loss']} " in run["command"]]
            means = [f"{fmean(run[name] for run in runs):.1f}" for name in CLASSES]
            rows.append(["" if number else detector, LOSS_TITLES[entry["loss"]], *means])
    return markdown_table(["detector", "loss", *CLASSES.values()], rows)


def trial_table(studies: dict[str, dict[str, Any]]) -> str:
    """Return one row per detector and loss: the AP of its trial with each rate, with its usual box balance."""
    rates = sorted({trial["lr"] for study in studies.values() for trial in study["trials"]})
    rows = []
    for detector, study in studies.items():
        for number, loss in enumerate(dict.fromkeys(trial["loss"] for trial in study["trials"])):
            trials = [trial for trial in study["trials"] if trial["loss"] == loss and trial["usual_boxes"]]
            aps = {trial["lr"]: trial["metrics"]["AP"] for trial in trials}
            cells = [f"{aps[rate]:.1f}" if rate in aps else DASH for rate in rates]
            rows.append(["" if number else detector, LOSS_TITLES[loss], *cells])
    return markdown_table(["detector", "loss", *(f"{rate:g}" for rate in rates)], rows)


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
        columns = ("seeds", "lr", "AP at a quarter", "AP", "AP50", "AP75", "oLRP")
        compared = DASH if method == "exact" else " ".join(difference_cells(difference))
        rows.append([method, *(shown[column] for column in columns), compared])
    names = ["seeds", "lr", "after 146 steps", "after 600 steps", "AP50", "AP75", "oLRP", "exact minus this"]
    return markdown_table(["RS", *names], rows)


def rate_table(trials: list[dict[str, Any]], title: str, cell: Callable[[list[float]], str]) -> str:
    """Return a cell for each data set and loss, from the AP of its trials with the usual box balance."""
    aps: dict[str, dict[str, list[float]]] = {}
    for trial in trials:
        if trial["usual_boxes"]:
            aps.setdefault(trial["data"], {}).setdefault(trial["loss"], []).append(trial["metrics"]["AP"])
    losses = list(dict.fromkeys(loss for by_loss in aps.values() for loss in by_loss))
    rows = [
        [NAMES[data], *(cell(by_loss[loss]) if loss in by_loss else DASH for loss in losses)]
        for data, by_loss in aps.items()
    ]
    return markdown_table([title, *(LOSS_TITLES[loss] for loss in losses)], rows)


def mask_table(of_set: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    """Return one row per loss: the mean AP over the seeds of masks and of boxes, and the difference of RS."""
    rows = []
    for entry, row in zip(of_set["losses"], of_set["rows"], strict=True):
        shown = dict(zip(COLUMNS, row, strict=True))
        name = f"{of_set['data']}-{entry['loss']}-"
        boxes = SeedMean.of([run["metrics"]["box AP"] for run in runs if run["name"].startswith(name)])
        columns = ("loss", "seeds", "lr", "AP", "AP50", "AP75", "RS minus this")
        rows.append([*(shown[column] for column in columns), with_deviation(boxes.mean, boxes.deviation)])
    return markdown_table(["loss", "seeds", "lr", "mask AP", "AP50", "AP75", "RS minus this", "box AP"], rows)


def renew(page: str, studies: Studies) -> str:
    """Return the page with the tables of the studies in its blocks; KeyError if one does not exist."""
    available = tables(studies)
    return BLOCK.sub(lambda match: f"{match[1]} -->\n\n{available[match[1]]}\n\n", page)


if __name__ == "__main__":
    studies = Studies.read()
    for path in PAGES:
        path.write_text(renew(path.read_text(encoding="utf-8"), studies), encoding="utf-8")
