"""``bucketrank study``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from bucketrank.cli.arguments import Changes as SettingFlags
from bucketrank.cli.arguments import listed, require
from bucketrank.errors import DataError, UsageError


def study(
    name: Annotated[str, "losses, detectors, segmentation, budget, detr, baselines or synthetic"],
    *,
    data: Annotated[str | None, "folder of the data set; losses takes several, separated by commas"] = None,
    out: Annotated[Path | None, "folder for the runs, tables and figures (default: runs/study-NAME)"] = None,
    seeds: Annotated[int, "runs per row, with seeds 0, 1, ..."] = 3,
    budget: Annotated[
        str, "small (laptop recipes) or paper (the paper's recipes, for its hardware; not for losses)"
    ] = "small",
    only: Annotated[str | None, "rows to train, separated by commas, like atss-rs-*,atss-focal (default: all)"] = None,
    rates: Annotated[
        str | None, "learning rates to try, as factors of the recipe's (1,2,4; losses: 0.25,0.5,1,2,4,8; paper: 1)"
    ] = None,
    recipe: Annotated[
        str,
        "losses: atss-laptop, retinanet-laptop, paa-laptop, faster-rcnn-laptop, cascade-rcnn-laptop, mask-rcnn-laptop "
        "or brs-detr-laptop",
    ] = "atss-laptop",
    head: Annotated[
        str, "losses: same (only the loss differs; atss-laptop and retinanet-laptop) or published"
    ] = "same",
    steps: Annotated[int, "losses: steps of a run"] = 1000,
    trial_steps: Annotated[int | None, "losses: steps of a trial (default: an eighth of --steps)"] = None,
    merge: Annotated[
        str | None, "losses: losses.json files of this study from other machines, separated by commas; their runs count"
    ] = None,
    rounds: Annotated[int, "timed steps, in which the losses of a detector take turns"] = 12,
    dry_run: Annotated[bool, "print the commands of the runs instead of running them"] = False,
    settings: Annotated[SettingFlags, "settings of every run"],
) -> int:
    """Reproduce a table of the paper, with our numbers next to the paper's. Finished runs are skipped."""
    require("rich", "PIL", "faster_coco_eval", "yaml", "lightning", "timm", "matplotlib", extra="detect")
    from bucketrank.errors import RecipeError, require_choice
    from bucketrank.study.grid import LOSSES, STUDIES, SYNTHETIC

    try:
        require_choice("study", name, (LOSSES, *STUDIES, SYNTHETIC))
        require_choice("--budget", budget, ("small", "paper"))
        usual = "0.25,0.5,1,2,4,8" if name == LOSSES else "1" if budget == "paper" else "1,2,4"
        factors = listed("--rates", rates or usual, float)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if seeds < 1 or rounds < 2 or min(factors) <= 0:
        expected = "--seeds of at least 1, --rounds of at least 2 and --rates above 0"
        raise UsageError(f"study: expected {expected}, got {seeds}, {rounds} and {rates}")
    values = {"data": data, "seeds": seeds, "budget": budget, "only": only, "rates": rates, "rounds": rounds}
    values |= {"dry_run": dry_run, "recipe": recipe, "head": head}
    values |= {"steps": steps, "trial_steps": trial_steps, "merge": merge}
    for_losses = ("recipe", "head", "steps", "trial_steps", "merge")
    if name == SYNTHETIC:
        from bucketrank.study.synthetic_study import run_synthetic_study

        unused = _changed(values, tuple(values)) + ["settings"] * bool(list(settings))
        if unused:
            raise UsageError(f"study: synthetic trains nothing and takes --out alone; remove {', '.join(unused)}")
        run_synthetic_study(out or Path("runs/study-synthetic"))
        return 0
    if data is None:
        raise UsageError("study: expected --data, the folder of the data set")
    if unused := _changed(values, ("budget",) if name == LOSSES else for_losses):
        raise UsageError(f"study: {name} does not use {', '.join(unused)}; remove it")
    _require_free_settings(name, list(settings), SET_BY_LOSSES if name == LOSSES else SET_BY_STUDIES)
    if name == LOSSES:
        trial_steps = steps // 8 if trial_steps is None else trial_steps
        plan_values = {"seeds": seeds, "steps": steps, "trial_steps": trial_steps, "factors": factors}
        plan_values["flags"] = tuple(settings)
        files = [Path(file) for file in merge.split(",")] if merge else []
        return _compare_losses(
            data.split(","), out, only, recipe, head, plan_values, merge=files, rounds=rounds, dry_run=dry_run
        )
    out = out or Path("runs") / f"study-{name}"
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
        plan = plan_study(name, data=Path(data), out=out, **chosen)
    except (RecipeError, StudyError) as error:
        raise UsageError(f"study: {error}") from error
    if dry_run:
        sys.stdout.write("\n".join(training_commands(plan)) + "\n")
        return 0
    with _named_errors():
        return run_study(plan, rounds=rounds)


