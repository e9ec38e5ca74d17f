"""CocoDataset and the reading of image files."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close
from torch.utils.data import DataLoader
from torchvision import tv_tensors

from bucketrank.data import CocoDataset, GroupedBatchSampler, Split, collate, find_splits
from bucketrank.data.images import read_image
from bucketrank.errors import DataError
from tests.data.small_folders import sound_document, write_image, write_split
from tests.shared_data import shared


def test_an_item(tmp_path: Path) -> None:
    data = CocoDataset(write_split(tmp_path, sound_document()), masks=True)
    assert (len(data), data.image_ids, data.sizes, data.num_classes) == (2, [11, 5], [(30, 40)] * 2, 2)
    assert (data.class_names, data.category_ids) == (["cat", "dog"], [2, 9]), "in the order of the ids"
    image, target = data[0]
    assert isinstance(image, tv_tensors.Image)
    assert (image.dtype, image.shape) == (torch.uint8, (3, 30, 40))
    assert isinstance(target["boxes"], tv_tensors.BoundingBoxes)
    assert target["boxes"].canvas_size == (30, 40)
    assert_close(target["boxes"].as_subclass(torch.Tensor), torch.tensor([[4.0, 5, 14, 25], [20, 3, 28, 9]]))
    assert_close(target["labels"], torch.tensor([2, 1]))
    assert_close(target["area"], torch.tensor([200.0, 48.0]), msg="of the box, if the annotation has none")
    assert_close(target["iscrowd"], torch.tensor([0, 0]))
    assert_close(target["image_id"], torch.tensor(11))
    assert isinstance(target["masks"], tv_tensors.Mask)
    assert target["masks"].shape == (2, 30, 40)
    expected = torch.zeros(30, 40, dtype=torch.uint8)
    expected[5:25, 4:14] = 1
    assert_close(target["masks"][0].as_subclass(torch.Tensor), expected)
    assert data.labels_of(0) == [2, 1]


def test_an_image_without_objects(tmp_path: Path) -> None:
    split = write_split(tmp_path, sound_document())
    _, target = CocoDataset(split, masks=True)[1]
    assert {name: tuple(target[name].shape) for name in ("boxes", "labels", "masks", "area")} == {
        "boxes": (0, 4),
        "labels": (0,),
        "masks": (0, 30, 40),
        "area": (0,),
    }
    assert "masks" not in CocoDataset(split)[1][1]
    assert CocoDataset(split, keep_empty=False).image_ids == [11]


def test_boxes_are_clipped_and_those_without_area_left_out(tmp_path: Path) -> None:
    document = sound_document()
    document["annotations"][0]["bbox"] = [-5, 20, 15, 20]
    document["annotations"][1]["bbox"] = [20, 3, 0, 6]
    _, target = CocoDataset(write_split(tmp_path, document), masks=True)[0]
    assert_close(target["boxes"].as_subclass(torch.Tensor), torch.tensor([[0.0, 20, 10, 30]]))
    assert len(target["masks"]) == len(target["labels"]) == 1


def test_masks_from_rle_and_polygons(tmp_path: Path) -> None:
    document = sound_document()
    document["annotations"] = [
        {"id": n, "image_id": 11, "category_id": 2, "bbox": [0, 0, 40, 30], "segmentation": mask}
        for n, mask in enumerate(
            [
                {"size": [30, 40], "counts": [30, 60, 1110]},  # columns 1 and 2
                [[1, 0, 3, 0, 3, 30, 1, 30]],  # the same columns
                [
                    [1, 0, 2, 0, 2, 30, 1, 30],
                    [2, 0, 3, 0, 3, 30, 2, 30],
                    [5, 5, 9, 9],
                ],  # the same in two parts, and a polygon of two corners
                [],
            ]
        )
    ]
    _, target = CocoDataset(write_split(tmp_path, document), masks=True)[0]
    columns = torch.zeros(30, 40, dtype=torch.uint8)
    columns[:, 1:3] = 1
    masks = target["masks"].as_subclass(torch.Tensor)
    assert_close(masks, torch.stack([columns, columns, columns, torch.zeros_like(columns)]))


def test_compressed_and_traced_masks_agree() -> None:
    folder = shared("data/nuclei")
    _, polygons = CocoDataset(Split(folder / "val.json", folder / "images"), masks=True)[0]
    _, exact = CocoDataset(Split(folder / "val_rle.json", folder / "images"), masks=True)[0]
    assert_close(polygons["boxes"], exact["boxes"], atol=1.0, rtol=0.0)
    both = (polygons["masks"] & exact["masks"]).sum((1, 2))
    either = (polygons["masks"] | exact["masks"]).sum((1, 2))
    assert (both / either).min() > 0.95


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "LA", "RGBA", "P", "CMYK"])
def test_every_mode_becomes_rgb(mode: str, tmp_path: Path) -> None:
    path = write_image(tmp_path / "a.tif" if mode == "CMYK" else tmp_path / "a.png", mode=mode)
    pixels = read_image(path)
    assert pixels.shape == (30, 40, 3)
    assert pixels.dtype == np.uint8
    if mode != "1":
        grey = np.add.outer(np.arange(30) * 3, np.arange(40) * 2)
        np.testing.assert_allclose(pixels, np.repeat(grey[..., None], 3, axis=2), atol=3)


def test_a_palette_with_transparency(tmp_path: Path) -> None:
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4)).convert("P")
    image.save(tmp_path / "a.png", transparency=bytes([0, 128]))
    np.testing.assert_array_equal(read_image(tmp_path / "a.png")[..., 0], np.arange(12).reshape(3, 4))


def test_sixteen_bits_are_scaled_not_truncated(tmp_path: Path) -> None:
    deep = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "a.png")
    np.testing.assert_array_equal(read_image(tmp_path / "a.png")[0, :, 1], [0, 1, 128, 255])


@pytest.mark.parametrize(("pixels", "message"), [(np.float32(0.5), "floating-point"), (np.int32(70000), "16 bits")])
def test_depths_of_unknown_range_are_refused(pixels: np.generic, message: str, tmp_path: Path) -> None:
    Image.fromarray(np.full((3, 4), pixels)).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match=message):
        read_image(tmp_path / "a.tif")


def test_exif_orientation_is_not_applied(tmp_path: Path) -> None:
    split = write_split(tmp_path, sound_document())
    plain = read_image(write_image(tmp_path / "plain.jpg"))
    exif = Image.Exif()
    exif[0x0112] = 6
    write_image(tmp_path / "images/a.png", format="JPEG", exif=exif)
    image, _ = CocoDataset(split)[0]
    assert image.shape == (3, 30, 40)
    np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), plain)


def test_a_file_of_another_size_is_named(tmp_path: Path) -> None:
    split = write_split(tmp_path, sound_document())
    write_image(tmp_path / "images/a.png", width=20)
    with pytest.raises(DataError, match=r"a\.png: the file is 20 x 30, its entry says 40 x 30"):
        _ = CocoDataset(split)[0]


def test_a_pickled_copy_is_equal(tmp_path: Path) -> None:
    data = CocoDataset(write_split(tmp_path, sound_document()), masks=True)
    again = pickle.loads(pickle.dumps(data))
    assert_close(again[0][1]["masks"], data[0][1]["masks"])
    assert_close(again[0][0], data[0][0])


@pytest.mark.slow
def test_spawned_workers_read_it(tmp_path: Path) -> None:
    data = CocoDataset(write_split(tmp_path, sound_document()), masks=True)
    sampler = GroupedBatchSampler(data.sizes, batch_size=2, shuffle=False)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=1, multiprocessing_context="spawn")
    (batch,) = list(loader)
    images, targets = batch
    assert [int(target["image_id"]) for target in targets] == [11, 5]
    assert_close(images[0].as_subclass(torch.Tensor), data[0][0].as_subclass(torch.Tensor))


def test_real_annotations() -> None:
    splits = find_splits(shared("data/coco_by"))
    assert splits.train is not None
    data = CocoDataset(splits.train, masks=True)
    assert (len(data), data.num_classes, data.category_ids[-1]) == (104, 80, 90)
    assert sum(len(data.labels_of(index)) for index in range(len(data))) == 991 - 13, "crowds are left out"
    assert len(CocoDataset(splits.train, keep_empty=False)) <= 101
    crowded = max(range(len(data)), key=lambda index: len(data.labels_of(index)))
    image, target = data[crowded]
    assert image.shape[1:] == data.sizes[crowded] == tuple(target["masks"].shape[1:])
    assert (target["masks"].sum((1, 2)) > 0).all()
