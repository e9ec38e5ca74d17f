"""The input transform of the detectors: torchvision's, with resized sides of at least one pixel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.transform import GeneralizedRCNNTransform, resize_boxes


class InputTransform(GeneralizedRCNNTransform):
    """Normalise, resize and pad images like torchvision's transform, but keep at least one pixel of each side.

    torchvision scales both sides by the same factor and rounds down: 3000 x 2 pixels at a ``max_size`` of 1333 would
    become 1333 x 0. Here they become 1333 x 1.
    """

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        height, width = (int(side) for side in image.shape[-2:])
        scale = self.max_size / max(height, width)
        if self.fixed_size is not None or int(min(height, width) * scale) >= 1:
            resized: tuple[Tensor, dict[str, Tensor] | None] = super().resize(image, target)
            return resized
        size = [max(1, int(height * scale)), max(1, int(width * scale))]
        image = F.interpolate(image[None], size=size, mode="bilinear", align_corners=False)[0]
        if target is None:
            return image, None
        changed = {"boxes": resize_boxes(target["boxes"], [height, width], size)}
        if "masks" in target:
            changed["masks"] = F.interpolate(target["masks"][:, None].float(), size=size)[:, 0].byte()
        return image, target | changed
