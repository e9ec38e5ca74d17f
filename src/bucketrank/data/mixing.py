"""Mosaic, mixup and copy-paste: training images mixed from several images of a data set.

The result has the size of the first image, so batches of wide and of tall images stay what they are. Randomness comes
from torch's global generator, as in ``transforms``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.ops import box_area, masks_to_boxes
from torchvision.transforms import v2

from bucketrank.data.coco import CocoDataset, Item, Target
from bucketrank.data.transforms import MIN_SIDE

MIN_SCALE = 0.5  # smallest factor of the size at which an image fits the mosaic
MIN_VISIBLE = 0.1  # share of an object's area that must stay visible, otherwise the object is left out
CENTRE = (0.3, 0.7)  # position of the point where the four images of a mosaic meet, as a fraction of each side
WEIGHT = (0.4, 0.6)  # weight of the first image of a mixup
PASTED = 0.5  # probability with which copy-paste takes each object
MAX_ENLARGED = 16  # a thin image is cut to a part of its length if it would get this many times the canvas's pixels
PER_OBJECT = ("labels", "area", "iscrowd", "masks")  # besides boxes


class MixedImages(Dataset[Item]):
    """A data set whose images are mixed with others at random, before its own transform.

    ``mosaic``, ``mixup`` and ``copy_paste`` are probabilities. Copy-paste comes first, then mosaic, then mixup. The
    others are drawn uniformly. ``keep_masks=False`` drops the masks that only copy-paste needs.
    """

    def __init__(
        self,
        images: CocoDataset,
        *,
        mosaic: float = 0.0,
        mixup: float = 0.0,
        copy_paste: float = 0.0,
        keep_masks: bool = True,
    ) -> None:
        if copy_paste and not images.masks:
            raise ValueError("MixedImages: expected images with masks for copy_paste, got none; read them with masks")
        self.images = images
        self.mosaic, self.mixup, self.copy_paste, self.keep_masks = mosaic, mixup, copy_paste, keep_masks

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        image, target = self.images.read(index)
        if min(image.shape[-2:]) >= MIN_SIDE:
            if _happens(self.copy_paste):
                image, target = paste((image, target), self._another(index))
            if _happens(self.mosaic):
                image, target = make_mosaic([(image, target), *(self._another(index) for _ in range(3))])
            if _happens(self.mixup):
                image, target = mix((image, target), self._another(index))
        if not self.keep_masks:
            target.pop("masks", None)
        return (image, target) if self.images.transform is None else self.images.transform(image, target)

    def _another(self, index: int) -> Item:
        """Read a random image, but not this one: its objects would be there twice."""
        others = max(1, len(self.images) - 1)
        return self.images.read((index + 1 + int(torch.randint(others, ()))) % len(self.images))


def make_mosaic(items: Sequence[Item]) -> Item:
    """Put four images around a random point of a canvas with the size of the first, each into a random corner.

    Every image is scaled to half or all of the canvas size, but at least to the size of its corner, which shows a
    random part of it.
    """
    height, width = items[0][0].shape[-2:]
    x, y = (max(1, int(_uniform(*CENTRE) * side)) for side in (width, height))
    corners = [(0, 0, x, y), (x, 0, width, y), (0, y, x, height), (x, y, width, height)]
    canvas = torch.empty_like(items[0][0].as_subclass(Tensor))
    parts = []
    for item, place in zip(items, torch.randperm(4).tolist(), strict=True):
        left, top, right, bottom = corners[place]
        pixels, target = fill(item, (bottom - top, right - left), canvas=(height, width))
        canvas[:, top:bottom, left:right] = pixels
        if "masks" in target:
            masks = target["masks"].new_zeros(len(target["boxes"]), height, width)
            masks[:, top:bottom, left:right] = target["masks"]
            target["masks"] = masks
        target["boxes"] = target["boxes"] + torch.tensor([left, top, left, top])
        parts.append(target)
    return _joined(canvas, parts, items[0][1])


def mix(item: Item, other: Item) -> Item:
    """Blend two images, the second scaled and cropped to the size of the first; all objects stay."""
    image, target = item
    size = (image.shape[-2], image.shape[-1])
    pixels, added = fill(other, size, canvas=size)
    weight = _uniform(*WEIGHT)
    blended = (weight * image.as_subclass(Tensor).float() + (1 - weight) * pixels.float()).round().to(image.dtype)
    return _joined(blended, [_plain(target), added], target)


def paste(item: Item, other: Item) -> Item:
    """Paste about half of the other image's objects, cut out along their masks, on top of the first image.

    Hidden objects lose the hidden part of their mask, and their box shrinks to the rest. An object is left out if less
    than ``MIN_VISIBLE`` of it is left.
    """
    image, target = item
    size = (image.shape[-2], image.shape[-1])
    pixels, added = fill(other, size, canvas=size)
    added = _selected(added, torch.rand(len(added["boxes"])) < PASTED)
    covered = added["masks"].bool().any(0)
    before = _plain(target)
    masks = before["masks"] * ~covered
    hidden = _has_pixels(before["masks"] * covered)
    visible = masks.flatten(1).sum(1) >= MIN_VISIBLE * before["masks"].flatten(1).sum(1)
    before["boxes"] = _shrunk(before["boxes"], masks, where=hidden)
    before["masks"] = masks
    pasted = torch.where(covered, pixels, image.as_subclass(Tensor))
    return _joined(pasted, [_selected(before, ~hidden | (visible & _has_pixels(masks))), added], target)


def fill(item: Item, size: tuple[int, int], *, canvas: tuple[int, int]) -> tuple[Tensor, Target]:
    """Scale an image and cut a random window of ``size`` (height, width) out of it.

    The image is scaled by a random factor to between half and all of ``canvas``, but at least to ``size``. Objects that
    are mostly outside the window are left out; the others are clipped to it.
    """
    image, target = item[0].as_subclass(Tensor), _plain(item[1])
    old, window = torch.tensor(image.shape[-2:]), torch.tensor(size)
    fitting = _uniform(MIN_SCALE, 1.0) * float((torch.tensor(canvas) / old).min())
    scale = max(fitting, float((window / old).max()))
    if float((old * scale).prod()) > MAX_ENLARGED * canvas[0] * canvas[1]:
        needed = torch.minimum((window / scale).ceil().long(), old)
        image, target = _window(image, target, needed)
        old = needed
    new = torch.maximum((old * scale).round().long(), window)
    ratio = (new / old).flip(0).repeat(2)  # x, y, x, y
    target["boxes"], target["area"] = target["boxes"] * ratio, target["area"] * ratio[0] * ratio[1]
    image = v2.functional.resize(image, new.tolist(), antialias=True)
    if "masks" in target:
        before = _has_pixels(target["masks"])
        target["masks"] = v2.functional.resize(tv_tensors.Mask(target["masks"]), new.tolist()).as_subclass(Tensor)
        target = _selected(target, _has_pixels(target["masks"]) | ~before)
    return _window(image, target, window)


def _window(image: Tensor, target: Target, size: Tensor) -> tuple[Tensor, Target]:
    """Cut a random window of ``size`` (height, width) out of an image, with the objects that are mostly inside."""
    height, width = size.tolist()
    top, left = (int(torch.randint(int(slack) + 1, ())) for slack in torch.tensor(image.shape[-2:]) - size)
    rows, columns = slice(top, top + height), slice(left, left + width)
    whole = target["boxes"] - torch.tensor([left, top, left, top])
    boxes = whole.clamp(min=0).minimum(torch.tensor([width, height]).repeat(2))
    kept = (box_area(boxes) >= MIN_VISIBLE * box_area(whole)) & ((boxes[:, 2:] - boxes[:, :2]).amin(1) >= 1)
    if "masks" in target:
        before, masks = _has_pixels(target["masks"]), target["masks"][:, rows, columns]
        kept &= _has_pixels(masks) | ~before
        boxes = _shrunk(boxes, masks, where=(boxes != whole).any(1))
        target = {**target, "masks": masks}
    return image[:, rows, columns], _selected({**target, "boxes": boxes}, kept)


def _shrunk(boxes: Tensor, masks: Tensor, *, where: Tensor) -> Tensor:
    """Shrink the chosen boxes to the extent of their masks; boxes without a pixel stay."""
    where = where & _has_pixels(masks)
    tight = masks_to_boxes(masks[where]) + torch.tensor([0, 0, 1, 1])  # the last pixel belongs to the box
    shrunk = boxes.clone()
    shrunk[where, :2] = boxes[where, :2].maximum(tight[:, :2])
    shrunk[where, 2:] = boxes[where, 2:].minimum(tight[:, 2:])
    return shrunk


def _joined(image: Tensor, parts: Sequence[Target], first: Target) -> Item:
    """Return an image with the objects of all parts and the other entries of the first target."""
    objects = {name: torch.cat([part[name] for part in parts]) for name in ("boxes", *PER_OBJECT) if name in first}
    size = (image.shape[-2], image.shape[-1])
    objects["boxes"] = tv_tensors.BoundingBoxes(objects["boxes"], format="XYXY", canvas_size=size)
    if "masks" in objects:
        objects["masks"] = tv_tensors.Mask(objects["masks"])
    return tv_tensors.Image(image), {**first, **objects}


def _selected(target: Target, kept: Tensor) -> Target:
    return {name: value[kept] if name in ("boxes", *PER_OBJECT) else value for name, value in target.items()}


def _plain(target: Target) -> Target:
    """Return the target with plain tensors, whose arithmetic torchvision does not watch."""
    return {name: value.as_subclass(Tensor) if isinstance(value, Tensor) else value for name, value in target.items()}


def _has_pixels(masks: Tensor) -> Tensor:
    return masks.flatten(1).bool().any(1)


def _happens(probability: float) -> bool:
    return probability > 0 and _uniform(0.0, 1.0) < probability


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))
