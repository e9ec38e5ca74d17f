"""Drawn detections: boxes, masks and labels are visible for every size of image."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from bucketrank.data.shapes import CLASSES, Shapes
from bucketrank.drawing import COLOURS, as_rgb, colour_of, draw, grid

GREY = (128, 128, 128)


def detections_at(*boxes, label=1, score=0.9):
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.full((len(boxes),), label),
        "scores": torch.linspace(score, score / 2, len(boxes)),
    }


def plain(width, height):
    return Image.new("RGB", (width, height), GREY)


def pixels(image):
    return np.asarray(image).astype(int)


def near(image, colour, tolerance=12):
    """Return where an image has that colour: bool (H, W)."""
    return (np.abs(pixels(image) - np.asarray(colour)) <= tolerance).all(-1)


def test_every_type_of_image_gives_the_same():
    array = Shapes(size=64).draw(0).pixels
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    drawn = [
        draw(image, detections_at([10, 10, 40, 40]), classes=["a"])
        for image in (array, Image.fromarray(array), tensor, tensor / 255)
    ]
    for other in drawn[1:]:
        np.testing.assert_array_equal(pixels(other), pixels(drawn[0]))


def test_an_image_without_detections_is_unchanged():
    np.testing.assert_array_equal(pixels(draw(plain(800, 600), classes=[])), pixels(plain(800, 600)))
    np.testing.assert_array_equal(pixels(draw(plain(800, 600), detections_at(), classes=[])), pixels(plain(800, 600)))


def test_the_image_itself_is_not_drawn_on():
    image = plain(800, 600)
    draw(image, detections_at([10, 10, 400, 400]), classes=["a"])
    np.testing.assert_array_equal(pixels(image), pixels(plain(800, 600)))


@pytest.mark.parametrize(
    ("size", "drawn"), [((160, 80), (640, 320)), ((640, 480), (640, 480)), ((2000, 10), (2000, 10))]
)
def test_small_images_are_enlarged(size, drawn):
    assert draw(plain(*size), classes=["a"]).size == drawn


@pytest.mark.parametrize("side", [32, 160, 640, 2400])
def test_a_frame_is_drawn_at_its_box(side):
    """For any size of image, the colour is on the frame, within the width of its line, and not inside."""
    box = [0.25 * side, 0.25 * side, 0.75 * side, 0.75 * side]
    drawn = draw(plain(side, side), detections_at(box), classes=["a"])
    there = near(drawn, COLOURS[0])
    width = drawn.width
    rows = np.flatnonzero(there[:, width // 2])
    assert abs(rows[-1] - 0.75 * width) <= 0.01 * width
    assert there[width // 2, round(0.25 * width)]
    assert not there[width // 2, round(0.4 * width) : round(0.6 * width)].any()


@pytest.mark.parametrize("background", [(0, 0, 0), (255, 255, 255), COLOURS[0]])
def test_a_frame_is_visible_on_any_background(background):
    image = Image.new("RGB", (640, 480), background)
    drawn = draw(image, detections_at([100, 100, 400, 300]), classes=["a"])
    along = pixels(drawn)[200, 90:110].sum(-1)
    assert along.max() - along.min() > 100, "the colour, or its dark edge"


def test_threshold_cuts_by_score():
    detections = detections_at([10, 10, 200, 200], [300, 200, 500, 400], score=0.8)  # 0.8 and 0.4
    both, one = (draw(plain(640, 480), detections, classes=["a"], threshold=limit) for limit in (0.4, 0.41))
    assert near(both, COLOURS[0])[:, 290:].any()
    assert not near(one, COLOURS[0])[:, 290:].any()
    assert near(one, COLOURS[0])[:, :290].any()


def test_ground_truth_boxes_are_white_and_dashed():
    drawn = draw(plain(640, 480), classes=["a"], ground_truth=detections_at([100, 100, 500, 300]))
    row = near(drawn, (255, 255, 255))[100, 100:500]
    assert row[0]
    assert 0.3 < row.mean() < 0.8
    assert row[-4:].any(), "from corner to corner"


def test_masks_are_transparent():
    detections = detections_at([0, 0, 320, 480])
    detections["masks"] = torch.zeros(1, 1, 480, 640)
    detections["masks"][..., :320] = 0.9
    drawn = pixels(draw(plain(640, 480), detections, classes=["a"]))
    expected = 0.58 * np.asarray(GREY) + 0.42 * np.asarray(COLOURS[0])
    np.testing.assert_allclose(drawn[240, 160], expected, atol=2)
    np.testing.assert_array_equal(drawn[240, 500], GREY)
    detections["masks"] = (detections["masks"] > 0.5)[:, 0]
    np.testing.assert_array_equal(pixels(draw(plain(640, 480), detections, classes=["a"])), drawn)


def test_labels_keep_apart():
    """Two detections at the same position both have a readable label: each has its own patch of colour."""
    detections = detections_at([100, 100, 400, 300], [102, 101, 401, 299])
    detections["labels"] = torch.tensor([1, 2])
    drawn = draw(plain(640, 480), detections, classes=["first", "second"])
    assert drawn.size == (640, 480), "no legend: nothing was shortened"
    for colour in COLOURS[:2]:
        rows = near(drawn, [round(0.92 * part + 0.08 * 128) for part in colour], 14).sum(1)
        assert (rows > 30).sum() >= 10, "a patch as high as letters"


def test_a_crowd_is_shortened_and_explained():
    drawing = Shapes(size=160, min_objects=40, max_objects=40).draw(2)
    boxes = torch.tensor(drawing.boxes, dtype=torch.float32)
    boxes[:, 2:] += boxes[:, :2]
    scores = torch.linspace(0.9, 0.01, len(boxes))
    detections = {"boxes": boxes, "labels": torch.tensor(drawing.labels), "scores": scores}
    drawn = draw(drawing.pixels, detections, classes=CLASSES)
    assert drawn.width == 960, "larger than an image with few objects"
    heap = draw(plain(640, 640), {**detections, "boxes": 200 + boxes / 4}, classes=CLASSES)
    assert heap.height > heap.width, "a legend that names the colours"


def test_boxes_outside_the_image_and_unknown_labels_are_drawn():
    detections = detections_at([-50, -50, 700, 500], [630, 470, 640, 480], [5, 5, 5, 5], label=9)
    drawn = draw(plain(640, 480), detections, classes=["a"])
    assert drawn.width == 640
    assert near(drawn, colour_of(9))[240, [0, 639]].all(), "the first box, clipped to the image"


def test_tiny_scores_keep_their_digits():
    one, other = (
        draw(plain(640, 480), detections_at([100, 100, 400, 300], score=score), classes=["a"])
        for score in (0.031, 0.032)
    )
    assert (pixels(one) != pixels(other)).any()


def test_colours_differ():
    colours = [colour_of(label) for label in range(1, 22)]
    assert len(set(colours)) == 21
    for one, other in itertools.combinations(colours, 2):
        assert np.abs(np.subtract(one, other)).sum() >= 40
    assert colour_of(22) == colour_of(1)


def test_wrong_images_are_refused():
    with pytest.raises(ValueError, match=r"expected an image of shape \(3, height, width\), got \(1, 4, 4\)"):
        as_rgb(torch.zeros(1, 4, 4))


def test_a_grid_of_images():
    blocks = [Image.new("RGB", (200, 100), COLOURS[number]) for number in range(3)]
    page = grid(blocks, ["ground truth", "detections"], columns=2)
    there = [near(page, COLOURS[number], 0) for number in range(3)]
    assert [int(each.sum()) for each in there] == [20000] * 3
    places = [(int(np.flatnonzero(each.any(1))[0]), int(np.flatnonzero(each.any(0))[0])) for each in there]
    assert places[0][0] == places[1][0] < places[2][0]
    assert places[0][1] == places[2][1] < places[1][1]
    assert near(page, (25, 25, 25), 30)[: places[0][0]].any(), "the titles above"
    without = grid(blocks, columns=2)
    assert without.height < page.height


def test_a_grid_needs_images():
    for arguments in (([], [], 1), ([plain(4, 4)], [], 0), ([plain(4, 4)], ["a", "b"], 1)):
        with pytest.raises(ValueError, match="grid: expected"):
            grid(arguments[0], arguments[1], columns=arguments[2])
