"""Small detectors of torchvision with random weights, and ours with the same weights and settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import resnet18
from torchvision.models.detection import FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from bucketrank.detectors import build
from bucketrank.weights.load import load_initial_weights

CLASSES, CHANNELS, HIDDEN, SIDE = 3, 16, 24, 128
RATIOS = (0.5, 1.0, 2.0)
BETA = 1 / 9  # of torchvision's smooth L1 loss
SHARED = {"min_size": SIDE, "max_size": 2 * SIDE}
# torchvision's settings; ours have other defaults.
THRESHOLD, DETECTIONS, PROPOSALS = 0.05, 300, 400


class UnroundedAnchors(AnchorGenerator):  # type: ignore[misc]  # torchvision is not typed
    """torchvision's anchors, but not rounded to whole pixels."""

    def generate_anchors(self, scales, aspect_ratios, dtype=torch.float32, device="cpu"):
        halves = [(s / math.sqrt(r) / 2, s * math.sqrt(r) / 2) for r in aspect_ratios for s in scales]
        return torch.tensor([[-x, -y, x, y] for x, y in halves], dtype=dtype, device=device)


def torchvision_model(name: str, *, seed: int = 0, labels: int = CLASSES + 1) -> Any:
    """Build torchvision's model for one of our detectors, small and with random weights, in evaluation mode."""
    dense = name == "retinanet"
    levels = [2, 3, 4] if dense else [1, 2, 3, 4]
    backbone = BackboneWithFPN(
        resnet18(weights=None),
        {f"layer{level}": str(index) for index, level in enumerate(levels)},
        [32 * 2**level for level in levels],
        CHANNELS,
        extra_blocks=LastLevelP6P7(CHANNELS, CHANNELS) if dense else LastLevelMaxPool(),
    )
    strides = [8, 16, 32, 64, 128] if dense else [4, 8, 16, 32, 64]
    scales = [4 * 2 ** (step / 3) for step in range(3)] if dense else [8]
    anchors = UnroundedAnchors(tuple(tuple(s * scale for scale in scales) for s in strides), (RATIOS,) * 5)
    if dense:
        model: Any = RetinaNet(backbone, labels, anchor_generator=anchors, size_divisible=SIDE, **SHARED)
    else:
        masks: dict[str, Any] = {
            "mask_head": MaskRCNNHeads(CHANNELS, (CHANNELS,) * 4, dilation=1),
            "mask_predictor": MaskRCNNPredictor(CHANNELS, CHANNELS, labels),
        }
        model = (MaskRCNN if name == "mask_rcnn" else FasterRCNN)(
            backbone,
            rpn_anchor_generator=anchors,
            box_head=TwoMLPHead(CHANNELS * 49, HIDDEN),
            box_predictor=FastRCNNPredictor(HIDDEN, labels),
            rpn_post_nms_top_n_train=PROPOSALS,
            rpn_post_nms_top_n_test=PROPOSALS,
            box_detections_per_img=DETECTIONS,
            size_divisible=SIDE,
            **SHARED,
            **(masks if name == "mask_rcnn" else {}),
        )
    randomise(model, seed=seed)
    return model.eval()


@torch.no_grad()
def randomise(model: nn.Module, *, seed: int) -> None:
    """Fill every tensor at random, so that activations, scores and boxes vary and a wrong tensor shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("running_var") or (name.endswith("weight") and tensor.dim() == 1):
            tensor.copy_(0.5 + noise.sigmoid())  # variances and weights of norms
        elif tensor.dim() == 1:
            tensor.copy_(0.1 * noise)
        else:
            tensor.copy_(noise * math.sqrt(1.5 / tensor[0].numel()))
        if "inner_blocks" in name:
            tensor.mul_(0.05)  # the random backbone returns values of about 20
        if "bbox_pred" in name or "bbox_reg" in name:
            tensor.mul_(0.2)  # boxes stay near their anchors
        if "classification_head.cls_logits" in name:  # label 0 of torchvision's RetinaNet is a class without objects
            tensor.unflatten(0, (-1, CLASSES + 1))[:, 0] = -100.0 if tensor.dim() == 1 else 0.0


def trained(model: Any) -> Any:
    """Put a model into training mode, with frozen batch norms."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def our_model(name: str, weights: nn.Module, folder: Path, *, loss: str | None = None, **settings: Any) -> Any:
    """Build our detector with torchvision's settings, and give it the weights of torchvision's model through a file."""
    file = folder / "state.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in weights.state_dict().items()}, file)
    own: dict[str, Any] = {"channels": CHANNELS, "score_threshold": THRESHOLD, "detections": DETECTIONS}
    if name == "retinanet":
        own |= {"extra_levels": "p5_relu", "scales": 3}
        loss = loss or "focal"
    else:
        own |= {"hidden": HIDDEN, "proposals": PROPOSALS, "test_proposals": PROPOSALS, "roi_align": "torchvision"}
        loss = loss or "ce"
    if loss == "ce":
        own |= {"box_loss": "smooth_l1", "smooth_l1_beta": BETA}
    model = build(
        name,
        num_classes=CLASSES,
        backbone="resnet18",
        loss=loss,
        batch_norm="frozen",
        size_divisor=SIDE,
        **(SHARED | own | settings),
    )
    assert load_initial_weights(model, f"torchvision:{file}") == []
    return model.eval()


def scene(*counts: int, seed: int = 0) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return images of noise, 128 x 256 pixels, and targets with as many objects as ``counts`` says, far apart."""
    generator = torch.Generator().manual_seed(seed)
    images, targets = [], []
    for count in counts:
        images.append(torch.rand(3, SIDE, 2 * SIDE, generator=generator))
        corner = torch.tensor([[64.0 * number + 4, 10.0 * number + 20] for number in range(count)]).reshape(-1, 2)
        boxes = torch.cat([corner, corner + 24 + 24 * torch.rand(count, 2, generator=generator)], 1)
        masks = torch.zeros(count, SIDE, 2 * SIDE, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y1:y2, x1 : (x1 + x2) // 2] = 1
        labels = torch.randint(1, CLASSES + 1, (count,), generator=generator)
        targets.append({"boxes": boxes, "labels": labels, "masks": masks})
    return images, targets
