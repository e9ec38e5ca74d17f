"""Detectors of torchvision small enough to train in seconds, and pictures to train them on."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, KeypointRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.ssd import SSD
from torchvision.ops import MultiScaleRoIAlign

SIZE = 96
CLASSES = 3  # with background
WIDTH = 32
COLOURS = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.3, 0.9]])
PLAIN = {"min_size": SIZE, "max_size": SIZE, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}

Target = dict[str, Tensor]


class Backbone(nn.Module):
    """Three maps of strides 8, 16 and 32."""

    def __init__(self, out_channels: int = WIDTH) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.stem = nn.Sequential(self.down(3), self.down(out_channels), self.down(out_channels))
        self.levels = nn.ModuleList([self.down(out_channels), self.down(out_channels)])

    def down(self, channels: int) -> nn.Module:
        width = self.out_channels
        return nn.Sequential(nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.GroupNorm(8, width), nn.ReLU())

    def forward(self, images: Tensor) -> "OrderedDict[str, Tensor]":
        maps = [self.stem(images)]
        for level in self.levels:
            maps.append(level(maps[-1]))
        return OrderedDict((str(i), m) for i, m in enumerate(maps))


def anchors(ratios: tuple[float, ...] = (1.0,)) -> AnchorGenerator:
    return AnchorGenerator(((16, 24), (32, 48), (64, 80)), (ratios,) * 3)


def two_stage() -> dict[str, object]:
    return {
        "rpn_anchor_generator": anchors(),
        "box_roi_pool": MultiScaleRoIAlign(["0", "1", "2"], 5, 1),
        "box_head": TwoMLPHead(WIDTH * 25, 64),
        "box_predictor": FastRCNNPredictor(64, CLASSES),
        "rpn_post_nms_top_n_train": 60,
        "rpn_post_nms_top_n_test": 60,
        **PLAIN,
    }


def faster_rcnn() -> FasterRCNN:
    return FasterRCNN(Backbone(), **two_stage())


def mask_rcnn() -> MaskRCNN:
    pool = MultiScaleRoIAlign(["0", "1", "2"], 7, 1)
    head, predictor = MaskRCNNHeads(WIDTH, (8,), 1), MaskRCNNPredictor(8, 8, CLASSES)
    return MaskRCNN(Backbone(), mask_roi_pool=pool, mask_head=head, mask_predictor=predictor, **two_stage())


def keypoint_rcnn() -> KeypointRCNN:
    pool = MultiScaleRoIAlign(["0", "1", "2"], 7, 1)
    head, predictor = KeypointRCNNHeads(WIDTH, (8,)), KeypointRCNNPredictor(8, 2)
    return KeypointRCNN(
        Backbone(), keypoint_roi_pool=pool, keypoint_head=head, keypoint_predictor=predictor, **two_stage()
    )


def retinanet() -> RetinaNet:
    return RetinaNet(Backbone(), CLASSES, anchor_generator=anchors(), **PLAIN)


def fcos() -> FCOS:
    points = AnchorGenerator(((8,), (16,), (32,)), ((1.0,),) * 3)
    return FCOS(Backbone(), CLASSES, anchor_generator=points, head=FCOSHead(WIDTH, 1, CLASSES, num_convs=2), **PLAIN)


def ssd() -> SSD:
    backbone = Backbone()
    backbone.out_channels = [WIDTH] * 3  # type: ignore[assignment]
    boxes = DefaultBoxGenerator([[]] * 3, scales=[0.2, 0.35, 0.6, 0.9], steps=[8, 16, 32])
    plain = {name: PLAIN[name] for name in ("image_mean", "image_std")}
    return SSD(backbone, boxes, (SIZE, SIZE), CLASSES, **plain)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "faster_rcnn": faster_rcnn,
    "mask_rcnn": mask_rcnn,
    "keypoint_rcnn": keypoint_rcnn,
    "retinanet": retinanet,
    "fcos": fcos,
    "ssd": ssd,
}


def build(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[name]()


def picture(generator: torch.Generator, objects: int) -> tuple[Tensor, Target]:
    """Coloured squares on grey noise, the colour being the class, with masks and two keypoints each."""
    image = 0.5 + 0.1 * torch.rand(3, SIZE, SIZE, generator=generator)
    boxes, labels, masks = [], [], []
    for index in range(objects):
        side = int(torch.randint(20, 40, (1,), generator=generator))
        label = int(torch.randint(1, CLASSES, (1,), generator=generator))
        # A column for each object, so that none hides another.
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
    """One picture for each number of objects given."""
    generator = torch.Generator().manual_seed(seed)
    images, targets = zip(*(picture(generator, count) for count in objects), strict=True)
    return list(images), list(targets)


def train(model: nn.Module, steps: int, data: Callable[[int], tuple[list[Tensor], list[Target]]]) -> list[float]:
    """Train on ``data(step)`` and return the sum of the losses at each step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    totals = []
    for step in range(steps):
        loss = sum(model(*data(step)).values())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()
        totals.append(loss.item())
    return totals


def average_precision(model: nn.Module, images: list[Tensor], targets: list[Target]) -> dict[str, float]:
    """COCO's AP, as ``AP`` and ``AP50``."""
    from faster_coco_eval import COCO, COCOeval_faster

    model.eval()
    with torch.no_grad():
        detections = model([image.clone() for image in images])
    truth = {
        "info": {},
        "images": [{"id": i, "height": SIZE, "width": SIZE} for i in range(len(images))],
        "categories": [{"id": label, "name": str(label)} for label in range(1, CLASSES)],
        "annotations": [
            {"id": 1000 * i + k + 1, "image_id": i, "category_id": int(label), "bbox": corners_to_size(box),
             "area": float((box[2:] - box[:2]).prod()), "iscrowd": 0}
            for i, target in enumerate(targets)
            for k, (box, label) in enumerate(zip(target["boxes"], target["labels"], strict=True))
        ],
    }  # fmt: skip
    found = [
        {"image_id": i, "category_id": int(label), "bbox": corners_to_size(box), "score": float(score)}
        for i, result in enumerate(detections)
        for box, label, score in zip(result["boxes"], result["labels"], result["scores"], strict=True)
    ]
    if not found:
        return {"AP": 0.0, "AP50": 0.0}
    coco = COCO(truth)
    evaluation = COCOeval_faster(coco, coco.loadRes(found), "bbox", print_function=lambda *_: None)
    evaluation.run()
    return {"AP": float(evaluation.stats[0]), "AP50": float(evaluation.stats[1])}


def corners_to_size(box: Tensor) -> list[float]:
    x0, y0, x1, y1 = box.tolist()
    return [x0, y0, x1 - x0, y1 - y0]
