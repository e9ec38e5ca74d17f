"""The steps of a ranking loss in Triton kernels, and the memory that they share. Imports Triton."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bucketrank.losses.terms import check_localisation
from bucketrank.losses.triton.launch import Launcher, float64_bits, is_aligned, on_device
from bucketrank.losses.triton.logits import fill_buckets, write_gradient
from bucketrank.losses.triton.memory import Layout, pad, upload_starts
from bucketrank.losses.triton.pairs import compare_positives, demote_positives
from bucketrank.losses.triton.positives import place_positives, write_keys
from bucketrank.losses.triton.scans import finish_rankings
from bucketrank.losses.triton.tree import PositiveTree

# Logits per program of the two passes over all logits.
LOGITS = 1024
# Positives per program where each is handled separately, and per step of the backward pass.
POSITIVES, POSITIVES_OF_BLOCK = 256, 128
# Edges or positives per step of a scan, and warps of its program.
TILE, SCAN_WARPS = 1024, 16
# Rows and columns of a tile in the comparison of positives with positives, and tiles between two column sums. Small
# rankings use fewer rows per program to keep all multiprocessors busy; float64 sums use fewer to fit into registers.
ROWS, COLUMNS, FLUSH = 32, 64, 16
FEW_ROWS, FEW_POSITIVES = 16, 4096
# Maximum positives of a ranking that are compared in tiles, which takes their square; more are compared in a tree.
MAX_IN_TILES = 1 << 15
# Maximum number of buckets in all copies, and maximum number of copies.
BUCKETS, COPIES = 1 << 16, 64
# Range in which 2 delta and its inverse are normal float64 numbers, and range in which float32 is enough.
SMALLEST_DELTA, LARGEST_DELTA = 1e-290, 1e290
SMALLEST_FLOAT32_DELTA, LARGEST_FLOAT32_DELTA = 1e-30, 1e30


class Arrays(NamedTuple):
    """The arrays of one call, views of one allocation: P positives, E edges, G rankings."""

    keys: Tensor  # (P,) int64
    buckets: Tensor  # (copies, E, 2) int64: count and sum of offsets
    ramps: Tensor  # (E,) float64, as are the next seven, of size P
    ranks: Tensor
    shares: Tensor
    seconds: Tensor
    errors: Tensor
    weights: Tensor
    own: Tensor
    second_own: Tensor  # the second gradients of RS, the factors of aLRP
    rests: Tensor  # (E,) of the ramp type
    scores: Tensor  # (P,) of the values' dtype, as are the next three
    labels: Tensor
    bounds: Tensor  # (E + 1,) or longer, as all that are padded
    table: Tensor  # (E, 2): value and slope
    owners: Tensor  # (E,) int32, as are all that follow
    lower_edges: Tensor  # (P,)
    upper_edges: Tensor
    last_tied: Tensor
    rows: Tensor
    block_slots: Tensor  # one per program of a pass over all logits
    first_positives: Tensor  # (G + 1,)
    broken: Tensor  # (G,) 1 if the ranking's value is NaN
    positive_count: Tensor  # (1,) number of positives, counted if there is a capacity


class Plan(NamedTuple):
    """The choices and sizes of one call that decide which kernels run, and on how much memory."""

    loss: str
    delta: float
    sizes: tuple[int, ...]
    positives: int  # number of positives, or its upper bound with a capacity
    has_capacity: bool
    dtype: torch.dtype  # dtype of the values

    @classmethod
    def of(
        cls,
        logits: Tensor,
        targets: Tensor,
        *,
        loss: str,
        delta: float,
        sizes: tuple[int, ...],
        max_positives: int | None,
        positives: int = 0,
    ) -> Plan:
        """Plan a call; ``positives`` is their number in a call without a capacity."""
        dtype = torch.float64 if torch.float64 in (logits.dtype, targets.dtype) else torch.float32
        delta = min(max(delta, SMALLEST_DELTA), LARGEST_DELTA) if delta > 0 else 0.0
        kept = positives if max_positives is None else max_positives
        return cls(loss, delta, sizes, kept, max_positives is not None, dtype)

    @property
    def is_smooth(self) -> bool:
        return self.delta > 0

    @property
    def is_wide(self) -> bool:
        """Whether ramps are computed in float64."""
        fits = not self.is_smooth or SMALLEST_FLOAT32_DELTA <= self.delta <= LARGEST_FLOAT32_DELTA
        return self.dtype == torch.float64 or not fits

    @property
    def rankings(self) -> int:
        return len(self.sizes)

    @property
    def has_second(self) -> bool:
        return self.loss in ("rs", "alrp")

    @property
    def has_tree(self) -> bool:
        """Whether a ranking may have more positives than are compared in tiles."""
        return min(self.positives, max(self.sizes, default=0)) > MAX_IN_TILES

    def programs(self, size: int) -> int:
        """Return the number of programs that cover the logits of every ranking."""
        return _ceil_div(size, LOGITS) if self.rankings == 1 else size // LOGITS + self.rankings

    def layout(self, size: int) -> Layout:
        """Return the memory layout for ``size`` logits, in the order of :class:`Arrays`."""
        positives = pad(self.positives)
        seconds, localised = positives * self.has_second, positives * (self.loss == "alrp")
        per_positive = 2 if self.is_smooth else 1
        edges = positives * per_positive
        # A capacity may exceed the actual number of edges, which leaves room for more copies.
        number = self.positives * per_positive
        buckets = max(number, BUCKETS) if self.has_capacity else number * max(1, BUCKETS // max(1, number))
        buckets = pad(min(buckets, COPIES * number))
        return Layout(
            (torch.int64, [positives, 2 * buckets]),
            (torch.float64, [edges, positives, seconds, seconds, localised, positives, positives, seconds]),
            (torch.float64 if self.is_wide else torch.float32, [edges]),
            (self.dtype, [positives, positives, edges + 4, 2 * edges]),
            (
                torch.int32,
                [
                    *(edges, positives, positives, positives, positives, pad(self.programs(size))),
                    *(pad(self.rankings + 1), pad(self.rankings), 4),
                ],
            ),
        )


class State(NamedTuple):
    """The memory of a forward pass that the backward pass reads."""

    memory: Tensor  # uint8, divided into Arrays
    positions: Tensor  # (P,) int64, of the positives in the logits, ascending; padding is -1
    kinds: Tensor  # int8 per logit: see logits.py


class TritonRanking(NamedTuple):
    """One call, from its forward pass to its backward pass."""

    plan: Plan
    logits: Tensor
    starts: Tensor | None  # (G + 1,) int64 position of the first logit of each ranking; None if there is one ranking
    state: State
    arrays: Arrays
    localisations: int  # number of localisation errors
    localisation_dtype: torch.dtype | None
    counts: Tensor | None = None  # (G,) int32 positives per ranking, written by the forward pass

    def forward(self, targets: Tensor, localisation: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute the one or two values per ranking."""
        plan, logits, arrays, (_, index, kinds) = self.plan, self.logits, self.arrays, self.state
        positives, rankings, size = plan.positives, plan.rankings, logits.numel()
        delta_bits, inverse_bits = _bits(plan.delta)
        is_single = self.starts is None
        starts = arrays.first_positives if self.starts is None else self.starts
        errors = arrays.scores if localisation is None else localisation
        launch = Launcher(
            (
                *(logits.dtype, targets.dtype, errors.dtype, size >= 1 << 31, is_single, plan.is_smooth, plan.is_wide),
                is_aligned(logits, targets, errors),
            )
        )
        keys, order, earlier = self._sort(launch, starts)
        programs = _ceil_div(positives, POSITIVES)
        is_float64 = plan.dtype == torch.float64
        smooth = {"SMOOTH": plan.is_smooth}
        launch(
            place_positives,
            programs + _ceil_div(rankings + 1, POSITIVES),
            *(logits, targets, errors, starts, index, order, earlier, keys, arrays.scores, arrays.labels),
            *(arrays.errors, arrays.rows, arrays.block_slots, arrays.first_positives, arrays.bounds, arrays.rests),
            *(arrays.owners, arrays.lower_edges, arrays.upper_edges, arrays.last_tied, positives, rankings),
            *(self.localisations, delta_bits),
            SINGLE=is_single,
            TWO_ORDERS=is_float64,
            LOCALISED=localisation is not None,
            **smooth,
            LOGITS=LOGITS,
            BLOCK=POSITIVES,
        )
        # Units of the fixed point: the sum over all logits stays below 2 ** 61.
        unit = 2.0 ** (61 - size.bit_length())
        copies = {"COPIES": COPIES, "BUCKETS": BUCKETS}
        launch(
            fill_buckets,
            plan.programs(size),
            *(logits, targets, kinds, starts, arrays.first_positives, arrays.bounds, arrays.rests, arrays.buckets),
            *(arrays.broken, arrays.positive_count, size, rankings, unit, inverse_bits),
            SINGLE=is_single,
            **smooth,
            CAPACITY=plan.has_capacity,
            WIDE=plan.is_wide,
            **copies,
            BLOCK=LOGITS,
        )
        tree = PositiveTree(launch, plan, arrays) if plan.has_tree else None
        rows = FEW_ROWS if positives <= FEW_POSITIVES or plan.is_wide else ROWS
        tiles = {"ROWS": rows, "COLUMNS": COLUMNS, "FLUSH": FLUSH}
        # Each ranking may waste one tile.
        programs = positives // rows + rankings
        if tree is not None:
            tree.compare(copies)
        else:
            launch(
                compare_positives,
                programs,
                *(arrays.first_positives, arrays.scores, arrays.labels, arrays.errors, arrays.buckets, arrays.ranks),
                *(arrays.shares, arrays.seconds, rankings, delta_bits, inverse_bits),
                LOSS=plan.loss,
                **smooth,
                WIDE=plan.is_wide,
                **copies,
                **tiles,
            )
        first = torch.empty(rankings, dtype=plan.dtype, device=logits.device)
        second = torch.empty_like(first) if plan.has_second else None
        launch(
            finish_rankings,
            rankings,
            *(arrays.first_positives, arrays.owners, arrays.scores, arrays.buckets, arrays.ramps, arrays.lower_edges),
            *(arrays.upper_edges, arrays.ranks, arrays.shares, arrays.seconds, arrays.weights, arrays.own),
            *(arrays.second_own, arrays.table, arrays.broken, arrays.positive_count, first),
            *(first if second is None else second, self.counts, 1 / unit, inverse_bits),
            LOSS=plan.loss,
            **smooth,
            CAPACITY=plan.has_capacity,
            TILE=TILE,
            warps=SCAN_WARPS,
        )
        if tree is not None and plan.loss == "rs":
            tree.demote()
        elif plan.loss == "rs":
            launch(
                demote_positives,
                programs,
                *(arrays.first_positives, arrays.scores, arrays.labels, arrays.shares, arrays.seconds),
                *(arrays.second_own, rankings, delta_bits, inverse_bits),
                **smooth,
                WIDE=plan.is_wide,
                **tiles,
            )
        return first, second

    def _sort(self, launch: Launcher, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort the positives by ranking and score; return the sorted keys, their order, and the order before that.

        A key holds a ranking and a float32 score. float64 scores are sorted first, then their rankings.
        """
        plan, keys = self.plan, self.arrays.keys[: self.plan.positives]

        def sort_by(content: str, earlier: Tensor) -> tuple[Tensor, Tensor]:
            launch(
                write_keys,
                _ceil_div(plan.positives, POSITIVES),
                *(self.logits, starts, self.state.positions, earlier, keys, plan.positives, plan.rankings),
                SINGLE=self.starts is None,
                CONTENT=content,
                BLOCK=POSITIVES,
            )
            return torch.sort(keys, stable=True)

        if plan.dtype == torch.float32:
            keys, order = sort_by("both", self.state.positions)
            return keys, order, order
        _, earlier = sort_by("score", self.state.positions)
        keys, order = sort_by("ranking", earlier)
        return keys, order, earlier

    def backward(self, first: Tensor | None, second: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the gradients at the logits and at the localisation errors, from those at the values.

        ``first`` and ``second`` have one number per ranking, or no dimension; None stands for zeros.
        """
        plan, logits, arrays, (_, index, kinds) = self.plan, self.logits, self.arrays, self.state
        size = logits.numel()
        gradient = torch.empty_like(logits)
        at_localisation = None
        if self.localisation_dtype is not None and second is not None:
            # The kernel writes one number for each of the positives, padding included. More errors than that mean more
            # positives than the capacity, which make every gradient NaN. Without logits, nothing is written.
            value = torch.nan if self.localisations > plan.positives else 0.0
            options: dict[str, Any] = {"dtype": plan.dtype, "device": logits.device}
            shape = (self.localisations,)
            is_written = size > 0 and value == 0
            at_localisation = torch.empty(shape, **options) if is_written else torch.full(shape, value, **options)
        with on_device(logits.device):
            ones = arrays.own  # where there is no gradient at the values, nothing is read
            upstream = ones if first is None else first.view(-1), ones if second is None else second.view(-1)
            is_single = self.starts is None
            launch = Launcher(
                (
                    *(logits.dtype, size >= 1 << 31, is_single, plan.is_smooth, plan.is_wide),
                    *(tensor.dtype for tensor in upstream),
                    is_aligned(logits, *upstream),
                )
            )
            launch(
                write_gradient,
                plan.programs(size),
                *(logits, kinds, arrays.first_positives if self.starts is None else self.starts),
                *(arrays.first_positives, arrays.bounds, arrays.rests, arrays.table, arrays.broken, index, arrays.rows),
                *(arrays.block_slots, arrays.own, arrays.second_own, arrays.last_tied, *upstream, gradient),
                *(arrays.table if at_localisation is None else at_localisation, size, plan.rankings),
                *(
                    min(self.localisations, plan.positives),
                    *(tensor.stride(0) for tensor in upstream),
                    _bits(plan.delta)[1],
                ),
                SINGLE=is_single,
                SMOOTH=plan.is_smooth,
                FIRST=first is not None,
                SECOND=second is not None and plan.has_second,
                LOCALISED=at_localisation is not None,
                WIDE=plan.is_wide,
                BLOCK=LOGITS,
                POSITIVES=POSITIVES_OF_BLOCK,
            )
        if at_localisation is not None:
            at_localisation = at_localisation.to(self.localisation_dtype)
        return gradient, at_localisation


def rank_with_triton(
    logits: Tensor,
    targets: Tensor,
    localisation: Tensor | None,
    *,
    loss: str,
    delta: float,
    sizes: tuple[int, ...],
    max_positives: int | None,
) -> tuple[Tensor, Tensor | None, TritonRanking]:
    """Compute the one or two values of a ranking loss, one per ranking, and the backward state.

    ``logits`` and ``targets`` are flat and contiguous. Half-precision logits are read directly, and their gradient has
    their dtype; the values are at least float32. Ranking g is the g-th consecutive slice, of length
    ``sizes[g]``. ``localisation`` (aLRP) holds one error per positive, in the order of ``logits[targets > 0]``.
    ``loss`` is a name in ``RANKING_LOSSES``.

    ``max_positives`` is an upper bound on the positives of the whole call, called the capacity. With it there is no
    device sync; exceeding it yields NaN for every value. Without it there is one sync, to read the number of positives.
    """
    logits, targets = _readable(logits, targets)
    with on_device(logits.device):
        mask = targets > 0
        index = _positions(mask, max_positives)
        positives = index.numel()
        if max_positives is None:
            check_localisation(localisation, positives)
        if localisation is not None:
            # Triton 3.2 ends the process at some conversions of half precision.
            dtype = localisation.dtype
            localisation = localisation.detach().to(torch.float64 if dtype == torch.float64 else torch.float32)
            localisation = localisation.contiguous()
        plan = Plan.of(
            logits, targets, loss=loss, delta=delta, sizes=sizes, max_positives=max_positives, positives=positives
        )
        layout = plan.layout(logits.numel())
        memory = layout.allocate(logits.device)
        ranking = TritonRanking(
            plan,
            logits,
            upload_starts(sizes, logits.device),
            # The mask of the positives has been read: its memory takes the kinds.
            State(memory, index, mask.view(torch.int8)),
            Arrays(*layout.divide(memory)),
            0 if localisation is None else localisation.numel(),
            None if localisation is None else dtype,
            torch.empty(len(sizes), dtype=torch.int32, device=logits.device),
        )
        return *ranking.forward(targets, localisation), ranking


def state_sizes(logits: Tensor, targets: Tensor, **settings: Any) -> tuple[int, int, int]:
    """Return the lengths of the three state tensors, which a capacity fixes before the call."""
    plan = Plan.of(logits, targets, **settings)
    return sum(plan.layout(logits.numel()).bytes), plan.positives, logits.numel()


def resume_ranking(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, state: tuple[Tensor, Tensor, Tensor], **settings: Any
) -> TritonRanking:
    """Restore the ranking of an earlier call with a capacity from its state, for the backward pass."""
    logits, targets = _readable(logits, targets)
    plan = Plan.of(logits, targets, **settings)
    arrays = Arrays(*plan.layout(logits.numel()).divide(state[0]))
    starts = upload_starts(plan.sizes, logits.device)
    errors = 0 if localisation is None else localisation.numel()
    dtype = None if localisation is None else localisation.dtype
    return TritonRanking(plan, logits, starts, State(*state), arrays, errors, dtype)


def _ceil_div(number: int, block: int) -> int:
    return -(-number // block)


@lru_cache(maxsize=64)
def _bits(delta: float) -> tuple[int, int]:
    """Return the bits of delta and of its factor 1 / (2 delta); 0 if delta is 0."""
    return float64_bits(delta), float64_bits(0.5 / delta) if delta > 0 else 0


def _readable(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in types that the kernels read: any float, but float64 in both or in none."""
    if torch.float64 in (logits.dtype, targets.dtype):
        return logits.double(), targets.double()
    return logits, targets if targets.is_floating_point() else targets.float()


def _positions(mask: Tensor, max_positives: int | None) -> Tensor:
    """Return the positions of the positives, ascending; with a capacity, exactly that many numbers, padded with -1."""
    if max_positives is None:
        return mask.nonzero().view(-1)
    if mask.numel() == 0:
        return mask.new_full((max_positives,), -1, dtype=torch.int64)
    try:
        return torch.nonzero_static(mask, size=max_positives, fill_value=-1).view(-1)
    except NotImplementedError:  # CUDA before torch 2.7: one device sync
        positions = mask.nonzero().view(-1)[:max_positives]
        return torch.nn.functional.pad(positions, (0, max_positives - positions.numel()), value=-1)
