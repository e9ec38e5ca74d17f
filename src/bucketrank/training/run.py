"""One training from beginning to end, in a folder."""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console

from bucketrank.data import DataError, find_splits
from bucketrank.detectors import DETECTORS, Detector
from bucketrank.provenance.machine import describe
from bucketrank.training.atomic import write_text
from bucketrank.training.data import Data, Position, seed_of
from bucketrank.training.evaluate import evaluator_for
from bucketrank.training.figure import draw_curves
from bucketrank.training.keeper import Interrupted, Keeper
from bucketrank.training.module import DetectorModule
from bucketrank.training.pictures import draw_pictures
from bucketrank.training.progress import Shown, in_words
from bucketrank.training.recipe import MAY_CHANGE, Recipe, RecipeError, dump, kept_differences, load
from bucketrank.training.schedule import Schedule
from bucketrank.training.weights import Meta, WeightsError, build_detector, read_weights, save_weights, without_weights

PACKAGES = ("bucketrank", "torch", "torchvision", "lightning", "timm", "transformers", "numba", "numpy", "safetensors")


@dataclass(frozen=True)
class Result:
    """What came out: the folder, the metrics of the last evaluation, and the final weights."""

    folder: Path
    metrics: dict[str, float]
    weights: Path
    steps: int


def train(
    recipe: Recipe | str | None,
    data: Path | str | None,
    out: Path | str,
    *,
    resume: bool = False,
    console: Console | None = None,
) -> Result:
    """Train by ``recipe`` on the folder ``data``; everything is written to the folder ``out``.

    ``resume`` goes on with the run that is in ``out``, or starts it if there is none; on a CPU it ends with the same
    bits as a run that was never interrupted. ``recipe`` and ``data`` may then be None: the run knows its own.

    DataError if the data cannot be trained on, RecipeError if the settings cannot be, NonFiniteLossError with the ids
    of the images, Interrupted after Ctrl-C, with a checkpoint to go on from.
    """
    folder = Path(out)
    console = console or Console()
    wanted, data = _start(recipe, data, folder, resume=resume)
    kind = DETECTORS[wanted.detector["name"]]
    splits = find_splits(data, layout=None if wanted.data.layout == "auto" else wanted.data.layout)
    with quiet(), _deterministic_as_before():
        trainer = _trainer(wanted, folder)
        main = trainer.is_global_zero
        told = Data(splits, wanted, masks=kind.masks, check=main)
        batches = len(told.batches(world_size=trainer.world_size))
        accumulate = wanted.schedule.accumulate
        schedule = Schedule(
            wanted.schedule, batch_size=wanted.data.batch_size, steps_per_epoch=math.ceil(batches / accumulate)
        )
        if wanted.loss.name == "alrp" and wanted.loss.balance_period is None:
            wanted = replace(wanted, loss=replace(wanted.loss, balance_period=batches))
        keeper, module = _prepare(wanted, told, folder, schedule=schedule, batches=batches, resume=resume)
        if main:
            _describe(folder, wanted, data)
        position = told.position = module.position
        if main:
            _announce(console, wanted, told, schedule, position, trainer, folder)
        trainer.callbacks += [Shown(console), keeper]  # type: ignore[attr-defined]
        trainer.fit_loop.max_epochs = math.ceil(schedule.total_steps / schedule.steps_per_epoch)
        with _stoppable(keeper):
            if position.batch and (position.batch >= batches or position.step >= schedule.total_steps):
                # The epoch was trained, but not yet evaluated.
                trainer.validate(module, datamodule=told, verbose=False)
                keeper.close_epoch(trainer, module, evaluated=True)
            if position.step < schedule.total_steps:
                progress: Any = trainer.fit_loop.epoch_progress.current
                progress.processed = progress.completed = position.epoch
                trainer.fit(module, datamodule=told)
    weights = folder / "weights.safetensors"
    if main:
        save_weights(weights, module.detector, keeper.meta(module))
        draw_curves(keeper.train, keeper.validation, folder / "curves.png")
        draw_pictures(
            module.detector, told, folder / "pictures", threshold=module.threshold, most=wanted.trainer.pictures
        )
        console.print(f"Done: {weights}", highlight=False, markup=False, soft_wrap=True)
    return Result(folder, module.metrics, weights, position.step)


