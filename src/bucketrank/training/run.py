"""One run from start to end, in a folder."""

from __future__ import annotations

import json
import logging
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console

from bucketrank.data import find_splits
from bucketrank.errors import ChangedDataError, RecipeError
from bucketrank.evaluation import Evaluator
from bucketrank.provenance import describe
from bucketrank.settings import RankingSettings, Recipe, detector_spec, load_recipe, recipe_to_yaml
from bucketrank.settings.recipe import MAY_CHANGE, fixed_differences, from_dict
from bucketrank.training.data_fingerprint import Fingerprint, fingerprint_of, read_fingerprint, require_same_data
from bucketrank.training.data_module import DataModule, Position, seed_of
from bucketrank.training.detector_module import DetectorModule
from bucketrank.training.final_weights import read_final_weights, write_final_weights
from bucketrank.training.launch import end_with_parent, is_first_process, parent_of_others
from bucketrank.training.loggers import build_loggers, require_loggers
from bucketrank.training.process_state import deterministic_restored, quiet
from bucketrank.training.progress_display import ProgressDisplay
from bucketrank.training.run_keeper import RunKeeper
from bucketrank.training.run_lock import lock_run_folder, require_no_foreign_files
from bucketrank.training.schedule import Schedule, require_known_factors
from bucketrank.training.stop_signals import Interrupted, StopSignals, stop_signals
from bucketrank.training.training_curves import draw_curves
from bucketrank.training.validation_images import draw_validation_images
from bucketrank.weights.atomic import write_text
from bucketrank.weights.files import Meta
from bucketrank.weights.load import build_detector, load_initial_weights, without_weights

VERSIONED = ("bucketrank", "torch", "torchvision", "timm", "transformers")  # in weights files
PACKAGES = ("bucketrank", "torch", "torchvision", "lightning", "timm", "transformers", "numba", "numpy", "safetensors")