@contextmanager
def _named_errors() -> Iterator[None]:
    """Let the errors of a running study end the command with their message and the name of the command."""
    from bucketrank.errors import RecipeError
    from bucketrank.study.study_run import StudyError

    try:
        yield
    except RecipeError as error:
        raise UsageError(f"study: {error}") from error
    except StudyError as error:
        raise DataError(f"study: {error}") from error


# Settings of the protocol, which a study gives each of its runs.
SET_BY_STUDIES = ("data.holdout", "trainer.seed")
SET_BY_LOSSES = (
    *SET_BY_STUDIES,
    *("loss.name", "loss.box_balance", "schedule.max_steps", "schedule.epochs", "schedule.early_stop"),
    *("trainer.validate_every", "trainer.keep_detections"),
)


def _require_free_settings(name: str, flags: list[str], taken: tuple[str, ...]) -> None:
    """Raise UsageError if a flag sets what the study itself sets for each of its runs."""
    from bucketrank.errors import RecipeError
    from bucketrank.settings.flags import parse_flags as parse_setting_flags

    try:
        given = parse_setting_flags(flags)
    except RecipeError as error:
        raise UsageError(f"study: {error}") from error
    if both := [key for key in given if key in taken]:
        flag = "flags" if len(both) > 1 else "flag"
        raise UsageError(f"study: {name} sets {', '.join(f'--{key}' for key in both)} itself; remove the {flag}")


def _changed(values: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Return the flags among ``names`` whose values are not the defaults."""
    known = inspect.signature(study).parameters
    return ["--" + name.replace("_", "-") for name in names if values[name] != known[name].default]


def _compare_losses(
    data: list[str],
    out: Path | None,
    only: str | None,
    recipe: str,
    head: str,
    plan_values: dict[str, Any],
    *,
    merge: list[Path],
    rounds: int,
    dry_run: bool,
) -> int:
    """Run the study ``losses``, or print the commands of its trials."""
    from bucketrank.errors import RecipeError, require_choice
    from bucketrank.study.loss_comparison import DETECTORS, TITLES, Head, LossComparison
    from bucketrank.study.run_record import RunRecord, read_records
    from bucketrank.study.study_command import run_loss_comparison
    from bucketrank.study.study_run import StudyError

    steps, trial_steps = plan_values["steps"], plan_values["trial_steps"]
    if not 1 <= trial_steps <= steps:
        expected = "--steps of at least 8 and --trial-steps from 1 to --steps"
        raise UsageError(f"study: expected {expected}, got {steps} and {trial_steps}")
    try:
        require_choice("--recipe", recipe, tuple(DETECTORS))
        require_choice("--head", head, ("same", "published"))
        compared = DETECTORS[recipe]
        chosen: Head = "same" if head == "same" else "published"
        if head == "same" and not compared.same_head:
            raise UsageError(
                f"study: --head: expected published for {recipe}, whose head depends on the loss, got same"
            )
        losses = compared.default_losses(chosen) if only is None else tuple(only.split(","))
        for loss in losses:
            require_choice("--only", loss, tuple(TITLES))
        records: dict[str, RunRecord] = {}
        for file in merge:
            records |= read_records(file)
        plan = LossComparison(
            data=tuple(map(Path, data)),
            out=out or Path("runs") / f"study-losses-{recipe}-{head}",
            losses=losses,
            detector=compared,
            head=chosen,
            records=records,
            **plan_values,
        )
        plan.require_data()
        if dry_run:
            trials = [
                trial
                for each in plan.data
                for loss in losses
                for trial in plan.trials(each, loss)
                if trial.record is None
            ]
            sys.stdout.write("".join(f"{trial.command}\n" for trial in trials))
            return 0
    except (RecipeError, ValueError) as error:
        raise UsageError(f"study: {error}") from error
    except StudyError as error:
        raise DataError(f"study: {error}") from error
    with _named_errors():
        return run_loss_comparison(plan, rounds=rounds)
