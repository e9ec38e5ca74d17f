"""CUDA graphs: capture a step once, then replay all of its kernels by a single launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

OutputT = TypeVar("OutputT")

GRAPH_DEVICES = ("cuda",)  # also ROCm
# Calls before the capture, which compile kernels and copy what is copied once. A capture can do neither.
WARM_UP = 3


def capture(step: Callable[[], OutputT]) -> Callable[[], OutputT]:
    """Capture ``step`` on the current CUDA device, and return a function that replays it.

    Every replay writes to the memory of the captured output, which is returned. The warm-up runs on the stream of the
    capture, so that autograd accumulates the gradients there.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = step()

    def replay() -> OutputT:
        graph.replay()
        return output

    return replay
