"""Drawn shapes match their annotations."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from torch.testing import assert_close

from bucketrank.data import CocoDataset, Shapes, check, find_splits, write_shapes
from bucketrank.data.shapes import CLASSES
from bucketrank.errors import DataError


def test_the_same_seed_gives_the_same_image_everywhere() -> None:
    drawing = Shapes(size=96, seed=5).draw(3)
    again = Shapes(size=96, seed=5).draw(3)
    np.testing.assert_array_equal(drawing.pixels, again.pixels)
    assert drawing.labels == again.labels
    # A hash of the masks, which do not depend on the rounding of colours.
    assert hashlib.sha256(np.packbits(drawing.masks).tobytes()).hexdigest()[:16] == "cdee334477d5df95"
    for other in (Shapes(size=96, seed=6).draw(3), Shapes(size=96, seed=5, series=1).draw(3)):
        assert not np.array_equal(drawing.pixels, other.pixels)


def test_objects_are_visible_and_do_not_share_pixels() -> None:
    counts, labels = [], set()
    for number in range(40):
        drawing = Shapes().draw(number)
        counts.append(len(drawing.labels))
        labels |= set(drawing.labels)
        assert drawing.masks.sum(0).max() <= 1, "a pixel belongs to one object"
        assert drawing.masks.any((1, 2)).all()
        for mask, (x, y, width, height) in zip(drawing.masks, drawing.boxes, strict=True):
            assert mask.sum() == mask[y : y + height, x : x + width].sum()
            assert mask[y].any()
            assert mask[y + height - 1].any()
            assert mask[:, x].any()
            assert mask[:, x + width - 1].any()
    assert min(counts) >= 4
    assert max(counts) == 12
    assert labels == set(range(1, len(CLASSES) + 1))


def test_some_objects_overlap() -> None:
    boxes = np.asarray(Shapes().draw(9).boxes, dtype=float)
    left, right = boxes[:, :2], boxes[:, :2] + boxes[:, 2:]
    shared = np.minimum(right[:, None], right) - np.maximum(left[:, None], left)
    overlaps = (shared > 0).all(2).sum() - len(boxes)
    assert overlaps > 0


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match="at least 32 pixels, got 8"):
        Shapes(size=8)
    with pytest.raises(ValueError, match="min_objects <= max_objects, got 5 and 4"):
        Shapes(min_objects=5, max_objects=4)
    assert Shapes(size=64, min_objects=0, max_objects=0).draw(0).boxes == []


def test_a_written_folder_is_a_sound_data_set(tmp_path: Path) -> None:
    folder = write_shapes(tmp_path / "shapes", train=6, val=3, size=64, seed=1)
    splits = find_splits(folder)
    assert splits.train is not None
    assert splits.val is not None
    for split in (splits.train, splits.val):
        assert check(split, masks=True) == []
    data = CocoDataset(splits.val, masks=True)
    assert len(data) == 3
    image, target = data[2]
    drawing = Shapes(size=64, seed=1, series=1).draw(2)
    np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), drawing.pixels)
    np.testing.assert_array_equal(target["masks"].numpy(), drawing.masks)
    assert target["labels"].tolist() == drawing.labels
    assert_close(target["area"].tolist(), [float(mask.sum()) for mask in drawing.masks])

    more = write_shapes(tmp_path / "more", train=1, val=3, size=64, seed=1)
    assert json.loads((more / "val.json").read_text()) == json.loads((folder / "val.json").read_text())
    with pytest.raises(DataError, match="is not empty"):
        write_shapes(folder)
