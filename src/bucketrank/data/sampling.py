"""Which images make up a batch, and how often an image comes in an epoch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler


def repeat_factors(labels: Iterable[Iterable[int]], *, threshold: float = 0.001) -> list[int]:
    """How often each image is to be seen, so that rare classes are seen more often (LVIS).

    With f_c the share of the images in which class c occurs, ``r(c) = max(1, sqrt(threshold / f_c))``; an image gets
    the largest r of its classes, rounded up, and 1 if it is empty. ``labels`` has the labels of every image.

    >>> repeat_factors([[1], [1], [1], [1, 2]], threshold=1.0)  # 1 is in all; 2 in a quarter: sqrt(4)
    [1, 1, 1, 2]
    """
    present = [frozenset(image) for image in labels]
    images = Counter(label for image in present for label in image)
    factor = {label: math.sqrt(threshold * len(present) / count) for label, count in images.items()}
    # The root of a whole number may come out a hair above it.
    return [math.ceil(max([1.0, *(factor[label] for label in image)]) - 1e-9) for image in present]


class GroupedBatchSampler(Sampler[list[int]]):
    """Random batches of images that are all wide or all tall, so that little is padded.

    Each epoch has its own order, which follows from ``seed`` and the epoch alone, on every machine. The few images
    that do not fill a batch of their kind are batched together; the last of these batches may be small. ``repeats`` is
    a number of times for all images, or one for each.

    With ``world_size`` processes, process ``rank`` gets every world_size-th batch. All get the same number: the first
    batches come again where the count does not divide. Lightning must not put its own sampler in this place:
    ``Trainer(use_distributed_sampler=False)``.

    To go on in the middle of an epoch, ``skip(batches)`` leaves out those that this process has had, once. (A count
    kept here would run ahead of training: a DataLoader asks for batches in advance.)

    >>> sampler = GroupedBatchSampler([(480, 640), (640, 480)] * 4, batch_size=2)
    >>> sorted(sorted(index % 2 for index in batch) for batch in sampler)  # wide ones are even, tall ones odd
    [[0, 0], [0, 0], [1, 1], [1, 1]]
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        *,
        batch_size: int,
        repeats: int | Sequence[int] = 1,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"GroupedBatchSampler: expected batch_size of at least 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"GroupedBatchSampler: expected rank below world_size {world_size}, got {rank}")
        times = [repeats] * len(sizes) if isinstance(repeats, int) else list(repeats)
        if len(times) != len(sizes) or min(times, default=1) < 1:
            raise ValueError(
                f"GroupedBatchSampler: expected repeats of at least 1 for each of {len(sizes)} images, "
                f"got {len(times)}, the least {min(times, default=1)}"
            )
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.epoch = 0
        self._start = 0
        self._indices = np.repeat(np.arange(len(sizes)), times)
        self._tall = np.asarray([height > width for height, width in sizes], dtype=bool)

    @property
    def sampler(self) -> GroupedBatchSampler:
        """Itself: Lightning sets the epoch of a batch sampler's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order."""
        self.epoch = epoch

    def skip(self, batches: int) -> None:
        """Leave out the first batches of the next epoch that is begun, and only of that one."""
        self._start = batches

    def __len__(self) -> int:
        """The batches of a whole epoch."""
        return math.ceil(math.ceil(len(self._indices) / self.batch_size) / self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        start, self._start = self._start, 0
        yield from self._batches()[start:]

    def _batches(self) -> list[list[int]]:
        rng = np.random.Generator(np.random.PCG64([self.seed, self.epoch]))
        order = self._indices[_shuffled(rng, len(self._indices))] if self.shuffle else self._indices
        full: list[list[int]] = []
        rest: list[int] = []
        for kind in (False, True):
            group = order[self._tall[order] == kind].tolist()
            whole = len(group) - len(group) % self.batch_size
            full += [group[at : at + self.batch_size] for at in range(0, whole, self.batch_size)]
            rest += group[whole:]
        full += [rest[at : at + self.batch_size] for at in range(0, len(rest), self.batch_size)]
        if self.shuffle:
            full = [full[at] for at in _shuffled(rng, len(full))]
        wanted = len(self) * self.world_size
        while full and len(full) < wanted:
            full += full[: wanted - len(full)]
        return full[self.rank :: self.world_size]


def collate(items: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Images and targets as two lists: they differ in size, so the detector pads them itself."""
    return [image for image, _ in items], [target for _, target in items]


def _shuffled(rng: np.random.Generator, count: int) -> list[int]:
    # Sorting raw uniform numbers: their stream is fixed, that of numpy's own shuffling need not be.
    order: list[int] = np.argsort(rng.random(count), kind="stable").tolist()
    return order
