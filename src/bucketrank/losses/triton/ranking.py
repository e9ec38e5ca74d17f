"""The steps of a ranking loss in Triton kernels, and the memory that they share. Imports Triton."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bucketrank.losses.triton.launch import (
    LARGEST_DELTA,
    LARGEST_FLOAT32_DELTA,
    SMALLEST_DELTA,
    SMALLEST_FLOAT32_DELTA,
    float64_bits,
    launch,
    on_device,
)
from bucketrank.losses.triton.logits import fill_buckets, positive_gradients, write_gradient
from bucketrank.losses.triton.pairs import compare_positives, demote_positives
from bucketrank.losses.triton.positives import gather_positives, place_edges, write_keys
from bucketrank.losses.triton.scans import compute_terms, scan_buckets, write_table
from bucketrank.losses.triton.workspace import allocate

# Logits per program of the two passes over all logits.
LOGITS = 1024
# Positives per program where each is handled alone.
POSITIVES = 256
# Edges or positives per step of a scan.
TILE = 1024
# Rows and columns of a tile of positives compared with positives.
ROWS, COLUMNS = 32, 64
# Buckets in all copies together, and copies at most.
BUCKETS, COPIES = 1 << 16, 64


class Arrays(NamedTuple):
    """The arrays of one call, views of one piece of memory: P positives, E edges, G rankings."""

    keys: Tensor  # (P,) int64
    buckets: Tensor  # (copies, E, 2) int64: count and sum of offsets
    ramps: Tensor  # (E,) float64, as are the next six, of size P
    ranks: Tensor
    shares: Tensor
    seconds: Tensor
    errors: Tensor
    weights: Tensor
    own: Tensor
    second_own: Tensor  # the second gradients of RS, the factors of aLRP
    entries: Tensor  # (P,) int64 positions in the logits
    scores: Tensor  # (P,) of the logits' dtype, as are the next three
    labels: Tensor
    bounds: Tensor  # (E + 1,)
    table: Tensor  # (E, 2): value and slope
    owners: Tensor  # (E,) int32, as are all that follow
    lower_edges: Tensor  # (P,)
    upper_edges: Tensor
    last_tied: Tensor
    slots: Tensor
    ranking_of: Tensor
    first_positives: Tensor  # (G + 1,)
    broken: Tensor  # (G,) 1 if the ranking's value is NaN
    positive_count: Tensor  # (1,) number of positives, counted if there is a capacity


def _allocate(
    logits: Tensor, loss: str, positives: int, rankings: int, *, edges: int, copies: int, capacity: bool
) -> Arrays:
    has_second, localised = loss in ("rs", "alrp"), loss == "alrp"
    sizes = [
        (positives, torch.int64),
        (copies * edges * 2, torch.int64),
        (edges, torch.float64),
        (positives, torch.float64),
        (positives * has_second, torch.float64),
        (positives * has_second, torch.float64),
        (positives * localised, torch.float64),
        (positives, torch.float64),
        (positives, torch.float64),
        (positives * has_second, torch.float64),
        (positives, torch.int64),
        (positives, logits.dtype),
        (positives, logits.dtype),
        (edges + 1, logits.dtype),
        (edges * 2, logits.dtype),
        (edges, torch.int32),
        *[(positives, torch.int32)] * 5,
        (rankings + 1, torch.int32),
        (rankings, torch.int32),
        (capacity, torch.int32),
    ]
    return Arrays(*allocate(sizes, logits.device))


class TritonRanking(NamedTuple):
    """The state of one call that the backward pass reads."""

    logits: Tensor
    targets: Tensor
    starts: Tensor | None  # (G + 1,) int64 position of the first logit of each ranking; None if there is one ranking
    arrays: Arrays
    loss: str
    delta_bits: int
    rankings: int
    positives: int
    localisations: int  # number of localisation errors
    localisation_dtype: torch.dtype | None
    constants: dict[str, Any]

    @classmethod
    def compute(
        cls,
        logits: Tensor,
        targets: Tensor,
        localisation: Tensor | None,
        *,
        loss: str,
        delta: float,
        sizes: tuple[int, ...],
        max_positives: int | None,
    ) -> tuple[Tensor, Tensor | None, TritonRanking]:
        """Return the one or two values per ranking, and the state of the backward pass."""
        capacity = max_positives is not None
        index = _positives(targets, max_positives)
        positives, rankings = index.numel(), len(sizes)
        if localisation is not None:
            localisation = localisation.detach().contiguous()
            if localisation.numel() != positives and not capacity:
                raise ValueError(
                    "alrp_loss: expected one localisation error for each of logits[targets > 0], "
                    f"{positives} of them, got {localisation.numel()}"
                )
        smooth = delta > 0
        edges = positives * (2 if smooth else 1)
        copies = max(1, min(COPIES, BUCKETS // max(1, edges)))
        delta = min(max(delta, SMALLEST_DELTA), LARGEST_DELTA) if smooth else 0.0
        is_wide = logits.dtype == torch.float64 or (
            smooth and not SMALLEST_FLOAT32_DELTA <= delta <= LARGEST_FLOAT32_DELTA
        )
        with on_device(logits.device):
            ranking = cls(
                logits,
                targets,
                _starts(sizes, logits.device),
                _allocate(logits, loss, positives, rankings, edges=edges, copies=copies, capacity=capacity),
                loss,
                float64_bits(delta),
                rankings,
                positives,
                0 if localisation is None else localisation.numel(),
                None if localisation is None else localisation.dtype,
                {"SMOOTH": smooth, "WIDE": is_wide},
            )
            ranking._order_positives(index, localisation)
            ranking._count_negatives(edges, copies, capacity=capacity)
            return *ranking._finish(edges, copies, capacity=capacity), ranking

    def _order_positives(self, index: Tensor, localisation: Tensor | None) -> None:
        """Sort the positives by ranking and score, and place their edges."""
        arrays, (positives, rankings) = self.arrays, (self.positives, self.rankings)
        programs = triton.cdiv(positives, POSITIVES)

        def sort_by(content: str, earlier: Tensor | None) -> tuple[Tensor, Tensor]:
            launch(
                write_keys,
                programs,
                *(self.logits, self.starts, index, earlier, arrays.keys, positives, rankings),
                SINGLE=self.starts is None,
                CONTENT=content,
                BLOCK=POSITIVES,
            )
            return torch.sort(arrays.keys, stable=True)

        fits = self.logits.dtype == torch.float32
        earlier = None if fits else sort_by("score", None)[1]
        keys, order = sort_by("both" if fits else "ranking", earlier)
        launch(
            gather_positives,
            programs + triton.cdiv(rankings + 1, POSITIVES),
            *(self.logits, self.targets, localisation, index, order, earlier, keys),
            *(arrays.scores, arrays.labels, arrays.errors, arrays.entries, arrays.slots, arrays.ranking_of),
            *(arrays.first_positives, positives, rankings, self.localisations),
            TWO_ORDERS=not fits,
            LOCALISED=localisation is not None,
            SHIFT=32 if fits else 0,
            BLOCK=POSITIVES,
        )
        launch(
            place_edges,
            programs,
            *(arrays.scores, arrays.ranking_of, arrays.first_positives, arrays.bounds, arrays.owners),
            *(arrays.lower_edges, arrays.upper_edges, arrays.last_tied, positives, rankings, self.delta_bits),
            SMOOTH=self.constants["SMOOTH"],
            BLOCK=POSITIVES,
        )

    def _count_negatives(self, edges: int, copies: int, *, capacity: bool) -> None:
        """Pass over the logits once."""
        arrays = self.arrays
        launch(
            fill_buckets,
            self._programs(),
            *(self.logits, self.targets, self.starts, arrays.first_positives, arrays.bounds, arrays.owners),
            *(arrays.scores, arrays.buckets, arrays.broken, arrays.positive_count, self.logits.numel(), self.rankings),
            *(edges, copies, self._unit(), self.delta_bits),
            **self.constants,
            SINGLE=self.starts is None,
            CAPACITY=capacity,
            BLOCK=LOGITS,
        )

    def _finish(self, edges: int, copies: int, *, capacity: bool) -> tuple[Tensor, Tensor | None]:
        """Compare the positives with each other, and compute the values and everything for the gradient."""
        arrays, smooth = self.arrays, self.constants["SMOOTH"]
        first = self.logits.new_empty(self.rankings)
        second = self.logits.new_empty(self.rankings) if self.loss in ("rs", "alrp") else None
        tiles = {"ROWS": ROWS, "COLUMNS": COLUMNS}
        # Each ranking may waste one tile.
        programs = self.positives // ROWS + self.rankings
        launch(
            compare_positives,
            programs,
            *(arrays.first_positives, arrays.scores, arrays.labels, arrays.errors, arrays.buckets),
            *(arrays.ranks, arrays.shares, arrays.seconds, self.rankings, edges, copies, self.delta_bits),
            **self.constants,
            **tiles,
            LOSS=self.loss,
        )
        launch(
            scan_buckets,
            self.rankings,
            *(arrays.first_positives, arrays.owners, arrays.scores, arrays.buckets, arrays.ramps),
            *(self._unit(), self.delta_bits),
            SMOOTH=smooth,
            TILE=TILE,
        )
        launch(
            compute_terms,
            self.rankings,
            *(arrays.first_positives, arrays.lower_edges, arrays.upper_edges, arrays.ramps, arrays.ranks),
            *(arrays.shares, arrays.seconds, arrays.errors, arrays.weights, arrays.own, arrays.second_own),
            *(arrays.broken, arrays.positive_count, first, second),
            LOSS=self.loss,
            SMOOTH=smooth,
            CAPACITY=capacity,
            TILE=TILE,
        )
        launch(
            write_table,
            self.rankings,
            *(arrays.first_positives, arrays.owners, arrays.scores, arrays.weights, arrays.table, self.delta_bits),
            SMOOTH=smooth,
            TILE=TILE,
        )
        if self.loss == "rs":
            launch(
                demote_positives,
                programs,
                *(arrays.first_positives, arrays.scores, arrays.labels, arrays.shares, arrays.seconds),
                *(arrays.second_own, self.rankings, self.delta_bits),
                **self.constants,
                **tiles,
            )
        return first, second

    def backward(self, first: Tensor | None, second: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the gradients at the logits and at the localisation errors, from those at the values.

        ``first`` and ``second`` have one number per ranking; None stands for zeros.
        """
        arrays = self.arrays
        gradient = torch.empty_like(self.logits)
        at_localisation = None
        if self.localisation_dtype is not None and second is not None:
            # The kernel writes one number for each of the positives, padding included. More errors than that mean more
            # positives than the capacity, which make every gradient NaN.
            options: dict[str, Any] = {"dtype": self.localisation_dtype, "device": gradient.device}
            fits = self.localisations <= self.positives
            shape = (self.localisations,)
            at_localisation = torch.empty(shape, **options) if fits else torch.full(shape, torch.nan, **options)
        with on_device(gradient.device):
            launch(
                write_gradient,
                self._programs(),
                *(self.logits, self.targets, self.starts, arrays.first_positives, arrays.bounds, arrays.owners),
                *(arrays.scores, arrays.table, arrays.broken, first, gradient, gradient.numel(), self.rankings),
                *(0 if first is None else first.stride(0), self.delta_bits),
                **self.constants,
                SINGLE=self.starts is None,
                TRAINED=first is not None,
                BLOCK=LOGITS,
            )
            launch(
                positive_gradients,
                triton.cdiv(self.positives, POSITIVES),
                *(arrays.ranking_of, arrays.first_positives, arrays.entries, arrays.slots, arrays.last_tied),
                *(arrays.broken, arrays.own, arrays.second_own, first, second, gradient, at_localisation),
                *(self.positives, self.rankings, 0 if first is None else first.stride(0)),
                *(0 if second is None else second.stride(0), self.localisations),
                FIRST=first is not None,
                SECOND=second is not None and self.loss in ("rs", "alrp"),
                LOCALISED=self.localisation_dtype is not None,
                BLOCK=POSITIVES,
            )
        return gradient, at_localisation

    def _programs(self) -> int:
        """Return the number of programs that cover the logits of every ranking."""
        size = self.logits.numel()
        return triton.cdiv(size, LOGITS) if self.starts is None else size // LOGITS + self.rankings

    def _unit(self) -> float:
        """Return how many units of the fixed point make 1: the sum over all logits stays below 2 ** 61."""
        return float(2.0 ** (61 - self.logits.numel().bit_length()))


def _positives(targets: Tensor, max_positives: int | None) -> Tensor:
    """Return the positions of the positives, ascending; with a capacity, exactly that many numbers, padded with -1."""
    if max_positives is None:
        return (targets > 0).nonzero().view(-1)
    if targets.numel() == 0:
        return targets.new_full((max_positives,), -1, dtype=torch.int64)
    return torch.nonzero_static(targets > 0, size=max_positives, fill_value=-1).view(-1)


def _starts(sizes: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Return the first position of each ranking and the end of the last; None if there is one ranking."""
    if len(sizes) == 1:
        return None
    if len(set(sizes)) == 1 and sizes[0] > 0:
        return torch.arange(0, sizes[0] * len(sizes) + 1, sizes[0], device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _uploaded_starts(sizes, device, stream)


@lru_cache(maxsize=64)
def _uploaded_starts(sizes: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Return the starts of rankings of different sizes. Copied once per device and stream, without a wait."""
    ends = torch.tensor([0, *sizes]).cumsum(0)
    return ends.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ends
