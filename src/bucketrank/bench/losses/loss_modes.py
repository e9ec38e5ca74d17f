"""The modes in which a loss is measured: eager, compiled by ``torch.compile``, and replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Literal

import torch
from torch import Tensor

from bucketrank.bench.graph_replay import GRAPH_DEVICES

Mode = Literal["eager", "compiled", "graph"]

LossFunction = Callable[[Tensor, Tensor], Tensor]  # of logits and targets

# The definition is too slow to be of interest compiled, and a sort has nothing to compile.
EAGER_ONLY = ("pairwise", "sort")
# Contenders without a host wait, given ``max_positives`` if they rank. The others cannot be captured.
CAPTURED = ("exact-triton", "focal", "bce")


def modes_of(name: str, device: str, *, compiled: bool) -> Iterator[Mode]:
    """Yield the modes of a contender on a device.

    >>> list(modes_of("focal", "cpu", compiled=True)), list(modes_of("sort", "cuda", compiled=True))
    (['eager', 'compiled'], ['eager'])
    """
    yield "eager"
    if compiled and name not in EAGER_ONLY:
        yield "compiled"
    if name in CAPTURED and torch.device(device).type in GRAPH_DEVICES:
        yield "graph"


def compile_alone(function: LossFunction) -> LossFunction:
    """Return the function compiled for one shape, as one graph, apart from all other compiled functions.

    ``torch.compile`` keeps its results with the code of a function. A copy of the code has results of its own: the
    number of shapes and losses has no limit, and a call does not check the guards of the others first.
    """
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    compiled: LossFunction = torch.compile(own, fullgraph=True, dynamic=False)
    return compiled
