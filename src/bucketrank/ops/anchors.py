"""Anchors on the cells of a feature pyramid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator

from bucketrank.ops.boxes import centres

KEPT = 8  # sets of shapes remembered: batches of like proportions come again, 6 MB each at 800 x 1333


class Anchors(AnchorGenerator):
    """Every anchor of a batch, level by level: the same for all its images, as these are padded to one size.

    A cell of a level has one anchor for each ratio (height / width) and, within it, each scale (side in units of the
    stride). Its centre is the cell's index times the stride. Unlike torchvision's generator this one is told the
    strides instead of dividing the size of the image by that of the map, which goes wrong where a map is rounded up;
    it does not round the anchors; and it always gives float32, since float16 cannot place an anchor beyond 2048.

    The usual settings: an RPN has scale 8 and ratios 1/2, 1 and 2; ATSS and PAA one anchor of scale 8, or
    ``octave(4, 3)``; RetinaNet these three and three ratios. ``size_divisor`` and ``border`` are for :meth:`valid`.

    >>> anchors = Anchors([8, 16], scales=[4])
    >>> first, second = anchors([torch.zeros(1, 256, 2, 3), torch.zeros(1, 256, 1, 2)])
    >>> first.shape, second
    (torch.Size([6, 4]), tensor([[-32., -32.,  32.,  32.], [-16., -32.,  48.,  32.]]))
    """

    def __init__(
        self,
        strides: Sequence[int],
        *,
        scales: Sequence[float],
        ratios: Sequence[float] = (1.0,),
        size_divisor: int = 32,
        border: float | None = None,
    ) -> None:
        if not strides or any(stride != int(stride) or stride < 1 for stride in strides):
            raise ValueError(f"Anchors: expected strides to be whole numbers of at least 1, got {strides!r}")
        for name, values in (("scales", scales), ("ratios", ratios)):
            if not values or min(values) <= 0:
                raise ValueError(f"Anchors: expected {name} to be numbers above 0, got {values!r}")
        if size_divisor < 1:
            raise ValueError(f"Anchors: expected size_divisor to be at least 1, got {size_divisor!r}")
        super().__init__(
            sizes=tuple(tuple(stride * scale for scale in scales) for stride in strides),
            aspect_ratios=(tuple(ratios),) * len(strides),
        )
        self.strides = tuple(int(stride) for stride in strides)
        self.size_divisor = size_divisor
        self.border = border
        self._remembered: dict[tuple[tuple[tuple[int, int], ...], torch.device], list[Tensor]] = {}

    def generate_anchors(
        self,
        scales: Sequence[float],
        aspect_ratios: Sequence[float],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The anchors of one cell around (0, 0), as torchvision orders them: by ratio, then by scale; not rounded."""
        sides = torch.tensor(scales, dtype=torch.float64)
        stretch = torch.tensor(aspect_ratios, dtype=torch.float64).sqrt()[:, None]
        far = torch.stack([(sides / stretch).flatten(), (sides * stretch).flatten()], 1) / 2
        return torch.cat([-far, far], 1).to(device=device, dtype=dtype)

    def forward(self, feature_maps: Sequence[Tensor]) -> list[Tensor]:
        """For each map (B, C, H, W) its anchors (H * W * anchors of a cell, 4), row by row, cell by cell.

        The tensors are remembered for the next batch of the same shapes: do not write into them.
        """
        if len(feature_maps) != len(self.strides):
            raise ValueError(
                f"Anchors: expected {len(self.strides)} feature maps, one for each stride, got {len(feature_maps)}"
            )
        device = feature_maps[0].device
        shapes = tuple((int(height), int(width)) for height, width in (level.shape[-2:] for level in feature_maps))
        found = self._remembered.pop((shapes, device), None)
        if found is None:
            # What an evaluation makes in inference mode could not be used by training afterwards.
            with torch.inference_mode(mode=False), torch.no_grad():
                self.set_cell_anchors(torch.float32, device)
                found = self.grid_anchors(shapes, [(stride, stride) for stride in self.strides])
        self._remembered[shapes, device] = found  # the latest is last
        if len(self._remembered) > KEPT:
            del self._remembered[next(iter(self._remembered))]
        return list(found)

    def valid(self, anchors: Tensor, image_sizes: Sequence[tuple[int, int]]) -> Tensor:
        """Which of all the anchors (A, 4) take part in each image of (height, width) without padding: bool (B, A).

        Not those centred on padding: at or beyond the size of the image rounded up to ``size_divisor``, which is what
        the image would be padded to on its own. Unless ``border`` is None, nor those that reach more than ``border``
        pixels out of the image; at 0 an anchor may touch the image's edge, not cross it.

        >>> anchors = Anchors([16], scales=[1], size_divisor=32)
        >>> row = torch.cat(anchors([torch.zeros(2, 1, 1, 4)]))  # centred at x = 0, 16, 32, 48
        >>> anchors.valid(row, [(8, 64), (8, 20)])
        tensor([[ True,  True,  True,  True],
                [ True,  True, False, False]])
        """
        if anchors.dim() != 2 or anchors.shape[1] != 4:
            raise ValueError(
                f"Anchors.valid: expected anchors of shape (A, 4), all levels as one, got {tuple(anchors.shape)}"
            )
        sizes = torch.tensor([(width, height) for height, width in image_sizes], dtype=anchors.dtype)
        sizes = sizes.reshape(-1, 1, 2).to(anchors.device)  # (B, 1, 2) as x, y
        padded = (sizes / self.size_divisor).ceil() * self.size_divisor
        # Centres and limits are whole numbers; half a pixel keeps the rounding of (x1 + x2) / 2 out of it.
        inside = (centres(anchors) < padded - 0.5).all(-1)
        if self.border is not None:
            within = (anchors[:, :2] >= -self.border) & (anchors[:, 2:] <= sizes + self.border)
            inside &= within.all(-1)
        return inside


def octave(base: float, steps: int) -> tuple[float, ...]:
    """``steps`` scales from ``base`` up to, not including, its double, each the same factor above the one before.

    >>> [round(scale, 4) for scale in octave(4, 3)]
    [4.0, 5.0397, 6.3496]
    """
    if base <= 0 or steps < 1:
        raise ValueError(f"octave: expected base above 0 and at least 1 step, got base {base!r}, steps {steps!r}")
    return tuple(base * 2 ** (step / steps) for step in range(steps))
