"""Folders of finished runs, written without training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.study.grid import STUDIES
from benchmarks.study.plan import PaperPlan, choose_rows
from benchmarks.study.runs import StudyRun
from bucketrank.settings import recipe_to_yaml
from bucketrank.training.log import CsvTable

MACHINE = {
    "processor": "abacus",
    "cores": 2,
    "torch_threads": 1,
    "commit": "0123456789",
    "modified": False,
    "date": "d",
}


def plan(
    out: Path, *, name: str = "detectors", only: str | None = "atss-*", paper: bool = False, **settings
) -> PaperPlan:
    """Return the plan of some rows of a study."""
    rows = choose_rows(STUDIES[name], paper=paper, only=only)
    return PaperPlan(study=STUDIES[name], rows=rows, paper=paper, data=Path("cells"), out=out, **settings)


def finish(run: StudyRun, *aps: float, metric: str = "boxes", boxes: dict[str, float] | None = None) -> None:
    """Write the folder of a finished run with these APs after its epochs; with masks, the boxes have twice the AP.

    ``boxes`` are further metrics of the boxes, from 0 to 1.
    """
    run.folder.mkdir(parents=True)
    recipe = run.load()
    # Settings that a resumed run may change do not make it another run.
    recipe = replace(recipe, data=replace(recipe.data, workers=7))
    (run.folder / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    (run.folder / "environment.json").write_text(json.dumps(MACHINE))
    for epoch, ap in enumerate(aps, start=1):
        row = {f"{metric}/AP": ap / 100, f"{metric}/AP50": ap / 50, f"{metric}/AP75": ap / 200}
        if metric == "masks":
            row["boxes/AP"] = ap / 50
        row |= {f"boxes/{name}": value for name, value in (boxes or {}).items()}
        CsvTable(run.folder / "validation.csv").add({"step": 73 * epoch, "epoch": epoch, **row})
    for step, seconds in ((1, 9.0), (10, 0.5), (20, 0.7), (30, 0.6)):
        CsvTable(run.folder / "train.csv").add({"step": step, "epoch": 1, "loss": 1.0, "seconds": seconds})
    (run.folder / "weights.safetensors").touch()
