"""Images of coloured squares with the targets of torchvision's detectors."""

import torch
from torch import Tensor

from tests.integrations.torchvision_models import CLASSES, SIZE

COLOURS = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.3, 0.9]])  # of classes 1 and 2

Target = dict[str, Tensor]


def image_with_squares(generator: torch.Generator, objects: int) -> tuple[Tensor, Target]:
    """Draw squares on grey noise, coloured by class; each has a mask and two keypoints."""
    image = 0.5 + 0.1 * torch.rand(3, SIZE, SIZE, generator=generator)
    boxes, labels, masks = [], [], []
    for index in range(objects):
        side = int(torch.randint(20, 40, (1,), generator=generator))
        label = int(torch.randint(1, CLASSES, (1,), generator=generator))
        # Each object has its own column, so that no object hides another.
        x = index * 48 + int(torch.randint(0, 48 - side, (1,), generator=generator))
        y = int(torch.randint(0, SIZE - side, (1,), generator=generator))
        image[:, y : y + side, x : x + side] = COLOURS[label - 1][:, None, None]
        mask = torch.zeros(SIZE, SIZE, dtype=torch.uint8)
        mask[y : y + side, x : x + side] = 1
        boxes.append([x, y, x + side, y + side])
        labels.append(label)
        masks.append(mask)
    corners = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    points = corners.reshape(-1, 2, 2)
    return image, {
        "boxes": corners,
        "labels": torch.tensor(labels, dtype=torch.int64),
        "masks": torch.stack(masks) if masks else torch.zeros(0, SIZE, SIZE, dtype=torch.uint8),
        "keypoints": torch.cat([points, torch.ones(len(points), 2, 1)], 2),
    }


def batch(*objects: int, seed: int = 0) -> tuple[list[Tensor], list[Target]]:
    """Return one image per argument, with that number of objects."""
    generator = torch.Generator().manual_seed(seed)
    images, targets = zip(*(image_with_squares(generator, count) for count in objects), strict=True)
    return list(images), list(targets)
