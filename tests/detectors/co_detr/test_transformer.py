"""Deformable attention against its definition, and the layers around it."""

import math

import pytest
import torch

from bucketrank.detectors.co_detr.geometry import Geometry
from bucketrank.detectors.co_detr.transformer import DeformableAttention, Encoder, TransformerSettings

SETTINGS = TransformerSettings(width=32, heads=2, points=3, levels=2, feedforward=16, encoder_layers=2)
SHAPES = [(4, 6), (2, 3)]


def geometry():
    return Geometry.of([torch.zeros(2, 1, *shape) for shape in SHAPES], (16, 24), [(16, 24), (10, 13)])


def bilinear(grid, x, y):
    """The value at (x, y), cells' centres at whole numbers; 0 beyond the border. ``grid`` is (H, W, C)."""
    total = torch.zeros(grid.shape[-1])
    left, top = math.floor(x), math.floor(y)
    for row, column in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
        if 0 <= row < grid.shape[0] and 0 <= column < grid.shape[1]:
            total += (1 - abs(x - column)) * (1 - abs(y - row)) * grid[row, column]
    return total


def direct(attention, queries, places, memory, where):
    """Equation 3 of the paper, query by query, head by head, level by level, point by point."""
    heads, points, levels = SETTINGS.heads, SETTINGS.points, SETTINGS.levels
    values = attention.value_proj(memory).masked_fill(~where.valid[..., None], 0)
    steps = attention.sampling_offsets(queries).reshape(*queries.shape[:2], heads, levels, points, 2)
    weights = attention.attention_weights(queries).reshape(*queries.shape[:2], heads, levels * points).softmax(-1)
    weights = weights.reshape(*queries.shape[:2], heads, levels, points)
    found = torch.zeros_like(queries)
    for image, query, head in torch.cartesian_prod(*map(torch.arange, (*queries.shape[:2], heads))).tolist():
        part = slice(head * 16, (head + 1) * 16)
        first = 0
        for level, (height, width) in enumerate(SHAPES):
            grid = values[image, first : first + height * width, part].reshape(height, width, 16)
            first += height * width
            for point in range(points):
                place, step = places[image, query, level], steps[image, query, head, level, point]
                extent = torch.tensor([width, height])
                # A point moves by cells of the map, a box by halves of its sides, a share for each point.
                moved = place + step / extent if len(place) == 2 else place[:2] + step / points * place[2:] / 2
                x, y = (moved * extent - 0.5).tolist()
                found[image, query, part] += weights[image, query, head, level, point] * bilinear(grid, x, y)
    return attention.output_proj(found)


@pytest.mark.parametrize("coordinates", [2, 4], ids=["points", "boxes"])
def test_deformable_attention_is_its_definition(coordinates):
    torch.manual_seed(0)
    attention, where = DeformableAttention(SETTINGS), geometry()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    queries, memory = torch.randn(2, 3, 32), torch.randn(2, 30, 32)
    places = where.on_maps(torch.rand(2, 3, coordinates))
    with torch.no_grad():
        found = attention(queries, places, memory, where)
        wanted = direct(attention, queries, places, memory, where)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_attention_starts_as_a_ring():
    attention = DeformableAttention(TransformerSettings(width=32, heads=8, points=2, levels=3))
    steps = attention.sampling_offsets.bias.reshape(8, 3, 2, 2)
    directions = [[1, 0], [1, 1], [0, 1], [-1, 1], [-1, 0], [-1, -1], [0, -1], [1, -1]]
    for level in range(3):
        torch.testing.assert_close(steps[:, level, 0], torch.tensor(directions).float(), rtol=0, atol=1e-6)
        torch.testing.assert_close(steps[:, level, 1], 2 * steps[:, level, 0])
    for parameter in (attention.sampling_offsets.weight, *attention.attention_weights.parameters()):
        assert (parameter == 0).all()


def test_padding_says_nothing():
    torch.manual_seed(0)
    encoder, where = Encoder(SETTINGS).eval(), geometry()
    maps = [torch.randn(2, 32, *shape) for shape in SHAPES]
    other = [part.clone() for part in maps]
    for part, whole in zip(other, where.maps(where.valid[..., None].float()), strict=True):
        part[:] = part.where(whole.bool(), 99.0)
    with torch.no_grad():
        first, second = encoder(maps, where), encoder(other, where)
    torch.testing.assert_close(first[where.valid], second[where.valid])
    assert not torch.allclose(first[~where.valid], second[~where.valid])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 48}, "channels to be a multiple of 32.*got 48"),
        ({"width": 32, "heads": 5}, "of its 5 heads, got 32"),
        ({"points": 0}, "points of at least 1, got 0"),
        ({"dropout": 1.0}, "dropout from 0 to below 1, got 1.0"),
    ],
)
def test_wrong_sizes_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        TransformerSettings(**settings)
