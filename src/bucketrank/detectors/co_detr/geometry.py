"""The locations of the tokens of a batch, and their sine encoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EDGE = 1e-5  # minimum distance of a coordinate from 0 and 1 when its logit is computed
TEMPERATURE = 10000.0  # ratio of the longest to the shortest wavelength


@dataclass(frozen=True)
class Geometry:
    """The S tokens of a batch of B images: the cells of its L maps, row by row, level after level.

    The images of a batch are padded to one size; locations are in units of the image without padding.
    """

    image_sizes: list[tuple[int, int]]  # height and width without padding
    shapes: list[tuple[int, int]]  # height and width of the maps
    extents: Tensor  # (L, 2) the shapes as a tensor
    starts: Tensor  # (L,) the first token of each map
    levels: Tensor  # (S,) the map of each token
    valid: Tensor  # (B, S) whether a token lies on the image and not on padding
    centres: Tensor  # (B, S, 2) x and y of the cells' centres
    ratios: Tensor  # (B, L, 2) the share of each map's width and height that the image covers

    @classmethod
    def of(cls, maps: Sequence[Tensor], padded: tuple[int, int], image_sizes: list[tuple[int, int]]) -> Geometry:
        """Return the geometry of maps (B, C, H, W) of images padded to ``padded`` (height, width).

        A cell lies on the image if its first pixel does, as if the image's mask were resized by nearest neighbour.
        """
        device = maps[0].device
        shapes = [(int(level.shape[-2]), int(level.shape[-1])) for level in maps]
        sizes = torch.tensor(image_sizes, device=device)  # (B, 2) as y, x
        valid, centres, ratios, levels = [], [], [], []
        for number, shape in enumerate(shapes):
            rows, columns = (torch.arange(cells, device=device) for cells in shape)
            inside = [
                cells * padded_size // len(cells) < image_size[:, None]
                for cells, padded_size, image_size in zip((rows, columns), padded, sizes.unbind(1), strict=True)
            ]  # (B, rows) and (B, columns)
            covered = [axis.sum(1, keepdim=True) for axis in inside]
            y, x = ((cells + 0.5) / count for cells, count in zip((rows, columns), covered, strict=True))
            valid.append((inside[0][:, :, None] & inside[1][:, None]).flatten(1))
            grid = torch.broadcast_tensors(x[:, None], y[:, :, None])
            centres.append(torch.stack(grid, -1).flatten(1, 2))
            ratios.append(torch.cat([covered[1] / shape[1], covered[0] / shape[0]], 1))
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
        """Reshape ``tokens`` (B, S, C) to maps (B, C, H, W)."""
        parts = tokens.split([height * width for height, width in self.shapes], 1)
        return [part.transpose(1, 2).unflatten(2, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def on_maps(self, locations: Tensor) -> Tensor:
        """Convert points or boxes (B, Q, 2 or 4) from units of the image to units of each map (B, Q, L, 2 or 4)."""
        ratios = self.ratios.repeat(1, 1, locations.shape[-1] // 2)
        return locations[:, :, None] * ratios[:, None]


def sine_encoding(coordinates: Tensor, width: int) -> Tensor:
    """Encode coordinates (..., n) from 0 to 1 as (..., n * width): alternating sine and cosine, wavelengths rising."""
    steps = torch.arange(width // 2, device=coordinates.device)
    frequencies = 2 * math.pi * TEMPERATURE ** (-2 * steps / width)
    angles = coordinates.float()[..., None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-3)


def inverse_sigmoid(coordinates: Tensor) -> Tensor:
    """Return the logits of coordinates, clamped to the range from EDGE to 1 - EDGE."""
    return coordinates.float().clamp(EDGE, 1 - EDGE).logit()
