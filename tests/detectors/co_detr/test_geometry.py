"""The locations of tokens, and their encoding."""

import math

import torch

from bucketrank.detectors.co_detr.transformer import Geometry, inverse_sigmoid, sine_encoding


def two_images():
    """Return the geometry of two images padded to 16 x 24, at strides 4 and 8; the second image covers 10 x 13."""
    maps = [torch.zeros(2, 5, 4, 6), torch.zeros(2, 5, 2, 3)]
    return Geometry.of(maps, (16, 24), [(16, 24), (10, 13)])


def test_cells_on_padding_are_invalid():
    geometry = two_images()
    assert geometry.levels.tolist() == [0] * 24 + [1] * 6
    assert geometry.starts.tolist() == [0, 24]
    assert geometry.valid[0].all()
    # Cells that begin before pixel 10 from the top and 13 from the left: 3 of 4 rows, 4 of 6 columns; then 2 and 2.
    fine, coarse = geometry.valid[1][:24].reshape(4, 6), geometry.valid[1][24:].reshape(2, 3)
    assert fine.int().tolist() == [[1, 1, 1, 1, 0, 0]] * 3 + [[0] * 6]
    assert coarse.int().tolist() == [[1, 1, 0]] * 2
    torch.testing.assert_close(geometry.ratios[0], torch.ones(2, 2))
    torch.testing.assert_close(geometry.ratios[1], torch.tensor([[4 / 6, 3 / 4], [2 / 3, 1.0]]))


def test_centres_are_in_units_of_the_image_without_padding():
    geometry = two_images()
    torch.testing.assert_close(geometry.centres[0, 0], torch.tensor([0.5 / 6, 0.5 / 4]))
    torch.testing.assert_close(geometry.centres[0, 7], torch.tensor([1.5 / 6, 1.5 / 4]))
    torch.testing.assert_close(geometry.centres[1, 7], torch.tensor([1.5 / 4, 1.5 / 3]))
    # In units of the padded maps, the cells of both images have the same locations.
    locations = geometry.on_maps(geometry.centres)
    torch.testing.assert_close(locations[0, :24, 0], locations[1, :24, 0])
    torch.testing.assert_close(locations[0, 24:, 1], locations[1, 24:, 1])
    boxes = geometry.on_maps(torch.tensor([[[0.5, 0.5, 1.0, 0.5]]] * 2))
    torch.testing.assert_close(boxes[1, 0, 0], torch.tensor([0.5 * 4 / 6, 0.5 * 3 / 4, 4 / 6, 0.5 * 3 / 4]))


def test_valid_cells_equal_the_mask_resized_by_nearest_neighbour():
    sizes = [(57, 93), (64, 40), (33, 101)]
    padded = (64, 101)
    shapes = [(8, 13), (4, 7), (2, 4), (1, 2)]
    geometry = Geometry.of([torch.zeros(3, 1, *shape) for shape in shapes], padded, sizes)
    masks = torch.zeros(3, 1, *padded)
    for mask, (height, width) in zip(masks, sizes, strict=True):
        mask[:, :height, :width] = 1
    expected = [torch.nn.functional.interpolate(masks, shape).flatten(1).bool() for shape in shapes]
    assert (geometry.valid == torch.cat(expected, 1)).all()


def test_maps_restores_the_maps_from_tokens():
    maps = [torch.randn(2, 5, 4, 6), torch.randn(2, 5, 2, 3)]
    tokens = torch.cat([part.flatten(2).mT for part in maps], 1)
    for actual, expected in zip(two_images().maps(tokens), maps, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_sine_encoding_by_hand():
    encoding = sine_encoding(torch.tensor([[0.25, 0.5]]), 4)
    # Two frequencies, 2 pi and 2 pi / 100; sine and cosine of each, for each number.
    angles = [math.pi / 2, math.pi / 200, math.pi, math.pi / 100]
    expected = [f(angle) for angle in angles for f in (math.sin, math.cos)]
    torch.testing.assert_close(encoding, torch.tensor([expected]))


def test_the_inverse_of_the_sigmoid_stays_finite():
    coordinates = torch.tensor([-0.5, 0.0, 0.2, 1.0, 1.5])
    logits = inverse_sigmoid(coordinates)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits.sigmoid()[2], coordinates[2])
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0)