def _start(
    recipe: Recipe | str | None, data: Path | str | None, folder: Path, *, resume: bool
) -> tuple[Recipe, Path | str]:
    """The recipe and the data of the run, which may be one that is there already."""
    if isinstance(recipe, str):
        recipe = load(recipe)
    stored = folder / "recipe.yaml"
    if stored.is_file() and not resume and _first_process():
        raise RecipeError(f"{folder} holds a run already; go on with it by --resume, or choose another folder by --out")
    if stored.is_file() and resume:
        before = load(stored)
        fixed = {} if recipe is None else kept_differences(before, recipe)
        if fixed:
            key, (old, new) = next(iter(fixed.items()))
            raise RecipeError(
                f"{folder}: the run began with {key} {old!r}, got {new!r}; a resumed run keeps its settings (only "
                f"{', '.join(MAY_CHANGE)} may change, and the seed may not)"
            )
        if recipe is not None:
            recipe = replace(before, trainer=recipe.trainer, data=recipe.data, backbone=before.backbone)
        recipe = recipe or before
        data = data or json.loads((folder / "environment.json").read_text(encoding="utf-8"))["data"]
    if recipe is None or data is None:
        raise RecipeError(f"{folder}: there is no run to go on with; give a recipe and --data to start one")
    if not recipe.trainer.strategy.startswith(("auto", "ddp")):
        raise RecipeError(
            f"trainer.strategy: expected auto or one of Lightning's ddp kinds, got {recipe.trainer.strategy!r}"
        )
    if recipe.trainer.tensorboard and find_spec("tensorboard") is None:
        raise RecipeError("trainer.tensorboard needs tensorboard; install with: pip install tensorboard")
    return recipe, data


def _first_process() -> bool:
    """Whether this process is the first, as far as the environment tells before Lightning starts."""
    from lightning.pytorch.utilities import rank_zero_only

    return int(getattr(rank_zero_only, "rank", 0) or 0) == 0


def _trainer(recipe: Recipe, folder: Path) -> pl.Trainer:
    settings = recipe.trainer
    logger: Any = False
    if settings.tensorboard:
        from lightning.pytorch.loggers import TensorBoardLogger

        logger = TensorBoardLogger(folder, name=None, version="tensorboard")
    return pl.Trainer(
        accelerator=settings.accelerator,
        devices=settings.devices if settings.devices == "auto" else int(settings.devices),
        num_nodes=settings.nodes,
        strategy=settings.strategy,
        precision=settings.precision,  # type: ignore[arg-type]
        deterministic=settings.deterministic,
        max_epochs=1,  # set when the number of batches is known
        accumulate_grad_batches=recipe.schedule.accumulate,
        gradient_clip_val=recipe.schedule.clip,
        default_root_dir=folder,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
    )


def _prepare(
    recipe: Recipe, data: Data, folder: Path, *, schedule: Schedule, batches: int, resume: bool
) -> tuple[Keeper, DetectorModule]:
    """The module as it is to start or to go on, and its keeper."""

    def meta(module: DetectorModule) -> Meta:
        return Meta(
            classes=data.classes,
            category_ids=data.train.category_ids,
            threshold=module.threshold,
            recipe=without_weights(recipe).to_dict(),
            metrics=module.metrics,
            versions={name: version(name) for name in ("bucketrank", "torch", "torchvision", "timm")},
        )

    keeper = Keeper(folder, settings=recipe.trainer, batches=batches, accumulate=recipe.schedule.accumulate, meta=meta)
    found = keeper.checkpoints.load() if resume else None
    torch.manual_seed(seed_of(recipe.trainer.seed))
    try:
        model = build_detector(recipe if found is None else without_weights(recipe), num_classes=len(data.classes))
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if found is None and recipe.init is not None:
        take_weights(model, recipe.init)
    module = DetectorModule(
        model,
        schedule=schedule,
        position=Position(),
        evaluator=evaluator_for(data.val_split, recipe, masks=model.masks),
        seed=recipe.trainer.seed,
    )
    if found is not None:
        state, path = found
        if path != keeper.checkpoints.last:
            logging.getLogger(__name__).warning("the last checkpoint is missing or damaged; going on from %s", path)
        keeper.restore(state, module)
    elif resume:
        keeper.train.cut(-1)
        keeper.validation.cut(-1)
    return keeper, module


