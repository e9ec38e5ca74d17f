"""Deformable attention against its definition, and the layers around it."""

import math

import pytest
import torch

from bucketrank.detectors.co_detr.transformer import DeformableAttention, Encoder, Geometry, TransformerSettings

SETTINGS = TransformerSettings(width=32, heads=2, points=3, levels=2, feedforward=16, encoder_layers=2)
SHAPES = [(4, 6), (2, 3)]


def geometry():
    return Geometry.of([torch.zeros(2, 1, *shape) for shape in SHAPES], (16, 24), [(16, 24), (10, 13)])


def bilinear(grid, x, y):
    """Interpolate ``grid`` (H, W, C) at (x, y); cells have their centres at whole numbers, and it is 0 outside."""
    total = torch.zeros(grid.shape[-1])
    left, top = math.floor(x), math.floor(y)
    for row, column in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
        if 0 <= row < grid.shape[0] and 0 <= column < grid.shape[1]:
            total += (1 - abs(x - column)) * (1 - abs(y - row)) * grid[row, column]
    return total


def direct(attention, queries, locations, memory, token_geometry):
    """Compute equation 3 of the paper for each query, head, level and point."""
    heads, points, levels = SETTINGS.heads, SETTINGS.points, SETTINGS.levels
    values = attention.value_proj(memory).masked_fill(~token_geometry.valid[..., None], 0)
    offsets = attention.sampling_offsets(queries).reshape(*queries.shape[:2], heads, levels, points, 2)
    weights = attention.attention_weights(queries).reshape(*queries.shape[:2], heads, levels * points).softmax(-1)
    weights = weights.reshape(*queries.shape[:2], heads, levels, points)
    attended = torch.zeros_like(queries)
    for image, query, head in torch.cartesian_prod(*map(torch.arange, (*queries.shape[:2], heads))).tolist():
        part = slice(head * 16, (head + 1) * 16)
        first = 0
        for level, (height, width) in enumerate(SHAPES):
            grid = values[image, first : first + height * width, part].reshape(height, width, 16)
            first += height * width
            for point in range(points):
                location, offset = locations[image, query, level], offsets[image, query, head, level, point]
                extent = torch.tensor([width, height])
                # Offsets of a point are in cells of the map; offsets of a box in half sides, divided by the points.
                moved = (
                    location + offset / extent
                    if len(location) == 2
                    else location[:2] + offset / points * location[2:] / 2
                )
                x, y = (moved * extent - 0.5).tolist()
                attended[image, query, part] += weights[image, query, head, level, point] * bilinear(grid, x, y)
    return attention.output_proj(attended)


@pytest.mark.parametrize("coordinates", [2, 4], ids=["points", "boxes"])
def test_deformable_attention_equals_its_definition(coordinates):
    torch.manual_seed(0)
    attention, token_geometry = DeformableAttention(SETTINGS), geometry()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    queries, memory = torch.randn(2, 3, 32), torch.randn(2, 30, 32)
    locations = token_geometry.on_maps(torch.rand(2, 3, coordinates))
    with torch.no_grad():
        actual = attention(queries, locations, memory, token_geometry)
        expected = direct(attention, queries, locations, memory, token_geometry)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_attention_starts_as_a_ring():
    attention = DeformableAttention(TransformerSettings(width=32, heads=8, points=2, levels=3))
    offsets = attention.sampling_offsets.bias.reshape(8, 3, 2, 2)
    directions = [[1, 0], [1, 1], [0, 1], [-1, 1], [-1, 0], [-1, -1], [0, -1], [1, -1]]
    for level in range(3):
        torch.testing.assert_close(offsets[:, level, 0], torch.tensor(directions).float(), rtol=0, atol=1e-6)
        torch.testing.assert_close(offsets[:, level, 1], 2 * offsets[:, level, 0])
    for parameter in (attention.sampling_offsets.weight, *attention.attention_weights.parameters()):
        assert (parameter == 0).all()


def test_tokens_on_padding_have_no_influence():
    torch.manual_seed(0)
    encoder, token_geometry = Encoder(SETTINGS).eval(), geometry()
    maps = [torch.randn(2, 32, *shape) for shape in SHAPES]
    other = [part.clone() for part in maps]
    for part, whole in zip(other, token_geometry.maps(token_geometry.valid[..., None].float()), strict=True):
        part[:] = part.where(whole.bool(), 99.0)
    with torch.no_grad():
        first, second = encoder(maps, token_geometry), encoder(other, token_geometry)
    torch.testing.assert_close(first[token_geometry.valid], second[token_geometry.valid])
    assert not torch.allclose(first[~token_geometry.valid], second[~token_geometry.valid])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 48}, "detector.channels: expected a multiple of 32.*got 48"),
        ({"width": 32, "heads": 5}, "and of 5, the attention heads, got 32"),
        ({"points": 0}, "detector.points: expected at least 1, got 0"),
        ({"dropout": 1.0}, "detector.dropout: expected at least 0 and less than 1, got 1.0"),
    ],
)
def test_invalid_sizes_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        TransformerSettings(**settings)
