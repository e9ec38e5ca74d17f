"""Images with ground truth, and the detections of a model in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bucketrank.data import CocoDataset, DataError, Split, eval_transform, find_splits, require_sound

Detections = Mapping[str, Tensor]
Item = tuple[Any, Mapping[str, Any]]  # an image and its ground truth
Data = Path | str | Split | CocoDataset | Iterable[Any]


@dataclass(frozen=True)
class Samples:
    """Images with ground truth, one at a time, and a function that returns the detections in one image.

    A ground truth has ``boxes`` (n, 4) as corners, ``labels`` (n,) and, optionally, ``iscrowd``. With a ``split`` the
    ground truth is read from its file instead, crowds included, and a target only names its ``image_id``.
    """

    items: Iterable[Item]
    detect: Callable[[Any], Detections]
    split: Split | None = None

    @classmethod
    def of(cls, data: Data, detect: Callable[[Any], Detections], *, most: int | None) -> Samples:
        """Read ``data``: a folder (its training split), a split, or images or batches with their targets.

        At most ``most`` images are used. Of a folder or a split they are evenly spread; otherwise they are the first.
        """
        if isinstance(data, Path | str):
            splits = find_splits(data)
            chosen = splits.train or splits.val
            if chosen is None:
                raise DataError(f"{data}: expected annotations for training or validation, got none")
            data = chosen
        if isinstance(data, Split):
            require_sound(data, masks=False)
            data = CocoDataset(data, transform=eval_transform())
        if isinstance(data, CocoDataset):
            return cls(SpreadImages(data, most), detect, data.split)
        images = FirstImages(data, most)
        return cls(list(images) if isinstance(data, Iterator) else images, detect)  # a fit may read them twice


@dataclass(frozen=True)
class SpreadImages:
    """Up to ``most`` images at equal distances in a data set."""

    images: CocoDataset
    most: int | None

    def __iter__(self) -> Iterator[Item]:
        total = len(self.images)
        count = total if self.most is None else min(self.most, total)
        return (self.images[number * total // count] for number in range(count))


@dataclass(frozen=True)
class FirstImages:
    """The first ``most`` images of an iterable of pairs (image, target), single or in batches."""

    items: Iterable[Any]
    most: int | None

    def __iter__(self) -> Iterator[Item]:
        count = 0
        for images, targets in self.items:
            batched = isinstance(targets, list | tuple)
            for item in zip(images, targets, strict=True) if batched else [(images, targets)]:
                if self.most is not None and count >= self.most:
                    return
                count += 1
                yield item
