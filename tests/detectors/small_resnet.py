"""A small ResNet in place of torchvision's ResNet-50, so that its detectors train in seconds."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torchvision.models.detection import faster_rcnn, fcos, mask_rcnn, retinanet
from torchvision.models.resnet import Bottleneck, ResNet

RESNET_MODELS = (
    "fasterrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "fcos_resnet50_fpn",
)


def small_resnet(*, weights: Any = None, progress: bool = True, norm_layer: Any = nn.BatchNorm2d) -> ResNet:
    return ResNet(Bottleneck, [1, 1, 1, 1], width_per_group=16, norm_layer=norm_layer)


@pytest.fixture
def small_backbones(monkeypatch):
    """Give all detectors with a ResNet-50 a ResNet of four narrow blocks."""
    for module in (faster_rcnn, fcos, mask_rcnn, retinanet):
        monkeypatch.setattr(module, "resnet50", small_resnet)
