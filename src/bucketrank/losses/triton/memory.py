"""Device memory: the arrays of a call in one allocation, and the boundaries of its rankings."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout:
    """The layout of several arrays in one allocation: one allocation and one launch instead of many.

    ``groups`` has the dtype and the lengths of neighbouring arrays. Lengths must be multiples of :func:`pad`.
    """

    def __init__(self, *groups: tuple[torch.dtype, list[int]]) -> None:
        self.groups = groups
        self.bytes = [sum(lengths) * dtype.itemsize for dtype, lengths in groups]

    def allocate(self, device: torch.device) -> Tensor:
        """Allocate zeros of the right size."""
        return torch.zeros(sum(self.bytes), dtype=torch.uint8, device=device)

    def divide(self, memory: Tensor) -> list[Tensor]:
        """Return the arrays, views of ``memory``."""
        pieces = memory.split_with_sizes(self.bytes)
        return [
            array
            for piece, (dtype, lengths) in zip(pieces, self.groups, strict=True)
            for array in piece.view(dtype).split_with_sizes(lengths)
        ]


def pad(length: int) -> int:
    """Pad a length so that the next array is aligned, for any dtype of at least 4 bytes."""
    return (length + 3) // 4 * 4


# Maximum number of cached size combinations per process.
MAX_KEPT = 64


class _Upload(NamedTuple):
    starts: Tensor
    # Pinned memory: a captured graph copies it again at every replay, if the upload happened during the capture.
    source: Tensor
    # The stream of the upload and an event after it; None on the CPU.
    stream: Any
    event: Any


_kept: dict[tuple[tuple[int, ...], torch.device], _Upload] = {}
# Arrays that captured graphs read; the graphs may be replayed at any time.
_captured: list[_Upload] = []


def upload_starts(sizes: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Return the first position of each ranking and the end of the last; None if there is one ranking.

    There is no device sync. The array may be used on any stream of the device, and in captured graphs.
    """
    if len(sizes) == 1:
        return None
    if len(set(sizes)) == 1 and sizes[0] > 0:
        return torch.arange(0, sizes[0] * len(sizes) + 1, sizes[0], device=device)
    capturing = _is_capturing(device)
    key = sizes, device
    upload = _kept.get(key)
    if upload is None:
        upload = _upload(sizes, device, capturing=capturing)
        if not capturing:  # a captured copy only happens at the first replay
            _kept[key] = upload
            if len(_kept) > MAX_KEPT:
                del _kept[next(iter(_kept))]
    elif upload.event is not None and not capturing:
        stream = torch.cuda.current_stream(device)
        if stream != upload.stream:
            stream.wait_event(upload.event)
            # If the array is dropped, its memory stays until this stream has read it.
            upload.starts.record_stream(stream)
    if capturing and not any(upload is captured for captured in _captured):
        _captured.append(upload)
    return upload.starts


def _upload(sizes: tuple[int, ...], device: torch.device, *, capturing: bool) -> _Upload:
    # Always allocate on the CPU, regardless of torch.set_default_device: only CPU memory can be pinned.
    source = torch.tensor([0, *sizes], device="cpu").cumsum(0)
    if device.type != "cuda":
        return _Upload(source, source, None, None)
    source = source.pin_memory()
    starts = source.to(device, non_blocking=True)
    if capturing:
        return _Upload(starts, source, None, None)
    stream = torch.cuda.current_stream(device)
    return _Upload(starts, source, stream, stream.record_event())


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
