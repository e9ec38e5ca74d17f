"""A COCO split as a torch Dataset."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as rle_codec
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors

from bucketrank.data.annotations import Split, by_image, classes, clipped, size_of, usable_polygons
from bucketrank.data.images import read_image
from bucketrank.errors import DataError

Target = dict[str, Any]
Item = tuple[Tensor, Target]


class CocoDataset(Dataset[Item]):
    """Images and their objects.

    An item is an image (3, H, W) of 8 bits and a target:

    | key | value |
    |---|---|
    | boxes | (n, 4) corners in pixels, clipped to the image; boxes without area are left out |
    | labels | (n,) from 1, in ascending order of the category ids |
    | masks | (n, H, W) of 0 and 1, if ``masks`` is true |
    | area | (n,) area in the annotation; box area if it has none |
    | iscrowd | (n,) zeros: crowds are left out of the target; evaluation reads them from the file |
    | image_id | () image id in the file |

    With ``keep_empty`` false, images of ``split`` without objects are left out, as the published code does for CNN
    detectors. ``transform`` takes and returns image and target. Annotations are stored in a few arrays, which reach
    both forked and spawned data-loading workers quickly.

    The data must have passed ``require_sound``. Reading an item decodes its image and, with ``masks``, its n masks.
    """

    def __init__(
        self,
        split: Split,
        *,
        masks: bool = False,
        keep_empty: bool = True,
        transform: Callable[[Any, Target], Item] | None = None,
    ) -> None:
        document = split.read()
        self.split = split
        self.masks = masks
        self.transform = transform
        self.category_ids = [number for number, _ in classes(document)]  # label k has category_ids[k - 1]
        self.class_names = [name for _, name in classes(document)]
        label_of = {number: label for label, number in enumerate(self.category_ids, start=1)}

        objects = by_image(entry for entry in document["annotations"] if not entry.get("iscrowd", 0))
        rows: list[tuple[float, ...]] = []  # x1, y1, x2, y2, label, area
        starts = [0]
        segments: list[bytes] = []
        self.image_ids: list[int] = []
        self.sizes: list[tuple[int, int]] = []  # height and width
        self._files: list[str] = []
        for image in document["images"]:
            height, width = size_of(image)
            kept = []
            for entry in objects[image["id"]]:
                if box := clipped(entry["bbox"], (height, width)):
                    area = entry.get("area", (box[2] - box[0]) * (box[3] - box[1]))
                    rows.append((*box, label_of[entry["category_id"]], area))
                    kept.append(entry.get("segmentation") or [])
            if not kept and not keep_empty:
                continue
            self.image_ids.append(image["id"])
            self.sizes.append((height, width))
            self._files.append(str(split.image_path(image)))
            starts.append(len(rows))
            segments.append(pickle.dumps(kept) if masks else b"")
        self._rows: NDArray[np.float64] = np.asarray(rows, dtype=np.float64).reshape(-1, 6)
        self._starts = np.asarray(starts)
        self._segments = np.frombuffer(b"".join(segments), dtype=np.uint8)
        self._segment_starts = np.cumsum([0, *map(len, segments)])

    def __len__(self) -> int:
        return len(self.image_ids)

    @property
    def num_classes(self) -> int:
        """The number of classes, without background."""
        return len(self.class_names)

    @property
    def files(self) -> list[str]:
        """The image files, in the order of the images."""
        return list(self._files)

    def labels_of(self, index: int) -> list[int]:
        """Return the labels of an image without reading its file."""
        return [int(label) for label in self._rows[self._starts[index] : self._starts[index + 1], 4]]

    def __getitem__(self, index: int) -> Item:
        item = self.read(index)
        return item if self.transform is None else self.transform(*item)

    def read(self, index: int) -> Item:
        """Read an item without transform."""
        path, size = self._files[index], self.sizes[index]
        pixels = read_image(Path(path))
        if pixels.shape[:2] != size:
            raise DataError(
                f"{path}: the file is {pixels.shape[1]} x {pixels.shape[0]}, its entry says {size[1]} x {size[0]}; "
                "run bucketrank check-data"
            )
        image = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)
        rows = torch.from_numpy(self._rows[self._starts[index] : self._starts[index + 1]])
        target: Target = {
            "boxes": tv_tensors.BoundingBoxes(rows[:, :4].float(), format="XYXY", canvas_size=size),
            "labels": rows[:, 4].long(),
            "image_id": torch.tensor(self.image_ids[index]),
            "area": rows[:, 5].float(),
            "iscrowd": torch.zeros(len(rows), dtype=torch.int64),
        }
        if self.masks:
            stored = self._segments[self._segment_starts[index] : self._segment_starts[index + 1]]
            # Safe to unpickle: __init__ pickled it.
            target["masks"] = tv_tensors.Mask(decode_masks(pickle.loads(stored.tobytes()), size))  # noqa: S301
        return tv_tensors.Image(image.contiguous()), target


def decode_masks(segmentations: Sequence[Any], size: tuple[int, int]) -> Tensor:
    """Decode polygons and RLE to masks (n, height, width) of 0 and 1; an object without segmentation gets zeros."""
    masks = np.zeros((len(segmentations), *size), dtype=np.uint8)
    for mask, segmentation in zip(masks, segmentations, strict=True):
        if isinstance(segmentation, dict):
            if isinstance(segmentation["counts"], list):
                segmentation = rle_codec.frPyObjects(segmentation, *size)
            mask[:] = rle_codec.decode(segmentation)
        elif polygons := usable_polygons(segmentation):
            mask[:] = rle_codec.decode(rle_codec.merge(rle_codec.frPyObjects(polygons, *size)))
    return torch.from_numpy(masks)
