"""The scope of a ranking: the images of this process, each image alone, or the images of all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# From logits, targets and one value per positive (None if the loss takes none) to the terms of the loss. Some
# losses also take ``sizes``, the lengths of consecutive parts to rank apart, and return the mean of their terms.
RankingLoss = Callable[..., Sequence[Tensor]]


class Scope:
    """Rank all images of this process together, as in the paper. Also the base of the other scopes."""

    joins_calls = True  # whether the rankings of several heads or layers may share one call of the loss

    def rank(
        self,
        loss: RankingLoss,
        logits: Tensor,
        targets: Tensor,
        *,
        image_index: Tensor,
        values: Tensor | None = None,
        parts: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return the terms of ``loss``.

        ``logits`` and ``targets`` are (R, C), ``image_index`` (R,) holds the image of each row, and ``values`` (P,)
        belong to ``logits[targets > 0]`` in that order. ``parts`` says whether the loss takes ``sizes``.
        """
        return tuple(loss(logits, targets, values))

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of ``value`` over all processes that are ranked together."""
        return value


class ImageScope(Scope):
    """Rank every image alone, and return the mean over the images with positives."""

    joins_calls = False

    def rank(
        self,
        loss: RankingLoss,
        logits: Tensor,
        targets: Tensor,
        *,
        image_index: Tensor,
        values: Tensor | None = None,
        parts: bool = False,
    ) -> tuple[Tensor, ...]:
        # The rows of an image follow each other, so that an image is a consecutive part of the list.
        rows = torch.bincount(image_index).tolist()
        if parts:
            return tuple(loss(logits, targets, values, sizes=[count * targets.shape[1] for count in rows]))
        positives = [int((part > 0).sum()) for part in targets.split(rows)]
        own_values = [None] * len(rows) if values is None else values.split(positives)
        images = zip(logits.split(rows), targets.split(rows), own_values, positives, strict=True)
        terms = [loss(*image) for *image, count in images if count]
        if not terms:
            return super().rank(loss, logits, targets, image_index=image_index, values=values)
        return tuple(torch.stack(per_image).mean() for per_image in zip(*terms, strict=True))


class GlobalScope(Scope):
    """Rank the images of all processes together. Each process computes the whole ranking and trains its own part.

    DistributedDataParallel averages the gradients of the processes. So each process multiplies the gradient of its part
    by the number of processes: the average is then the gradient of one loss over the whole batch.
    """

    joins_calls = False

    def rank(
        self,
        loss: RankingLoss,
        logits: Tensor,
        targets: Tensor,
        *,
        image_index: Tensor,
        values: Tensor | None = None,
        parts: bool = False,
    ) -> tuple[Tensor, ...]:
        if _process_count() == 1:
            return super().rank(loss, logits, targets, image_index=image_index, values=values)
        return tuple(loss(_gather(logits), _gather(targets), None if values is None else _gather(values)))

    def total(self, value: Tensor) -> Tensor:
        if _process_count() == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return _with_gradient_of(value, total)


SCOPES: dict[str, type[Scope]] = {"batch": Scope, "image": ImageScope, "global": GlobalScope}


def _process_count() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _gather(rows: Tensor) -> Tensor:
    """Return the rows of all processes in the order of their ranks; the gradient reaches the rows of this process."""
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(_process_count())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    longest = int(torch.stack(counts).max())
    # all_gather requires equal shapes: pad to the longest, and cut again.
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    parts = [part[: int(count)] for part, count in zip(parts, counts, strict=True)]
    rank = dist.get_rank()
    parts[rank] = _with_gradient_of(rows, parts[rank])
    return torch.cat(parts)


def _with_gradient_of(source: Tensor, value: Tensor) -> Tensor:
    """Return exactly ``value``; its gradient goes to ``source``, multiplied by the number of processes."""
    return value + (source - source.detach()) * _process_count()
