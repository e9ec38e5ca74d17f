"""One run, from a recipe and a data folder to the final weights."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from bucketrank.data import CocoDataset, eval_transform, find_splits
from bucketrank.data.problems import counted
from bucketrank.detectors import Detector
from bucketrank.errors import CannotCalibrateError, RecipeError, RunFolderError, WeightsError, printable
from bucketrank.evaluation import Evaluator
from bucketrank.evaluation.calibration import Calibration, calibrate
from bucketrank.output import say
from bucketrank.settings import RankingSettings, Recipe, detector_spec, load_recipe
from bucketrank.settings.recipe import MAY_CHANGE, fixed_differences, from_dict, require_init
from bucketrank.settings.training import TrainerSettings
from bucketrank.training.batch_size import fill_gpu
from bucketrank.training.batches import RunData, seed_of
from bucketrank.training.checkpoints import Checkpoints, Progress
from bucketrank.training.fabric import (
    ResumeAdvice,
    build_fabric,
    deterministic_algorithms,
    killed_process_named,
    quiet,
    require_strategy,
)
from bucketrank.training.folder import (
    describe_run,
    fingerprint_of,
    lock_run_folder,
    require_no_foreign_files,
    require_same_data,
    stored_data_folder,
)
from bucketrank.training.log import RunLog, require_loggers
from bucketrank.training.loop import Loop, fitting_steps
from bucketrank.training.optimiser import Schedule, require_known_factors
from bucketrank.training.processes import (
    StopSignals,
    end_with_parent,
    is_first_process,
    pass_pid_to_children,
    stop_signals,
)
from bucketrank.weights.atomic import write
from bucketrank.weights.files import Meta, describe_scores, read_weights, save_weights
from bucketrank.weights.load import build_detector, load_initial_weights, load_model, without_weights

if TYPE_CHECKING:
    from lightning.fabric import Fabric

MAX_LISTED = 8  # upper bound on the names in a message


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder, the metrics of its last evaluation and calibration, and its final weights."""

    folder: Path  # run folder
    metrics: dict[str, float]  # metrics by name, such as boxes/AP
    weights: Path  # weights.safetensors in the run folder
    steps: int  # number of optimiser steps


def train(
    recipe: Recipe | str | None,
    data: Path | str | None,
    out: Path | str,
    *,
    resume: bool = False,
    allow_changed_data: bool = False,
    console: Console | None = None,
) -> RunResult:
    """Train by ``recipe`` on the data set in the folder ``data``; write everything to the folder ``out``.

    ``recipe`` may also be a recipe's name or file. ``resume`` continues the run in ``out``, or starts one if none
    exists; ``recipe`` and ``data`` may then be None, because the folder stores them. On a CPU, a resumed run ends
    bit-identical to an uninterrupted one. If images or annotations changed, the run resumes only with
    ``allow_changed_data``; if classes changed, it never resumes.

    Progress is printed to ``console``, by default the terminal. Raises DataError for data that cannot be used,
    RecipeError for invalid settings, RunFolderError for a folder in use, NonFiniteLossError with the image ids, and
    Interrupted after Ctrl-C or SIGTERM.
    """
    folder = Path(out)
    with stop_signals() as stop, lock_run_folder(folder) if is_first_process() else nullcontext():
        recipe, data = _resolve(recipe, data, folder, resume=resume)
        with quiet(), deterministic_algorithms(enabled=recipe.trainer.deterministic):
            return _train(
                recipe,
                data,
                folder,
                resume=resume,
                allow_changed_data=allow_changed_data,
                console=console or Console(),
                stop=stop,
            )


