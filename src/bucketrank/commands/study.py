"""``bucketrank study``."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

from bucketrank.arguments import SettingFlags, UsageError, listed, require
from bucketrank.data.problems import DataError


def study(
    name: Annotated[str, "detectors, segmentation, budget, detr, baselines or synthetic"],
    *,
    data: Annotated[Path | None, "folder of the data set (synthetic needs none)"] = None,
    out: Annotated[Path | None, "folder for the runs, tables and figures (default: runs/study-NAME)"] = None,
    seeds: Annotated[int, "runs per row, with seeds 0, 1, ..."] = 3,
    budget: Annotated[str, "small (laptop recipes) or paper (the paper's recipes, for its hardware)"] = "small",
    only: Annotated[str | None, "rows to train, separated by commas, like atss-rs-*,atss-focal (default: all)"] = None,
    rates: Annotated[str | None, "learning rates to try, as factors of the recipe's (1,2,4; paper: 1)"] = None,
    rounds: Annotated[int, "timed steps, in which the losses of a detector take turns"] = 12,
    dry_run: Annotated[bool, "print the commands of the runs instead of running them"] = False,
    settings: Annotated[SettingFlags, "settings of every run"],
) -> int:
    """Reproduce a table of the paper, with our numbers next to the paper's. Finished runs are skipped."""
    require("rich", "PIL", "faster_coco_eval", "yaml", "lightning", "timm", "matplotlib", extra="detect")
    from bucketrank.recipes import RecipeError
    from bucketrank.study.grid import STUDIES, SYNTHETIC
    from bucketrank.suggestions import require_choice

    out = out or Path("runs") / f"study-{name}"
    try:
        require_choice("study", name, (*STUDIES, SYNTHETIC))
        require_choice("--budget", budget, ("small", "paper"))
        factors = listed("--rates", rates or ("1" if budget == "paper" else "1,2,4"), float)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if seeds < 1 or rounds < 2 or min(factors) <= 0:
        expected = "--seeds of at least 1, --rounds of at least 2 and --rates above 0"
        raise UsageError(f"study: expected {expected}, got {seeds}, {rounds} and {rates}")
    if name == SYNTHETIC:
        from bucketrank.study.synthetic_study import run_synthetic_study

        given = {"data": data, "seeds": seeds, "budget": budget, "only": only, "rates": rates, "rounds": rounds}
        given |= {"dry_run": dry_run}
        known = inspect.signature(study).parameters
        unused = ["--" + flag.replace("_", "-") for flag in given if given[flag] != known[flag].default]
        if unused := unused + ["settings"] * bool(list(settings)):
            raise UsageError(f"study: synthetic trains nothing and takes --out alone; remove {', '.join(unused)}")
        run_synthetic_study(out)
        return 0
    if data is None:
        raise UsageError("study: expected --data, the folder of the data set")
    from bucketrank.study.study_command import plan_study, run_study, training_commands
    from bucketrank.study.study_run import StudyError

    chosen: dict[str, Any] = {
        "seeds": seeds,
        "paper": budget == "paper",
        "factors": factors,
        "only": only,
        "flags": tuple(settings),
    }
    try:
        plan = plan_study(name, data=data, out=out, **chosen)
    except (RecipeError, StudyError) as error:
        raise UsageError(f"study: {error}") from error
    if dry_run:
        sys.stdout.write("\n".join(training_commands(plan)) + "\n")
        return 0
    try:
        return run_study(plan, rounds=rounds)
    except RecipeError as error:
        raise UsageError(f"study: {error}") from error
    except StudyError as error:
        raise DataError(f"study: {error}") from error
