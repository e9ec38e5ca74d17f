"""Training and validation batches, identical after a resume."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from bucketrank.data import (
    CocoDataset,
    GroupedBatchSampler,
    Splits,
    eval_transform,
    repeat_factors,
    require_sound,
    train_transform,
)
from bucketrank.data.batches import ImageLoader
from bucketrank.data.checks import Content, check_pair
from bucketrank.data.mixing import MixedImages
from bucketrank.data.problems import raise_errors
from bucketrank.errors import DataError, RecipeError
from bucketrank.settings import Recipe
from bucketrank.settings.training import DataSettings

Key = tuple[int, int]  # image index and augmentation seed


def seed_of(*numbers: int) -> int:
    """Return a 63-bit seed for a position in a run, such as (seed, epoch, rank, batch)."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big") >> 1


class SeededBatches(Sampler[list[Key]]):
    """The batches of an epoch from number ``start`` on, with an augmentation seed for each image.

    The seeds make the augmentation independent of data-loading workers and of resumes.
    """

    def __init__(self, batches: GroupedBatchSampler, *, seed: int, epoch: int, start: int = 0) -> None:
        self.batches, self.seed, self.epoch, self.start = batches, seed, epoch, start

    def __len__(self) -> int:
        return len(self.batches) - self.start

    def __iter__(self) -> Iterator[list[Key]]:
        self.batches.set_epoch(self.epoch)
        self.batches.skip(self.start)
        for number, batch in enumerate(self.batches, start=self.start):
            place = (self.seed, self.epoch, self.batches.rank, number)
            yield [(index, seed_of(*place, position)) for position, index in enumerate(batch)]


class SeededDataset(Dataset[Any]):
    """A data set that seeds its random transforms with the seed in the key."""

    def __init__(self, images: Dataset[Any]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    def __getitem__(self, key: Key) -> Any:
        index, seed = key
        before = torch.random.get_rng_state()
        torch.default_generator.manual_seed(seed)
        try:
            return self.images[index]
        finally:
            torch.random.set_rng_state(before)


class RunData:
    """The training and validation split of a data folder, batched by a recipe."""

    def __init__(self, splits: Splits, recipe: Recipe, *, masks: bool, check: bool = True) -> None:
        if splits.train is None:
            raise DataError(
                f"{splits.val.name if splits.val else 'the data set'}: expected annotations for training too, got only "
                "these for validation; add them, or check the names of files and folders (docs/data.md)"
            )
        if splits.val is None:
            raise DataError(
                "there are no annotations for validation; bucketrank split makes a validation set "
                "(docs/data.md describes the layouts)"
            )
        settings = recipe.data
        self.recipe, self.masks = recipe, masks
        needs_masks = masks or settings.copy_paste > 0
        if check:
            require_sound(splits.train, masks=needs_masks)
            require_sound(splits.val, masks=masks)
        transform = train_transform(
            flip=settings.flip, jitter=settings.jitter, crop=settings.crop, augment=settings.augment
        )
        self.train = CocoDataset(splits.train, masks=needs_masks, keep_empty=settings.keep_empty, transform=transform)
        self.val = CocoDataset(splits.val, transform=eval_transform())
        problems = check_pair(_content(self.train), _content(self.val))
        raise_errors(problems)
        self.warnings = [str(problem) for problem in problems if problem.severity == "warning"]
        if settings.repeat_threshold is None:
            self.repeats: int | list[int] = settings.repeat
        else:
            labels = [self.train.labels_of(index) for index in range(len(self.train))]
            self.repeats = repeat_factors(labels, threshold=settings.repeat_threshold)

    @property
    def settings(self) -> DataSettings:
        """The recipe's data settings."""
        return self.recipe.data

    @property
    def classes(self) -> list[str]:
        """Class names for the labels 1, 2, ..."""
        return self.train.class_names

    def batches(self, *, rank: int = 0, world_size: int = 1) -> GroupedBatchSampler:
        """Return the batches of one process; a step takes ``schedule.accumulate`` of them."""
        parts = world_size * self.recipe.schedule.accumulate
        if self.settings.batch_size % parts:
            near = max(parts, round(self.settings.batch_size / parts) * parts)
            raise RecipeError(
                f"data.batch_size: expected a multiple of {parts} ({world_size} devices x schedule.accumulate "
                f"{self.recipe.schedule.accumulate}), got {self.settings.batch_size}; the nearest is {near}"
            )
        return GroupedBatchSampler(
            self.train.sizes,
            batch_size=self.settings.batch_size // parts,
            repeats=self.repeats,
            seed=self.recipe.trainer.seed,
            rank=rank,
            world_size=world_size,
        )

    def train_loader(
        self,
        *,
        epoch: int,
        start: int = 0,
        last_epochs: bool = False,
        rank: int = 0,
        world_size: int = 1,
        pin_memory: bool = False,
    ) -> DataLoader[Any]:
        """Return a loader for one process, with the batches of ``epoch`` from number ``start`` on.

        Images are not mixed in the ``last_epochs``.
        """
        sampler = SeededBatches(
            self.batches(rank=rank, world_size=world_size), seed=self.recipe.trainer.seed, epoch=epoch, start=start
        )
        settings, mixed = self.settings, not last_epochs
        images = MixedImages(
            self.train,
            mosaic=settings.mosaic * mixed,
            mixup=settings.mixup * mixed,
            copy_paste=settings.copy_paste * mixed,
            keep_masks=self.masks,
        )
        return ImageLoader(
            SeededDataset(images), batch_sampler=sampler, num_workers=settings.workers, pin_memory=pin_memory
        )

    def val_loader(self, *, rank: int = 0, world_size: int = 1) -> DataLoader[Any]:
        """Return a loader for every ``world_size``-th validation image."""
        # A process without images repeats the first one. The evaluator counts repeated images once.
        indices = list(range(rank, len(self.val), world_size)) or [0]
        return ImageLoader(
            self.val,
            sampler=indices,
            batch_size=self.settings.val_batch_size,
            num_workers=self.settings.workers,
        )

    def min_val_batches(self, world_size: int) -> int:
        """Return the number of validation batches that every process has; some have one more."""
        min_images = max(1, len(self.val) // world_size)
        return math.ceil(min_images / self.settings.val_batch_size)


def _content(images: CocoDataset) -> Content:
    labels = [label for index in range(len(images)) for label in images.labels_of(index)]
    classes = list(zip(images.category_ids, images.class_names, strict=True))
    used = frozenset(images.category_ids[label - 1] for label in set(labels))
    return Content(images.split, classes, len(images), len(labels), used, frozenset(images.files))
