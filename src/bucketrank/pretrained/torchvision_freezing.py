"""The parts of a torchvision detector that are not trained: first layers of the backbone, and batch norms.

torchvision freezes them only in a model whose weights it loads itself.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import nn
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.ops import FrozenBatchNorm2d

# torchvision's COCO weights of the first R-CNNs and RetinaNet were trained without an epsilon.
MODELS_WITHOUT_EPSILON = ("fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn")
USUAL_EPSILON = 1e-5  # of FrozenBatchNorm2d


def backbone_layers(model: nn.Module) -> list[list[nn.Module]]:
    """Return the modules of each layer of the backbone, as ``trainable_backbone_layers`` of torchvision counts them."""
    backbone: Any = model.backbone
    if isinstance(model, FasterRCNN | RetinaNet | FCOS):
        body = backbone.body
        if hasattr(body, "layer1"):
            return [[body.conv1, body.bn1], [body.layer1], [body.layer2], [body.layer3], [body.layer4]]
        blocks = list(body.children())
        return _split(blocks, _mobilenet_starts(blocks))
    if hasattr(backbone, "scale_weight"):  # VGG: the last blocks are the first of the extra layers
        blocks = [*backbone.features, *list(backbone.extra[0].children())[:-1]]
        return _split(blocks, [number for number, block in enumerate(blocks) if isinstance(block, nn.MaxPool2d)])
    blocks = [*backbone.features[0], *backbone.features[1]]  # MobileNet: the block that starts C4 is taken apart
    return _split(blocks, sorted({*_mobilenet_starts(blocks), len(backbone.features[0]) - 1}))


def freeze_layers(model: nn.Module, *, trained: int) -> None:
    """Stop the training of all layers of the backbone but the last ``trained``."""
    layers = backbone_layers(model)
    for layer in layers[: len(layers) - trained]:
        for module in layer:
            module.requires_grad_(requires_grad=False)


def freeze_batch_norms(module: nn.Module, *, epsilon: float) -> None:
    """Replace every batch norm inside ``module`` by a frozen one, which uses its statistics and trains nothing."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            frozen = FrozenBatchNorm2d(child.num_features, eps=epsilon)
            frozen.load_state_dict(child.state_dict())
            setattr(module, name, frozen)
        else:
            freeze_batch_norms(child, epsilon=epsilon)


def _mobilenet_starts(blocks: list[nn.Module]) -> list[int]:
    """Return the blocks with a stride, which torchvision marks by ``_is_cn``, and the last one."""
    return [*(number for number, block in enumerate(blocks) if getattr(block, "_is_cn", False)), len(blocks) - 1]


def _split(blocks: list[nn.Module], starts: list[int]) -> list[list[nn.Module]]:
    """Return the blocks before the first start and from each start on."""
    edges = [0, *starts, len(blocks)]
    return [blocks[first:last] for first, last in pairwise(edges)]