def _train(
    recipe: Recipe,
    data_folder: Path | str,
    folder: Path,
    *,
    resume: bool,
    allow_changed_data: bool,
    console: Console,
    stop: StopSignals,
) -> RunResult:
    fabric = build_fabric(recipe.trainer, folder)
    first_process = fabric.is_global_zero
    if not first_process:
        end_with_parent()

    # Load the data, which determines the length of the run.
    splits = find_splits(data_folder, layout=recipe.data.chosen_layout).with_holdout(recipe.data.holdout)
    masks = _predicts_masks(recipe)
    data = RunData(splits, recipe, masks=masks, check=first_process)
    recipe = data.recipe = fill_gpu(recipe, data, fabric)
    batches = len(data.batches(world_size=fabric.world_size))
    schedule = Schedule(
        recipe.schedule,
        batch_size=recipe.data.batch_size,
        steps_per_epoch=math.ceil(batches / recipe.schedule.accumulate),
    )
    recipe = replace(recipe, loss=recipe.loss.for_run(batches_per_epoch=batches))
    fingerprint = fingerprint_of(data.train.split, data.val.split, masks=data.train.masks) if first_process else None
    if fingerprint is not None and resume:
        require_same_data(folder, fingerprint, allow_changes=allow_changed_data)

    # Build the detector, and load the checkpoint to resume from.
    checkpoint = _load_checkpoint(folder, recipe) if resume else None
    detector, evaluator = _build(recipe, data, initialise=checkpoint is None, console=console)
    recipe = replace(recipe, detector=detector.complete_settings(recipe.detector))
    if fabric.device.type == "cpu":
        detector = detector.to(memory_format=torch.channels_last)  # faster convolutions and batch norms on a CPU
    trainer = recipe.trainer
    log = RunLog(
        folder,
        console,
        fabric=fabric,
        schedule=schedule,
        log_every=trainer.log_every,
        max_seconds=trainer.max_seconds,
    )
    progress = Progress()
    if checkpoint is not None:
        progress = _resumed_progress(checkpoint, log, batches=batches)
        _continue_plan(progress, schedule, recipe.trainer, before=checkpoint["recipe"]["trainer"])
    elif resume:
        log.cut(None)
    if fingerprint is not None:
        describe_run(folder, recipe, data_folder, fingerprint)
        _announce(console, recipe, data, schedule, progress, fabric, folder)

    weights = folder / "weights.safetensors"
    finished = _read_final_weights(weights) if progress.is_finished(schedule) else None
    if finished is None:
        _launch(fabric, stop, folder)
        loop = Loop(
            fabric,
            detector,
            recipe=recipe,
            data=data,
            schedule=schedule,
            evaluator=evaluator,
            progress=progress,
            folder=folder,
            log=log,
            stop=stop,
        )
        if checkpoint is not None:
            loop.restore(checkpoint)
        with killed_process_named(fabric, folder):
            loop.run()
        final, meta = loop.evaluated_detector, loop.meta()
    else:
        final, meta = finished
    if first_process:
        if progress.out_of_time:
            limit = recipe.trainer.max_time
            say(console, f"Stopped at step {progress.step:,}: trainer.max_time {limit} is used up.")
        elif progress.step < schedule.total_steps:
            say(console, f"Stopped early at step {progress.step:,}: no higher AP in {progress.stale} evaluations.")
        if finished is None:
            meta = _write_final_weights(final, meta, data, folder, settings=recipe.trainer, console=console)
        else:
            say(console, f"The run is already finished; {weights} stays as it is.")
        log.draw_curves()
        count = recipe.trainer.pictures
        _draw_validation_images(final, data, folder / "pictures", threshold=meta.threshold, count=count)
        say(console, f"Done: {weights}")
    return RunResult(folder, meta.metrics, weights, progress.step)


def _resolve(
    recipe: Recipe | str | None, data: Path | str | None, folder: Path, *, resume: bool
) -> tuple[Recipe, Path | str]:
    """Return the recipe and the data folder, given or stored in the folder of a resumed run."""
    if isinstance(recipe, str):
        recipe = load_recipe(recipe)
    stored = folder / "recipe.yaml"
    if is_first_process():
        require_no_foreign_files(folder, resume=resume)
    if stored.is_file() and not resume and is_first_process():
        raise RecipeError(f"{folder} already holds a run; continue it with --resume, or choose another --out")
    if stored.is_file() and resume:
        before = load_recipe(stored)
        changed = {} if recipe is None else fixed_differences(before, recipe)
        if changed:
            key, (old, new) = next(iter(changed.items()))
            raise RecipeError(
                f"{folder}: the run began with {key} {old!r}, got {new!r}; a resumed run keeps its settings (only "
                f"{', '.join(MAY_CHANGE)} may change, and the seed may not); "
                f"for other settings, start a new run, from these weights with --init {folder / 'weights.safetensors'}"
            )
        if recipe is None:
            recipe = before
        else:  # the batch size may have been measured when the run began
            settings = replace(recipe.data, batch_size=before.data.batch_size)
            recipe = replace(before, trainer=recipe.trainer, data=settings)
        data = data or stored_data_folder(folder)
    if recipe is None or data is None:
        if stored.is_file() and resume:
            raise RecipeError(
                f"{folder / 'environment.json'}: missing or damaged, so the data folder is unknown; repeat --data"
            )
        raise RecipeError(f"{folder}: there is no run to resume; give a recipe and --data to start one")
    if not stored.is_file() and folder.resolve() == Path(data).resolve():
        raise RunFolderError(f"{folder}: expected a folder for the run, got the data set; choose another --out")
    require_init(recipe, str(folder))
    require_strategy(recipe.trainer.strategy)
    require_loggers(recipe.trainer.loggers)
    return recipe, data


