"""Torchvision detectors with random weights, small enough to train in seconds."""

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
CLASSES = 3  # including background
WIDTH = 32
TRANSFORM = {"min_size": SIZE, "max_size": SIZE, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}


class Backbone(nn.Module):
    """A backbone with three feature maps, of strides 8, 16 and 32."""

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


def two_stage_arguments() -> dict[str, object]:
    return {
        "rpn_anchor_generator": anchors(),
        "box_roi_pool": MultiScaleRoIAlign(["0", "1", "2"], 5, 1),
        "box_head": TwoMLPHead(WIDTH * 25, 64),
        "box_predictor": FastRCNNPredictor(64, CLASSES),
        "rpn_post_nms_top_n_train": 60,
        "rpn_post_nms_top_n_test": 60,
        **TRANSFORM,
    }


def faster_rcnn() -> FasterRCNN:
    return FasterRCNN(Backbone(), **two_stage_arguments())


def mask_rcnn() -> MaskRCNN:
    pool = MultiScaleRoIAlign(["0", "1", "2"], 7, 1)
    head, predictor = MaskRCNNHeads(WIDTH, (8,), 1), MaskRCNNPredictor(8, 8, CLASSES)
    return MaskRCNN(Backbone(), mask_roi_pool=pool, mask_head=head, mask_predictor=predictor, **two_stage_arguments())


def keypoint_rcnn() -> KeypointRCNN:
    pool = MultiScaleRoIAlign(["0", "1", "2"], 7, 1)
    head, predictor = KeypointRCNNHeads(WIDTH, (8,)), KeypointRCNNPredictor(8, 2)
    return KeypointRCNN(
        Backbone(), keypoint_roi_pool=pool, keypoint_head=head, keypoint_predictor=predictor, **two_stage_arguments()
    )


def retinanet() -> RetinaNet:
    return RetinaNet(Backbone(), CLASSES, anchor_generator=anchors(), **TRANSFORM)


def fcos() -> FCOS:
    points = AnchorGenerator(((8,), (16,), (32,)), ((1.0,),) * 3)
    return FCOS(
        Backbone(), CLASSES, anchor_generator=points, head=FCOSHead(WIDTH, 1, CLASSES, num_convs=2), **TRANSFORM
    )


def ssd() -> SSD:
    backbone = Backbone()
    backbone.out_channels = [WIDTH] * 3  # type: ignore[assignment]
    boxes = DefaultBoxGenerator([[]] * 3, scales=[0.2, 0.35, 0.6, 0.9], steps=[8, 16, 32])
    normalisation = {name: TRANSFORM[name] for name in ("image_mean", "image_std")}
    return SSD(backbone, boxes, (SIZE, SIZE), CLASSES, **normalisation)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "faster_rcnn": faster_rcnn,
    "mask_rcnn": mask_rcnn,
    "keypoint_rcnn": keypoint_rcnn,
    "retinanet": retinanet,
    "fcos": fcos,
    "ssd": ssd,
}


def build(name: str, seed: int = 0) -> Any:
    """Return the model of this name; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return MODELS[name]()
