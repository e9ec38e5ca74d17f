"""Training batches: repeat factors for rare classes, aspect-ratio groups, and a loader that names broken images."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from bucketrank.errors import DataError


def repeat_factors(labels: Iterable[Iterable[int]], *, threshold: float = 0.001) -> list[int]:
    """Compute how often each image occurs per epoch, so that rare classes are sampled more often (Gupta et al., LVIS).

    ``r(c) = max(1, sqrt(threshold / f_c))``, where f_c is the share of images that contain class c: below
    ``threshold``, a class counts as rare. An image gets the largest r of its classes in ``labels``, rounded up; an
    image without objects gets 1.

    >>> # Class 1 is in all images, class 2 in a quarter of them: its factor is sqrt(4).
    >>> repeat_factors([[1], [1], [1], [1, 2]], threshold=1.0)
    [1, 1, 1, 2]
    """
    present = [frozenset(image) for image in labels]
    counts = Counter(label for image in present for label in image)
    factor = {label: math.sqrt(threshold * len(present) / count) for label, count in counts.items()}
    # Rounding may put a root slightly above a whole number.
    return [math.ceil(max([1.0, *(factor[label] for label in image)]) - 1e-9) for image in present]


class GroupedBatchSampler(Sampler[list[int]]):
    """Random batches of ``batch_size`` images that are all wide or all tall, to reduce padding.

    ``sizes`` are the height and width of every image, and ``repeats`` how often it occurs per epoch, as one number or
    one per image. The order depends only on ``seed`` and the epoch, and is the same on every machine; with ``shuffle``
    false, it is that of the images. Leftover wide and tall images that do not fill a batch are batched together; the
    last of these batches may be smaller.

    With ``world_size`` processes, process ``rank`` gets every world_size-th batch. All processes get the same number of
    batches: the first batches are repeated if the count is not divisible. Lightning must not replace this sampler: use
    ``Trainer(use_distributed_sampler=False)``.

    To resume in the middle of an epoch, call ``skip(batches)`` with the number of batches this process has finished.
    The sampler cannot count them itself, because a DataLoader fetches batches in advance.

    >>> sampler = GroupedBatchSampler([(480, 640), (640, 480)] * 4, batch_size=2)
    >>> # Even indices are wide images, odd indices are tall images.
    >>> sorted(sorted(index % 2 for index in batch) for batch in sampler)
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
                f"got {len(times)} values, the smallest {min(times, default=1)}"
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
        """This object: Lightning calls ``set_epoch`` on the sampler of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that determines the order."""
        self.epoch = epoch

    def skip(self, batches: int) -> None:
        """Skip the first ``batches`` batches of the next iteration only."""
        self._start = batches

    def __len__(self) -> int:
        """Count the batches of a whole epoch."""
        return math.ceil(math.ceil(len(self._indices) / self.batch_size) / self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        start, self._start = self._start, 0
        yield from self._batches()[start:]

    def _batches(self) -> list[list[int]]:
        rng = np.random.Generator(np.random.PCG64([self.seed, self.epoch]))
        order = self._indices[_shuffled(rng, len(self._indices))] if self.shuffle else self._indices
        batches: list[list[int]] = []
        rest: list[int] = []
        for tall in (False, True):
            group = order[self._tall[order] == tall].tolist()
            whole = len(group) - len(group) % self.batch_size
            batches += [group[start : start + self.batch_size] for start in range(0, whole, self.batch_size)]
            rest += group[whole:]
        batches += [rest[start : start + self.batch_size] for start in range(0, len(rest), self.batch_size)]
        if self.shuffle:
            batches = [batches[index] for index in _shuffled(rng, len(batches))]
        total = len(self) * self.world_size
        while batches and len(batches) < total:
            batches += batches[: total - len(batches)]
        return batches[self.rank :: self.world_size]


def collate(items: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Collect the images and targets of ``items`` in two lists; images differ in size, and the detector pads them."""
    return [image for image, _ in items], [target for _, target in items]


def _shuffled(rng: np.random.Generator, count: int) -> list[int]:
    # Sort raw uniform numbers: numpy guarantees their stream, but not that of its shuffling.
    order: list[int] = np.argsort(rng.random(count), kind="stable").tolist()
    return order


class ErrorsAsItems(Dataset[Any]):
    """A data set that returns a DataError, which then takes the place of the batch, instead of raising it.

    A data-loading worker would turn the error into a traceback that buries the image name.
    """

    def __init__(self, items: Dataset[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.items[key]
        except DataError as error:
            return error


def _collate(items: list[Any]) -> Any:
    return next((item for item in items if isinstance(item, DataError)), None) or collate(items)


class ImageLoader(DataLoader[Any]):
    """A DataLoader that raises DataError for an unreadable image, with and without workers.

    Workers start at the first batch: Lightning creates iterators that it drops unused.
    """

    def __init__(self, items: Dataset[Any], **settings: Any) -> None:
        super().__init__(ErrorsAsItems(items), collate_fn=_collate, **settings)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            if isinstance(batch, DataError):
                raise batch
            yield batch
