"""A loader of batches that names an image which cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset

from bucketrank.data.batch_sampling import collate
from bucketrank.data.problems import DataError


class Unreadable(NamedTuple):
    """In place of a batch: why one of its images cannot be read."""

    reason: str


class NamedFaults(Dataset[Any]):
    """A data set that returns a DataError instead of raising it.

    A data-loading worker would turn the error into a traceback, in which the name of the image is hard to find.
    """

    def __init__(self, items: Dataset[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.items[key]
        except DataError as error:
            return Unreadable(str(error))


def _collate(items: list[Any]) -> Any:
    return next((item for item in items if isinstance(item, Unreadable)), None) or collate(items)


class ImageLoader(DataLoader[Any]):
    """A DataLoader that raises DataError for an image which cannot be read, with and without workers.

    It starts its workers at the first batch: Lightning creates iterators that it drops unused.
    """

    def __init__(self, items: Dataset[Any], **settings: Any) -> None:
        super().__init__(NamedFaults(items), collate_fn=_collate, **settings)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            if isinstance(batch, Unreadable):
                raise DataError(batch.reason)
            yield batch
