"""The batch size that fills a GPU: ``--batch -1``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from typing import Protocol

import torch
from lightning.fabric import Fabric

from bucketrank.data import collate
from bucketrank.errors import OutOfMemoryError, RecipeError
from bucketrank.settings import Recipe
from bucketrank.settings.training import AUTO_BATCH
from bucketrank.training.batches import RunData
from bucketrank.training.loop import DetectorLoss, HiddenBatch
from bucketrank.training.optimiser import EMA, Batch, build_optimiser
from bucketrank.weights.load import build_detector, without_weights

FILLED = 0.8  # fraction of the free memory that a step may use; the rest is for fragmentation and larger batches
MIN_STEPS = 10  # per epoch
SMALLER = 0.8  # factor of a batch that does not fit although it should


class Meter(Protocol):
    """The memory of a device."""

    def free(self) -> int:
        """Return the bytes that a run may use."""

    def peak(self, step: Callable[[], None]) -> int | None:
        """Run a training step; return the bytes it needs at most, or None if they are not there."""


class CudaMeter:
    """The memory of one CUDA or ROCm GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def peak(self, step: Callable[[], None]) -> int | None:
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        try:
            step()
            torch.cuda.synchronize(self.device)
        except torch.OutOfMemoryError:
            return None
        finally:
            torch.cuda.empty_cache()
        return torch.cuda.max_memory_allocated(self.device) - before


def fill_gpu(recipe: Recipe, data: RunData, fabric: Fabric) -> Recipe:
    """Return the recipe with the largest batch size whose training steps fit on the GPU.

    Steps of 1 and 2 images give the memory per image. They have the images with the most objects, at the largest size
    of the recipe. An epoch keeps at least MIN_STEPS steps.
    """
    if recipe.data.batch_size != AUTO_BATCH:
        return recipe
    if fabric.world_size > 1:
        raise RecipeError(
            f"data.batch_size: expected a number of images for {fabric.world_size} devices, got {AUTO_BATCH}, which "
            "measures the memory of one; try it with --trainer.devices 1 and multiply"
        )
    meter, steps, parts = build_meter(fabric.device), Steps(recipe, data, fabric), recipe.schedule.accumulate
    images = largest_batch(
        lambda count: meter.peak(lambda: steps.run(count)),
        budget=int(FILLED * meter.free()),
        limit=max(1, len(data.train) // (MIN_STEPS * parts)),
    )
    return replace(recipe, data=replace(recipe.data, batch_size=images * parts))


def build_meter(device: torch.device) -> Meter:
    """Return the meter of a device; RecipeError if its memory cannot be measured."""
    if device.type != "cuda":
        raise RecipeError(
            f"data.batch_size: expected a number of images on a {device.type} device, got {AUTO_BATCH}, which fills "
            "the memory of a GPU; give a number, such as --batch 4"
        )
    return CudaMeter(device)


def largest_batch(peak: Callable[[int], int | None], *, budget: int, limit: int) -> int:
    """Return the largest number of images, up to ``limit``, whose step needs at most ``budget`` bytes.

    ``peak`` measures the bytes of a step with this number of images, or returns None if memory ran out.

    >>> largest_batch(lambda images: 300 + 100 * images, budget=1000, limit=64)
    7
    """
    one = peak(1)
    if one is None or one > budget:
        raise OutOfMemoryError(
            f"data.batch_size: not even one image fits into {budget / 2**30:.1f} GiB; use a smaller --imgsz, or "
            "--backbone.checkpointing true"
        )
    two = peak(2) if limit > 1 else None
    if two is None or two > budget:
        return 1
    images = min(limit, 2 + (budget - two) // max(two - one, 1))
    while images > 2:
        used = peak(images)
        if used is not None and used <= budget:
            break
        images = max(2, int(images * SMALLER))
    return images


class Steps:
    """Training steps of a new detector, whose weights are thrown away."""

    def __init__(self, recipe: Recipe, data: RunData, fabric: Fabric) -> None:
        inputs, loss = recipe.inputs, recipe.loss.for_run(batches_per_epoch=1)
        if isinstance(inputs.min_size, tuple):
            inputs = replace(inputs, min_size=max(inputs.min_size))
        self.recipe = without_weights(replace(recipe, inputs=inputs, loss=loss))
        self.data, self.fabric = data, fabric
        objects = [len(data.train.labels_of(index)) for index in range(len(data.train))]
        self.order = sorted(range(len(objects)), key=objects.__getitem__, reverse=True)

    def run(self, count: int) -> None:
        """Build a detector, and train it on ``count`` images for one step."""
        detector = build_detector(self.recipe, num_classes=len(self.data.classes)).to(self.fabric.device)
        mixed = self.recipe.trainer.precision.endswith("-mixed")
        optimiser = build_optimiser(detector, self.recipe.schedule, mixed_precision=mixed)
        average = None if self.recipe.schedule.ema is None else EMA(detector, self.recipe.schedule.ema)
        model, fabric_optimiser = self.fabric.setup(DetectorLoss(detector), optimiser)
        loss, _ = model(HiddenBatch(self._batch(count)))
        self.fabric.backward(loss)
        fabric_optimiser.step()
        del average

    def _batch(self, count: int) -> Batch:
        batch = collate([self.data.train[index] for index in islice(cycle(self.order), count)])
        return self.fabric.to_device(batch)  # type: ignore[no-any-return]