def _predicts_masks(recipe: Recipe) -> bool:
    """Return whether the detector predicts masks; raise RecipeError if its library cannot be imported."""
    try:
        detector = detector_spec(recipe.detector.name).load()
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return bool(detector.predicts_masks(recipe.detector))


def _load_checkpoint(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Load the newest complete checkpoint, if any; raise RecipeError if recipe.yaml was edited since."""
    checkpoints = Checkpoints(folder / "checkpoints")
    loaded = checkpoints.load()
    if loaded is None:
        return None
    state, path = loaded
    changed = fixed_differences(from_dict(state["recipe"], source="checkpoint"), recipe)
    if changed:
        key, (old, new) = next(iter(changed.items()))
        raise RecipeError(
            f"{folder / 'recipe.yaml'}: the run was trained with {key} {old!r}, got {new!r}; undo the change, or "
            "start a new run with another --out"
        )
    if path != checkpoints.last:
        logging.getLogger(__name__).warning("the last checkpoint is missing or damaged; resuming from %s", path)
    return state


def _build(recipe: Recipe, data: RunData, *, initialise: bool, console: Console) -> tuple[Detector, Evaluator]:
    """Build the detector, with initial weights unless a checkpoint follows, and the evaluator."""
    torch.manual_seed(seed_of(recipe.trainer.seed))
    buildable = recipe if initialise and recipe.init is None else without_weights(recipe)
    try:
        detector = build_detector(buildable, num_classes=len(data.classes))
        require_known_factors(detector, recipe.schedule)
        evaluator = Evaluator(data.val.split, masks=detector.masks, style=recipe.data.style)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if initialise and recipe.init is not None:
        first = is_first_process()
        tell = partial(say, console) if first else lambda text: None
        skipped = load_initial_weights(detector, recipe.init, classes=data.classes, tell=tell)
        if skipped and first:
            listed = _shortened(skipped)
            logging.getLogger(__name__).warning("init: %d tensors keep their initial values: %s", len(skipped), listed)
    return detector, evaluator


def _resumed_progress(checkpoint: dict[str, Any], log: RunLog, *, batches: int) -> Progress:
    """Return the progress of a checkpoint, and cut the tables back to it.

    If changed data has another number of batches, the run continues at the start of the epoch in which it stopped.
    Steps are then counted as if all earlier epochs had been as long as this one, because the schedule depends on them.
    """
    progress = Progress.from_checkpoint(checkpoint)
    old_batches, schedule = checkpoint["batches"], log.schedule
    if old_batches != batches:
        progress.batch, progress.step = 0, progress.epoch * schedule.steps_per_epoch
        log.restart_epoch(progress, old_steps=math.ceil(old_batches / schedule.settings.accumulate))
    else:
        log.cut(progress)
    return progress


def _continue_plan(
    progress: Progress, schedule: Schedule, settings: TrainerSettings, *, before: dict[str, Any]
) -> None:
    """Restore the length of a run with a time budget; a changed ``trainer.max_time`` extends or shortens it."""
    limit = settings.max_seconds
    if settings.max_time != before["max_time"] and progress.step:
        progress.planned = None if limit is None else fitting_steps(progress, limit)
        progress.out_of_time = limit is not None and progress.seconds >= limit
    schedule.planned_steps = progress.planned
    steps, missing = schedule.steps_per_epoch, progress.epoch * schedule.steps_per_epoch - progress.step
    if 0 < missing < steps and progress.batch == 0 and not progress.is_finished(schedule):
        # Reopen the epoch that the earlier budget cut short.
        progress.epoch, progress.batch = progress.epoch - 1, (steps - missing) * schedule.settings.accumulate


def _launch(fabric: Fabric, stop: StopSignals, folder: Path) -> None:
    """Start the other processes, if any, and connect to them; stop signals are blocked meanwhile."""
    stop.defer()
    try:
        with pass_pid_to_children(folder):
            ResumeAdvice.install(folder)
            fabric.launch()
    finally:
        stop.unblock()


def _announce(
    console: Console,
    recipe: Recipe,
    data: RunData,
    schedule: Schedule,
    progress: Progress,
    fabric: Fabric,
    folder: Path,
) -> None:
    settings = recipe.schedule
    rate = f"{schedule.scaled:.4g}"
    if schedule.scaled != settings.lr:
        rate += f" ({settings.scaling}: {settings.lr:g} for {settings.base_batch} images, {schedule.batch_size} here)"
    method = f" ({recipe.loss.method})" if isinstance(recipe.loss, RankingSettings) else ""
    backbone = f" with {recipe.backbone_name}" if recipe.backbone_name else ""
    devices = f"{fabric.world_size} {fabric.device.type} device{'s' * (fabric.world_size > 1)}"
    length = f"{schedule.total_steps:,} steps of {schedule.batch_size} images"
    if recipe.trainer.max_time is not None:
        length = f"steps of {schedule.batch_size} images for {recipe.trainer.max_time}"
    lines = [
        f"{recipe.detector.name}{backbone}, loss {recipe.loss.name}{method}",
        f"{counted(len(data.train), 'training image')}, {counted(len(data.val), 'validation image')}, "
        f"{counted(len(data.classes), 'class', plural='classes')}: {_shortened(data.classes)}",
        f"{length} on {devices}; learning rate {rate}",
        f"run folder: {folder}",
    ]
    if 0 < progress.step < schedule.total_steps:
        lines.append(f"resuming after step {progress.step:,} (epoch {progress.epoch + 1})")
    say(console, "\n".join(lines))
    for warning in data.warnings:
        say(console, f"warning: {printable(warning)}", style="yellow")


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "")


def _write_final_weights(
    detector: Detector,
    meta: Meta,
    data: RunData,
    folder: Path,
    *,
    settings: TrainerSettings,
    console: Console,
) -> Meta:
    """Calibrate the detector in place, write weights.safetensors, and calibrate best.safetensors.

    The scores are calibrated on training images with validation transforms, so validation metrics stay unbiased.
    Checkpoints hold the weights before calibration, and best.safetensors is calibrated only once: a run resumed here
    ends with the same files. If the scores cannot be calibrated, they stay as they are, and one line says why.
    """
    best = folder / "best.safetensors"
    if settings.calibrate:
        before = {name: tensor.clone() for name, tensor in detector.state_dict().items()}
        images = CocoDataset(data.train.split, transform=eval_transform())
        try:
            calibration = calibrate(detector, images, max_images=settings.calibration_images)
        except CannotCalibrateError as error:
            say(console, f"The scores are not calibrated: {str(error).removeprefix('calibrate: ')}")
        else:
            meta = meta.calibrated(calibration)
            say(console, describe_scores(meta))
            if best.is_file():
                _calibrate_best(best, before, detector, calibration, images, settings)
    save_weights(folder / "weights.safetensors", detector, meta)
    return meta


def _read_final_weights(path: Path) -> tuple[Detector, Meta] | None:
    """Read the final weights of a finished run; return None if the file is missing or damaged."""
    if not path.is_file():
        return None
    try:
        return load_model(path)
    except WeightsError:
        return None


def _calibrate_best(
    path: Path,
    last: dict[str, Tensor],
    detector: Detector,
    calibration: Calibration,
    images: CocoDataset,
    settings: TrainerSettings,
) -> None:
    """Calibrate the best weights; reuse the calibration if they equal the last weights."""
    state, meta = read_weights(path)
    if meta.calibration is not None:
        return
    if all(torch.equal(tensor, last[name].cpu()) for name, tensor in state.items()):
        save_weights(path, detector, meta.calibrated(calibration))
        return
    model, _ = load_model(path)
    model.to(next(detector.parameters()).device)
    try:
        own = calibrate(model, images, max_images=settings.calibration_images)
    except CannotCalibrateError:
        return  # an early epoch may have too few correct detections
    save_weights(path, model, meta.calibrated(own))


@torch.no_grad()
def _draw_validation_images(model: Detector, data: RunData, folder: Path, *, threshold: float, count: int) -> None:
    """Draw detections and ground truth on up to ``count`` images spread over the validation set; name files by id."""
    from bucketrank.drawing import draw  # loads matplotlib

    images = data.val
    count = min(count, len(images))
    indices = [round(number * (len(images) - 1) / max(count - 1, 1)) for number in range(count)]
    model.eval()
    device = next(model.parameters()).device
    for index in indices:
        image, target = images[index]
        (detections,) = model([image.to(device)])
        result = {name: value.cpu() for name, value in detections.items()}
        drawn = draw(image, result, ground_truth=target, classes=data.classes, threshold=threshold)
        write(folder / f"{int(target['image_id'])}.jpg", partial(drawn.save, format="JPEG", quality=90))
