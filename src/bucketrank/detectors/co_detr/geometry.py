"""Where the tokens of a batch lie, and how places are told to a transformer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EDGE = 1e-5  # how near to 0 and 1 a coordinate may come before its logit is taken
TEMPERATURE = 10000.0  # the longest wavelength, in units of the shortest


@dataclass(frozen=True)
class Geometry:
    """The S tokens of a batch of B images: the cells of its L maps, row by row, level after level.

    The images of a batch are padded to one size; places are in units of the image without padding.
    """

    image_sizes: list[tuple[int, int]]  # height and width without padding
    shapes: list[tuple[int, int]]  # of the maps
    extents: Tensor  # (L, 2) the same
    starts: Tensor  # (L,) the first token of each map
    levels: Tensor  # (S,) the map of each token
    valid: Tensor  # (B, S) whether it is on the image, not on padding
    centres: Tensor  # (B, S, 2) x and y of the cells' centres
    ratios: Tensor  # (B, L, 2) how much of each map's width and height is image

    @classmethod
    def of(cls, maps: Sequence[Tensor], padded: tuple[int, int], image_sizes: list[tuple[int, int]]) -> Geometry:
        """Of maps (B, C, H, W) of images padded to ``padded``.

        A cell is on the image if its first pixel is, as if the image's mask were resized to the map by nearest pixels.
        """
        device = maps[0].device
        shapes = [(int(level.shape[-2]), int(level.shape[-1])) for level in maps]
        sizes = torch.tensor(image_sizes, device=device)  # (B, 2) as y, x
        valid, centres, ratios, levels = [], [], [], []
        for number, shape in enumerate(shapes):
            rows, columns = (torch.arange(cells, device=device) for cells in shape)
            inside = [
                cells * whole // len(cells) < own[:, None]
                for cells, whole, own in zip((rows, columns), padded, sizes.unbind(1), strict=True)
            ]  # (B, rows) and (B, columns)
            seen = [axis.sum(1, keepdim=True) for axis in inside]
            y, x = ((cells + 0.5) / count for cells, count in zip((rows, columns), seen, strict=True))
            valid.append((inside[0][:, :, None] & inside[1][:, None]).flatten(1))
            grid = torch.broadcast_tensors(x[:, None], y[:, :, None])
            centres.append(torch.stack(grid, -1).flatten(1, 2))
            ratios.append(torch.cat([seen[1] / shape[1], seen[0] / shape[0]], 1))
            levels.append(torch.full((shape[0] * shape[1],), number, device=device))
        extents = torch.tensor(shapes, device=device)
        counts = extents.prod(1)
        return cls(
            image_sizes=image_sizes,
            shapes=shapes,
            extents=extents,
            starts=counts.cumsum(0) - counts,
            levels=torch.cat(levels),
            valid=torch.cat(valid, 1),
            centres=torch.cat(centres, 1),
            ratios=torch.stack(ratios, 1),
        )

    def maps(self, tokens: Tensor) -> list[Tensor]:
        """The maps (B, C, H, W) that ``tokens`` (B, S, C) were."""
        parts = tokens.split([height * width for height, width in self.shapes], 1)
        return [part.transpose(1, 2).unflatten(2, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def on_maps(self, places: Tensor) -> Tensor:
        """``places`` (B, Q, 2 or 4), points or boxes in units of the image, in units of each map: (B, Q, L, 2 or 4)."""
        ratios = self.ratios.repeat(1, 1, places.shape[-1] // 2)
        return places[:, :, None] * ratios[:, None]


def sine_encoding(places: Tensor, width: int) -> Tensor:
    """``places`` (..., n) from 0 to 1 as (..., n * width) waves: sine and cosine in turn, ever longer."""
    steps = torch.arange(width // 2, device=places.device)
    frequencies = 2 * math.pi * TEMPERATURE ** (-2 * steps / width)
    angles = places.float()[..., None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-3)


def inverse_sigmoid(places: Tensor) -> Tensor:
    """The logits of coordinates; those at or beyond 0 and 1 are taken as just inside."""
    return places.float().clamp(EDGE, 1 - EDGE).logit()