@dataclass(frozen=True)
class RunResult:
    """The folder of a finished run, the metrics of its last evaluation and calibration, and its final weights."""

    folder: Path  # folder of the run
    metrics: dict[str, float]  # metrics by name, such as boxes/AP
    weights: Path  # weights.safetensors in the folder
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

    ``resume`` continues the run in ``out``, or starts it if there is none; on a CPU it ends bit-identical to a run that
    was never interrupted. ``recipe`` and ``data`` may then be None: they are stored in the folder. If images or
    annotations changed, the run is resumed only with ``allow_changed_data``; if classes changed, it is not resumed.

    Raises DataError for data that cannot be trained on, RecipeError for invalid settings, RunFolderError for a folder
    in use, NonFiniteLossError with the ids of the images, and Interrupted after Ctrl-C or SIGTERM.

    Args:
        recipe: a recipe, its name, or its file.
        data: folder of the data set.
        out: folder of the run.
        resume: continue the run in the folder, or start it.
        allow_changed_data: resume although images or annotations changed.
        console: where progress is printed; by default the terminal.
    """
    folder = Path(out)
    with stop_signals() as stop, lock_run_folder(folder) if is_first_process() else nullcontext():
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
    recipe: Recipe | str | None,
    data: Path | str | None,
    folder: Path,
    *,
    resume: bool,
    allow_changed_data: bool,
    console: Console,
    stop: StopSignals,
) -> RunResult:
    recipe, data = _recipe_and_data(recipe, data, folder, resume=resume)
    splits = find_splits(data, layout=recipe.data.chosen_layout)
    splits = splits.with_holdout(recipe.data.holdout)
    with quiet(), deterministic_restored():
        trainer = _trainer(recipe, folder)
        first_process = trainer.is_global_zero
        if not first_process:
            end_with_parent()
        masks = _predicts_masks(recipe)
        data_module = DataModule(splits, recipe, masks=masks, check=first_process)
        batches = len(data_module.batches(world_size=trainer.world_size))
        schedule = Schedule(
            recipe.schedule,
            batch_size=recipe.data.batch_size,
            steps_per_epoch=math.ceil(batches / recipe.schedule.accumulate),
        )
        recipe = replace(recipe, loss=recipe.loss.for_run(batches_per_epoch=batches))
        fingerprint = None
        if first_process:
            fingerprint = fingerprint_of(data_module.train.split, data_module.val_split, masks=masks)
            if resume:
                _require_same_data(folder, fingerprint, allow_changes=allow_changed_data)
        recipe, keeper, module = _prepare(
            recipe,
            data_module,
            folder,
            schedule=schedule,
            batches=batches,
            resume=resume,
            changed_data=allow_changed_data,
            on_cpu=trainer.strategy.root_device.type == "cpu",
            stop=stop,
        )
        position = data_module.position = module.position
        finished_before = keeper.ended(module)
        if fingerprint is not None:
            _describe(folder, recipe, data, fingerprint)
            _announce(console, recipe, data_module, schedule, position, trainer, folder)
        trainer.callbacks += [ProgressDisplay(console), keeper]  # type: ignore[attr-defined]
        trainer.fit_loop.max_epochs = math.ceil(schedule.total_steps / schedule.steps_per_epoch)
        stop.defer()
        try:
            with parent_of_others():
                if position.batch and (position.batch >= batches or position.step >= schedule.total_steps):
                    # The epoch was trained, but not yet evaluated.
                    trainer.validate(module, datamodule=data_module, verbose=False)
                    keeper.close_epoch(trainer, module, evaluated=True)
                if not keeper.ended(module):
                    progress: Any = trainer.fit_loop.epoch_progress.current
                    progress.processed = progress.completed = position.epoch
                    trainer.fit(module, datamodule=data_module)
        finally:
            stop.deliver()
        if not keeper.ended(module):
            raise Interrupted
    weights = folder / "weights.safetensors"
    metrics = module.metrics
    if first_process:
        if position.step < schedule.total_steps:
            _print(console, f"Stopped early at step {position.step:,}: no higher AP in {keeper.stale} evaluations.")
        kept = read_final_weights(weights) if finished_before else None
        if kept is None:
            meta = write_final_weights(
                module.evaluated, keeper.meta(module), data_module, folder, settings=recipe.trainer, console=console
            )
            final = module.evaluated
        else:
            final, meta = kept
            _print(console, f"The run is already finished; {weights} stays as it is.")
        metrics = meta.metrics
        draw_curves(keeper.train, keeper.validation, folder / "curves.png")
        draw_validation_images(
            final,
            data_module,
            folder / "pictures",
            threshold=meta.threshold,
            count=recipe.trainer.pictures,
        )
        _print(console, f"Done: {weights}")
    return RunResult(folder, metrics, weights, position.step)


def _recipe_and_data(
    recipe: Recipe | str | None, data: Path | str | None, folder: Path, *, resume: bool
) -> tuple[Recipe, Path | str]:
    """Return the recipe and the data folder: those given, or those stored by the run that is resumed."""
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
                f"{', '.join(MAY_CHANGE)} may change, and the seed may not)"
            )
        if recipe is not None:
            recipe = replace(before, trainer=recipe.trainer, data=recipe.data)
        recipe = recipe or before
        data = data or _stored_data(folder)
    if recipe is None or data is None:
        if stored.is_file() and resume:
            raise RecipeError(
                f"{folder / 'environment.json'}: missing or damaged, so the data folder is unknown; repeat --data"
            )
        raise RecipeError(f"{folder}: there is no run to resume; give a recipe and --data to start one")
    if not recipe.trainer.strategy.startswith(("auto", "ddp")):
        raise RecipeError(
            f"trainer.strategy: expected auto or one of Lightning's ddp strategies, got {recipe.trainer.strategy!r}"
        )
    require_loggers(recipe.trainer.loggers)
    return recipe, data


def _stored_data(folder: Path) -> Path | None:
    """Return the data folder that the run stored, or None if it was killed before."""
    stored = (_read_environment(folder / "environment.json") or {}).get("data")
    return Path(stored) if isinstance(stored, str) else None


def _require_same_data(folder: Path, now: Fingerprint, *, allow_changes: bool) -> None:
    """Raise ChangedDataError if the data of a resumed run changed, or if that cannot be checked."""
    path = folder / "data.safetensors"
    before = read_fingerprint(path)
    if before is not None:
        require_same_data(folder, before, now, allow_changes=allow_changes)
    elif path.exists() or (folder / "checkpoints").is_dir():
        if not allow_changes:
            raise ChangedDataError(
                f"{path}: expected the fingerprint of the data, got a file that is missing or damaged; restore it, or "
                "pass --allow-changed-data to continue with the data as it is now"
            )
        logging.getLogger(__name__).warning("%s: missing or damaged; the data was not checked for changes", path)


def _require_same_recipe(folder: Path, checkpoint: dict[str, Any], recipe: Recipe) -> None:
    """Raise RecipeError if the recipe is not the one that the checkpoint was trained by, such as an edited file."""
    changed = fixed_differences(from_dict(checkpoint["recipe"], source="checkpoint"), recipe)
    if changed:
        key, (old, new) = next(iter(changed.items()))
        raise RecipeError(
            f"{folder / 'recipe.yaml'}: the run was trained with {key} {old!r}, got {new!r}; undo the change, or "
            "start a new run with another --out"
        )


def _trainer(recipe: Recipe, folder: Path) -> pl.Trainer:
    try:
        trainer = _lightning_trainer(recipe, folder)
    except (ValueError, MisconfigurationException) as error:
        devices = "trainer.accelerator, trainer.devices and trainer.strategy"
        raise RecipeError(f"expected {devices} that Lightning accepts on this machine, got: {error}") from error
    # Lightning's handler of SIGTERM ends a run with status 0, and broadcasts in the midst of other collectives.
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return trainer


def _lightning_trainer(recipe: Recipe, folder: Path) -> pl.Trainer:
    settings = recipe.trainer
    return pl.Trainer(
        accelerator=settings.accelerator,
        devices=settings.devices if settings.devices == "auto" else int(settings.devices),
        num_nodes=settings.nodes,
        strategy=settings.strategy,
        precision=settings.precision,
        deterministic=settings.deterministic,
        max_epochs=1,  # set when the number of batches is known
        accumulate_grad_batches=recipe.schedule.accumulate,
        gradient_clip_val=recipe.schedule.clip,
        default_root_dir=folder,
        logger=build_loggers(settings.loggers, folder),
        log_every_n_steps=1,  # the run keeper decides what is logged
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
    )


def _prepare(
    recipe: Recipe,
    data_module: DataModule,
    folder: Path,
    *,
    schedule: Schedule,
    batches: int,
    resume: bool,
    changed_data: bool,
    on_cpu: bool,
    stop: StopSignals,
) -> tuple[Recipe, RunKeeper, DetectorModule]:
    """Return the complete recipe, the keeper of the run's files, and the module as it starts or resumes."""

    def meta(module: DetectorModule) -> Meta:
        return Meta(
            classes=data_module.classes,
            category_ids=data_module.train.category_ids,
            threshold=module.threshold,
            recipe=without_weights(complete).to_dict(),
            metrics=module.metrics,
            versions={name: version(name) for name in VERSIONED},
            images={"train": len(data_module.train), "val": len(data_module.val)},
        )

    keeper = RunKeeper(folder, recipe=recipe, batches=batches, meta=meta, stop=stop)
    checkpoint = keeper.checkpoints.load() if resume else None
    if checkpoint is not None:
        _require_same_recipe(folder, checkpoint[0], recipe)
    torch.manual_seed(seed_of(recipe.trainer.seed))
    new = checkpoint is None and recipe.init is None
    buildable = recipe if new else without_weights(recipe)
    try:
        model = build_detector(buildable, num_classes=len(data_module.classes))
        require_known_factors(model, recipe.schedule)
        evaluator = Evaluator(data_module.val_split, masks=model.masks, style=recipe.data.style)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    complete = keeper.recipe = replace(recipe, detector=model.complete_settings(recipe.detector))
    if checkpoint is None and recipe.init is not None:
        skipped = load_initial_weights(model, recipe.init, classes=data_module.classes)
        if skipped and is_first_process():
            listed = ", ".join(skipped[:8]) + (", ..." if len(skipped) > 8 else "")
            logging.getLogger(__name__).warning("init: %d tensors keep their initial values: %s", len(skipped), listed)
    if on_cpu:
        # Convolutions and batch norms on a CPU are faster with the channels last.
        model = model.to(memory_format=torch.channels_last)
    module = DetectorModule(
        model,
        schedule=schedule,
        position=Position(),
        evaluator=evaluator,
        seed=recipe.trainer.seed,
        keep_detections=recipe.trainer.keep_detections,
    )
    if checkpoint is not None:
        state, path = checkpoint
        if path != keeper.checkpoints.last:
            logging.getLogger(__name__).warning("the last checkpoint is missing or damaged; resuming from %s", path)
        keeper.restore(state, module, changed_data=changed_data)
    elif resume and is_first_process():
        keeper.train.cut(-1)
        keeper.validation.cut(-1)
    return complete, keeper, module


