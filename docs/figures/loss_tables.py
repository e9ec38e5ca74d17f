"""Renew the tables of losses on the results page and in README: python -m docs.figures.loss_tables.

The tables come from ``losses-atss.json`` and ``losses-mask-rcnn.json``, each the ``losses.json`` of a
``bucketrank study losses``. A block that begins with ``<!-- losses: NAME -->`` and ends with ``<!-- end -->`` gets the
table NAME. The text around the blocks has to be read again by a human.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from bucketrank.bench.bench_documents import markdown_table
from bucketrank.study.loss_comparison import TITLES
from bucketrank.study.loss_document import COLUMNS, STEP_COLUMNS
from bucketrank.study.study_results import SeedMean
from bucketrank.study.study_tables import DASH, with_deviation
from docs.figures.losses import MASKS, NAMES, STUDY

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
BLOCK = re.compile(r"(?<=^<!-- losses: )([\w ]+) -->\n.*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def tables(study: dict[str, Any], masks: dict[str, Any]) -> dict[str, str]:
    """Return the Markdown tables by name.

    ``study`` has the headline, a table per data set, and the time of a step; ``masks`` has those of Mask R-CNN.
    """
    names = ["data", "RS minus", "after 250 steps", "", "after 1,000 steps", ""]
    headline = [[NAMES[row[0]], *row[1:]] for each in study["sets"] for row in each["headline"]]
    by_name = {"headline": markdown_table(names, headline)}
    by_name |= {NAMES[each["data"]]: markdown_table(COLUMNS, each["rows"]) for each in study["sets"]}
    by_name["steps"] = markdown_table([*STEP_COLUMNS, "ratio to focal"], study["steps"]["rows"])
    by_name["rates"] = rate_table(study["trials"])
    (nuclei,) = masks["sets"]
    return by_name | {"masks": mask_table(nuclei, masks["runs"]), "masks over steps": curve_table(nuclei)}


def rate_table(trials: list[dict[str, Any]]) -> str:
    """Return the mean AP of the trials over all learning rates, with the box weighting of each loss's paper."""
    aps: dict[str, dict[str, list[float]]] = {}
    for trial in trials:
        if trial["usual_boxes"]:
            aps.setdefault(trial["data"], {}).setdefault(trial["loss"], []).append(trial["metrics"]["AP"])
    losses = list(dict.fromkeys(loss for by_loss in aps.values() for loss in by_loss))
    rows = [
        [NAMES[data], *(f"{fmean(by_loss[loss]):.1f}" if loss in by_loss else DASH for loss in losses)]
        for data, by_loss in aps.items()
    ]
    return markdown_table(["mean AP over the rates", *(TITLES[loss] for loss in losses)], rows)


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


def curve_table(of_set: dict[str, Any]) -> str:
    """Return the mean AP over the seeds at each evaluation, one row per loss."""
    steps = of_set["losses"][0]["curve"][0]
    rows = []
    for entry in of_set["losses"]:
        runs = entry["curve"][1]
        rows.append([TITLES[entry["loss"]], *(f"{sum(aps) / len(aps):.1f}" for aps in zip(*runs, strict=True))])
    return markdown_table(["AP after", *(f"{step:,} steps" for step in steps)], rows)


def renew(page: str, study: dict[str, Any], masks: dict[str, Any]) -> str:
    """Return the page with the tables of the studies in its blocks; KeyError if one does not exist."""
    available = tables(study, masks)
    return BLOCK.sub(lambda match: f"{match[1]} -->\n\n{available[match[1]]}\n\n", page)


def read_studies() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the study of ATSS and that of Mask R-CNN."""
    study, masks = (json.loads(path.read_text(encoding="utf-8")) for path in (STUDY, MASKS))
    return study, masks


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(renew(path.read_text(encoding="utf-8"), *read_studies()), encoding="utf-8")
