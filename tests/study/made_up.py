"""Run folders that no training has written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from bucketrank.study.grid import STUDIES
from bucketrank.study.plan import Plan, choose_rows
from bucketrank.study.runs import Run
from bucketrank.training.recipe import dump
from bucketrank.training.table import Table

PLACE = {"processor": "abacus", "cores": 2, "torch_threads": 1, "commit": "0123456789", "modified": False, "date": "d"}


def plan(out: Path, *, name: str = "detectors", only: str | None = "atss-*", paper: bool = False, **settings) -> Plan:
    """A study of some rows."""
    rows = choose_rows(STUDIES[name], paper=paper, only=only)
    return Plan(STUDIES[name], rows, paper, Path("cells"), out, **settings)


def finish(run: Run, *aps: float, kind: str = "boxes") -> None:
    """The folder of the run as if it had been trained, with these APs after the epochs."""
    run.folder.mkdir(parents=True)
    recipe = run.load()
    # As a training would: the data loader's workers and the path of the weights may differ.
    recipe = replace(recipe, data=replace(recipe.data, workers=7))
    (run.folder / "recipe.yaml").write_text(dump(recipe))
    (run.folder / "environment.json").write_text(json.dumps(PLACE))
    for epoch, ap in enumerate(aps, start=1):
        row = {f"{kind}/AP": ap / 100, f"{kind}/AP50": ap / 50, f"{kind}/AP75": ap / 200}
        Table(run.folder / "validation.csv").add({"step": 73 * epoch, "epoch": epoch, **row})
    for step, seconds in ((1, 9.0), (10, 0.5), (20, 0.7), (30, 0.6)):
        Table(run.folder / "train.csv").add({"step": step, "epoch": 1, "loss": 1.0, "seconds": seconds})
    (run.folder / "weights.safetensors").touch()
