"""Anchor generation on a feature pyramid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator

from bucketrank.boxes import centres

MAX_CACHED = 8  # cached anchor sets, one per combination of map shapes; 6 MB each at 800 x 1333


class Anchors(AnchorGenerator):
    """The anchors of a batch, per pyramid level; all images share them, because they are padded to one size.

    Each cell of a level has one anchor for each of the ``ratios`` (height / width) and ``scales`` (side in units of the
    stride), ordered by ratio, then by scale. Their centre is the cell's index times the stride. There are three
    differences from torchvision's generator. The ``strides`` are arguments: image size divided by map size is wrong
    where a map was rounded up. The anchors are not rounded. They are always float32: float16 cannot represent every
    pixel beyond 2048.

    Usual settings: scale 8 and ratios 1/2, 1 and 2 for an RPN; one anchor of scale 8, or ``octave(4, 3)``, for ATSS and
    PAA; ``octave(4, 3)`` and three ratios for RetinaNet. :meth:`valid` uses ``size_divisor`` and ``border``.

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
        self._cache: dict[tuple[tuple[tuple[int, int], ...], torch.device], list[Tensor]] = {}

    def generate_anchors(
        self,
        scales: Sequence[float],
        aspect_ratios: Sequence[float],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Generate the anchors of one cell around (0, 0), by ratio, then scale like torchvision, but not rounded."""
        sides = torch.tensor(scales, dtype=torch.float64)
        stretch = torch.tensor(aspect_ratios, dtype=torch.float64).sqrt()[:, None]
        far = torch.stack([(sides / stretch).flatten(), (sides * stretch).flatten()], 1) / 2
        return torch.cat([-far, far], 1).to(device=device, dtype=dtype)

    def forward(self, feature_maps: Sequence[Tensor]) -> list[Tensor]:
        """Return the anchors (H * W * anchors per cell, 4) of each map (B, C, H, W), row by row, cell by cell.

        The tensors are cached for later batches of the same shapes: do not modify them.
        """
        if len(feature_maps) != len(self.strides):
            raise ValueError(
                f"Anchors: expected {len(self.strides)} feature maps, one for each stride, got {len(feature_maps)}"
            )
        device = feature_maps[0].device
        shapes = tuple((int(height), int(width)) for height, width in (level.shape[-2:] for level in feature_maps))
        anchors = self._cache.pop((shapes, device), None)
        if anchors is None:
            # Tensors made in inference mode could not be used in training later.
            with torch.inference_mode(mode=False), torch.no_grad():
                self.set_cell_anchors(torch.float32, device)
                anchors = self.grid_anchors(shapes, [(stride, stride) for stride in self.strides])
        self._cache[shapes, device] = anchors  # moved to the end: most recently used
        if len(self._cache) > MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        return list(anchors)

    def valid(self, anchors: Tensor, image_sizes: Sequence[tuple[int, int]]) -> Tensor:
        """Return which anchors (A, 4) are valid in each image, given as (height, width) without padding: bool (B, A).

        An anchor centred on padding is invalid. Padding starts at the image size rounded up to ``size_divisor``, the
        size to which a single image would be padded. Unless ``border`` is None, an anchor that reaches more than
        ``border`` pixels out of the image is invalid, too. As published, at 0 it may touch the image's left and upper
        edges but not the other two.

        >>> anchors = Anchors([16], scales=[1], size_divisor=32)
        >>> row = torch.cat(anchors([torch.zeros(2, 1, 1, 4)]))  # centred at x = 0, 16, 32, 48
        >>> anchors.valid(row, [(8, 64), (8, 20)])
        tensor([[ True,  True,  True,  True],
                [ True,  True, False, False]])
        """
        if anchors.dim() != 2 or anchors.shape[1] != 4:
            raise ValueError(
                f"Anchors.valid: expected anchors of shape (A, 4), all levels concatenated, got {tuple(anchors.shape)}"
            )
        sizes = torch.tensor([(width, height) for height, width in image_sizes], dtype=anchors.dtype)
        sizes = sizes.reshape(-1, 1, 2).to(anchors.device)  # (B, 1, 2) as x, y
        padded = (sizes / self.size_divisor).ceil() * self.size_divisor
        # Centres and limits are whole numbers; half a pixel absorbs the rounding of (x1 + x2) / 2.
        inside = (centres(anchors) < padded - 0.5).all(-1)
        if self.border is not None:
            within = (anchors[:, :2] >= -self.border) & (anchors[:, 2:] < sizes + self.border)
            inside &= within.all(-1)
        return inside


def octave(base: float, steps: int) -> tuple[float, ...]:
    """Return ``steps`` scales from ``base`` up to but not including its double, with a constant ratio.

    >>> [round(scale, 4) for scale in octave(4, 3)]
    [4.0, 5.0397, 6.3496]
    """
    if base <= 0 or steps < 1:
        raise ValueError(f"octave: expected base above 0 and at least 1 step, got base {base!r}, steps {steps!r}")
    return tuple(base * 2 ** (step / steps) for step in range(steps))