def take_weights(model: Detector, path: str) -> list[str]:
    """Take from a weights file the tensors whose name and shape fit; returns the names of those that are left."""
    state, _ = read_weights(path)
    own = model.state_dict()
    fitting = {name: tensor for name, tensor in state.items() if name in own and own[name].shape == tensor.shape}
    missing = [name for name in own if name.startswith("backbone.") and name not in fitting]
    if missing:
        raise WeightsError(
            f"{path}: {len(missing)} tensors of the backbone are not in it or have another shape, like {missing[0]}; "
            "init needs a run with the same backbone"
        )
    model.load_state_dict(fitting, strict=False)
    return [name for name in own if name not in fitting]


def _describe(folder: Path, recipe: Recipe, data: Path | str) -> None:
    if not (folder / "recipe.yaml").exists():
        machine = describe("cuda" if torch.cuda.is_available() else "cpu", packages=PACKAGES)
        about = {"command": sys.argv, "data": str(Path(data).absolute()), **machine}
        write_text(folder / "environment.json", json.dumps(about, indent=2) + "\n")
    write_text(folder / "recipe.yaml", dump(recipe))


def _announce(
    console: Console,
    recipe: Recipe,
    data: Data,
    schedule: Schedule,
    position: Position,
    trainer: pl.Trainer,
    folder: Path,
) -> None:
    settings = recipe.schedule
    scaled = f"{schedule.scaled:.4g}"
    if schedule.scaled != settings.lr:
        scaled += f" ({settings.scaling}: {settings.lr:g} for {settings.base_batch} images, {schedule.batch_size} here)"
    lines = [
        f"{recipe.detector['name']} with {recipe.backbone.name}, loss {recipe.loss.name} ({recipe.loss.method})",
        f"{len(data.train):,} images to learn from, {len(data.val):,} to evaluate, {len(data.classes)} classes: "
        + ", ".join(data.classes[:8])
        + (", ..." if len(data.classes) > 8 else ""),
        f"{schedule.total_steps:,} steps of {schedule.batch_size} images on {trainer.world_size} "
        f"{trainer.strategy.root_device.type} device{'s' * (trainer.world_size > 1)}; learning rate {scaled}",
        f"everything goes to {folder}",
    ]
    if position.step:
        lines.append(f"going on after step {position.step:,} (epoch {position.epoch + 1})")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _stoppable(keeper: Keeper) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the step at hand; a second Ctrl-C at once."""

    def asked(number: int, frame: object) -> None:  # noqa: ARG001
        keeper.asked_to_stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            before[number] = signal.signal(number, asked)
        except ValueError:  # noqa: PERF203 (not the main thread: whoever started it decides)
            break
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _deterministic_as_before() -> Iterator[None]:
    """Lightning turns it on for the whole process, where a recipe asks for it."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning's advice that does not apply here."""
    # Lightning tells which devices there are, which is announced in our own words; timm tells which tensors of a file
    # a backbone does not need, which building it has checked.
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("lightning.pytorch", "timm"))}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # Frozen stages and batch norms are meant to be in eval mode.
        warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode at the start of training")
        # The number of workers is a setting.
        warnings.filterwarnings("ignore", message=r".*does not have many workers which may be a bottleneck")
        # From Lightning's own use of torch.utils._pytree.
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=DeprecationWarning)
        try:
            yield
        finally:
            for logger, level in loggers.items():
                logger.setLevel(level)


__all__ = ["DataError", "Interrupted", "Result", "in_words", "take_weights", "train"]