def _predicts_masks(recipe: Recipe) -> bool:
    """Return whether the detector of a recipe has masks; RecipeError if its library cannot be imported."""
    try:
        detector = detector_spec(recipe.detector.name).load()
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return bool(detector.predicts_masks(recipe.detector))


def _describe(folder: Path, recipe: Recipe, data: Path | str, fingerprint: Fingerprint) -> None:
    """Write the recipe, the data folder and the fingerprint, and at the first start the command and the machine.

    The recipe comes first: with it the folder holds a run, which can be resumed if it is killed before the next file.
    """
    write_text(folder / "recipe.yaml", recipe_to_yaml(recipe))
    environment, place = folder / "environment.json", str(Path(data).absolute())
    before = _read_environment(environment)
    if before is None or before.get("data") != place:  # the data may have been moved
        machine = describe("cuda" if torch.cuda.is_available() else "cpu", packages=PACKAGES)
        about = before or {"command": sys.argv, "data": place, **machine}
        write_text(environment, json.dumps({**about, "data": place}, indent=2) + "\n")
    fingerprint.write(folder / "data.safetensors")


def _read_environment(path: Path) -> dict[str, Any] | None:
    """Return what a run wrote about itself, or None if the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _announce(
    console: Console,
    recipe: Recipe,
    data_module: DataModule,
    schedule: Schedule,
    position: Position,
    trainer: pl.Trainer,
    folder: Path,
) -> None:
    """Print what is going to be trained."""
    settings = recipe.schedule
    rate = f"{schedule.scaled:.4g}"
    if schedule.scaled != settings.lr:
        rate += f" ({settings.scaling}: {settings.lr:g} for {settings.base_batch} images, {schedule.batch_size} here)"
    method = f" ({recipe.loss.method})" if isinstance(recipe.loss, RankingSettings) else ""
    classes, backbone = data_module.classes, recipe.backbone_name
    lines = [
        f"{recipe.detector.name}{f' with {backbone}' if backbone else ''}, loss {recipe.loss.name}{method}",
        f"{len(data_module.train):,} training images, {len(data_module.val):,} validation images, "
        f"{len(classes)} classes: " + ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else ""),
        f"{schedule.total_steps:,} steps of {schedule.batch_size} images on {trainer.world_size} "
        f"{trainer.strategy.root_device.type} device{'s' * (trainer.world_size > 1)}; learning rate {rate}",
        f"run folder: {folder}",
    ]
    if 0 < position.step < schedule.total_steps:
        lines.append(f"resuming after step {position.step:,} (epoch {position.epoch + 1})")
    _print(console, "\n".join(lines))


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
