"""What one ranking covers: the images of this process, each image by itself, or the images of all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# From logits, targets and one value per positive (where the loss has any) to the terms of the loss.
RankingLoss = Callable[[Tensor, Tensor, Tensor | None], Sequence[Tensor]]


class Scope:
    """All images of this process, the paper's choice; also the base of the others."""

    def rank(
        self, loss: RankingLoss, logits: Tensor, targets: Tensor, *, images: Tensor, values: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The terms of ``loss``.

        ``logits`` and ``targets`` are (R, C), ``images`` (R,) says whose row each is, and ``values`` (P,) belong to
        ``logits[targets > 0]`` in that order.
        """
        return tuple(loss(logits, targets, values))

    def total(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over what is ranked together."""
        return value


class ImageScope(Scope):
    """Every image ranked by itself; the mean over the images that have positives."""

    def rank(
        self, loss: RankingLoss, logits: Tensor, targets: Tensor, *, images: Tensor, values: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        owner = images[:, None].expand_as(targets)[targets > 0]
        found = owner.unique().tolist()
        if not found:
            return super().rank(loss, logits, targets, images=images, values=values)
        terms = [
            loss(logits[images == image], targets[images == image], None if values is None else values[owner == image])
            for image in found
        ]
        return tuple(torch.stack(same).mean() for same in zip(*terms, strict=True))


class GlobalScope(Scope):
    """The images of all processes: each ranks everything, and trains its own part.

    Processes average their gradients (as DistributedDataParallel does), so that a process multiplies the gradient of
    its part by their number: the average is then the gradient of the one loss over the whole batch.
    """

    def rank(
        self, loss: RankingLoss, logits: Tensor, targets: Tensor, *, images: Tensor, values: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        if _processes() == 1:
            return super().rank(loss, logits, targets, images=images, values=values)
        return tuple(loss(_gather(logits), _gather(targets), None if values is None else _gather(values)))

    def total(self, value: Tensor) -> Tensor:
        if _processes() == 1:
            return value
        everywhere = value.detach().clone()
        dist.all_reduce(everywhere)
        return _with_gradient_of(value, everywhere)


SCOPES: dict[str, type[Scope]] = {"batch": Scope, "image": ImageScope, "global": GlobalScope}


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _gather(rows: Tensor) -> Tensor:
    """The rows of all processes, in the order of their ranks; the gradient reaches those of this one."""
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(_processes())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    most = int(torch.stack(counts).max())
    # Collectives want equal shapes: pad to the longest, and cut again.
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    parts = [part[: int(count)] for part, count in zip(parts, counts, strict=True)]
    rank = dist.get_rank()
    parts[rank] = _with_gradient_of(rows, parts[rank])
    return torch.cat(parts)


def _with_gradient_of(source: Tensor, value: Tensor) -> Tensor:
    """Exactly ``value``, whose gradient goes to ``source`` times the number of processes."""
    return value + (source - source.detach()) * _processes()
