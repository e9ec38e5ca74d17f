"""torchvision detectors behind our detector interface.

Backbone layers and batch norms are frozen here, because torchvision freezes them only if it loads the weights itself.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torchvision
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.ssd import SSD
from torchvision.ops import FrozenBatchNorm2d

from bucketrank.detectors.base import LibraryDetector, LibraryTransform, Target, ranking_arguments
from bucketrank.evaluation.calibration.mapping import ScoreHead
from bucketrank.integrations.torchvision import use_ranking_loss
from bucketrank.integrations.torchvision.scores import score_head
from bucketrank.settings import DetectorSettings, LibraryInputSettings, LossSettings
from bucketrank.settings.detector_specs import require_few_pixels
from bucketrank.settings.library_specs import TorchvisionSettings
from bucketrank.weights.sources import load_torchvision_weights

# torchvision trained the COCO weights of these older models without an epsilon.
MODELS_WITHOUT_EPSILON = ("fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn")
DEFAULT_EPSILON = 1e-5  # the default of FrozenBatchNorm2d


def backbone_layers(model: nn.Module) -> list[list[nn.Module]]:
    """Split the backbone into the layers that torchvision's ``trainable_backbone_layers`` counts."""
    backbone: Any = model.backbone
    if isinstance(model, FasterRCNN | RetinaNet | FCOS):
        body = backbone.body
        if hasattr(body, "layer1"):
            return [[body.conv1, body.bn1], [body.layer1], [body.layer2], [body.layer3], [body.layer4]]
        blocks = list(body.children())
        return _split(blocks, _mobilenet_starts(blocks))
    if hasattr(backbone, "scale_weight"):  # VGG: its last blocks are the first extra layer
        blocks = [*backbone.features, *list(backbone.extra[0].children())[:-1]]
        return _split(blocks, [number for number, block in enumerate(blocks) if isinstance(block, nn.MaxPool2d)])
    blocks = [*backbone.features[0], *backbone.features[1]]  # MobileNet: the block that starts C4 is split
    return _split(blocks, sorted({*_mobilenet_starts(blocks), len(backbone.features[0]) - 1}))


def freeze_layers(model: nn.Module, *, trained: int) -> None:
    """Freeze all backbone layers but the last ``trained``."""
    layers = backbone_layers(model)
    for layer in layers[: len(layers) - trained]:
        for module in layer:
            module.requires_grad_(requires_grad=False)


def freeze_batch_norms(module: nn.Module, *, epsilon: float) -> None:
    """Replace every batch norm inside ``module`` by a frozen one with the same statistics."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            frozen = FrozenBatchNorm2d(child.num_features, eps=epsilon)
            frozen.load_state_dict(child.state_dict())
            setattr(module, name, frozen)
        else:
            freeze_batch_norms(child, epsilon=epsilon)


def _mobilenet_starts(blocks: list[nn.Module]) -> list[int]:
    """Find the strided blocks, which torchvision marks by ``_is_cn``, and the last block."""
    return [*(number for number, block in enumerate(blocks) if getattr(block, "_is_cn", False)), len(blocks) - 1]


def _split(blocks: list[nn.Module], starts: list[int]) -> list[list[nn.Module]]:
    edges = [0, *starts, len(blocks)]
    return [blocks[first:last] for first, last in pairwise(edges)]


MODEL_KEYS = ("boxes", "labels", "masks")  # target keys that torchvision reads
SIGMOID_MODELS = ("retinanet", "fcos")  # name prefixes of models without a background class


class TorchvisionDetector(LibraryDetector):
    """A torchvision detector for ``num_classes`` classes, with its own loss or a ranking loss.

    torchvision builds the model. The class layers are new; weights fill all other layers. torchvision counts labels
    from 1, so its sigmoid models have an unused class 0, which could be detected. Here their classes count from 0,
    without that class.
    """

    backbone_prefix = "model.backbone.body."

    def __init__(
        self,
        num_classes: int,
        *,
        settings: TorchvisionSettings,
        loss: LossSettings,
        inputs: LibraryInputSettings,
    ) -> None:
        super().__init__(num_classes)
        ranking = ranking_arguments(loss)
        background = not settings.model.startswith(SIGMOID_MODELS)
        self.first_label = int(background)  # first object label inside the model
        self.model = _build(num_classes + int(background), settings, inputs)
        self.masks = isinstance(self.model, MaskRCNN)
        if isinstance(self.model, SSD):
            self.backbone_prefix = "model.backbone.features."
        self.transform = self.model.transform = _input_transform(self.model.transform, inputs)
        if ranking is not None:
            use_ranking_loss(self.model, **ranking)
        _limit_detections(self.model, settings)

    @classmethod
    def predicts_masks(cls, settings: DetectorSettings) -> bool:
        return "maskrcnn" in settings.name

    def complete_settings(self, settings: Any) -> Any:
        # Calibration maps the minimum score, too, so the file must store it.
        return replace(settings, score_threshold=float(_thresholded(self.model).score_thresh))

    def score_head(self) -> ScoreHead:
        return replace(score_head(self.model), first_label=1 - self.first_label)

    def model_losses(self, images: list[Tensor], targets: list[Target]) -> dict[str, Tensor]:
        shift = self.first_label - 1
        objects = [
            {key: target[key] + shift if key == "labels" else target[key] for key in MODEL_KEYS if key in target}
            for target in targets
        ]
        losses: dict[str, Tensor] = self.model(images, objects)
        return losses

    def model_detections(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        shift = 1 - self.first_label
        return [result | {"labels": result["labels"] + shift} for result in self.model(images)]


def _build(outputs: int, settings: TorchvisionSettings, inputs: LibraryInputSettings) -> Any:
    """Build a torchvision model with this number of class scores, load its weights and freeze layers."""
    name = settings.model
    arguments = {
        "image_mean": inputs.image_mean and list(inputs.image_mean),
        "image_std": inputs.image_std and list(inputs.image_std),
        "rpn_post_nms_top_n_train": settings.proposals,
    }
    given = {key: value for key, value in arguments.items() if value is not None}
    model: Any = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=outputs, **given)
    resolved = settings.without_weights()
    if resolved.batch_norm == "frozen":
        epsilon = 0.0 if name in MODELS_WITHOUT_EPSILON else DEFAULT_EPSILON
        freeze_batch_norms(model, epsilon=epsilon)
    if settings.weights is not None:
        load_torchvision_weights(model, name, settings.weights)
    if resolved.trainable_layers is not None:
        freeze_layers(model, trained=resolved.trainable_layers)
    return model


def _input_transform(usual: Any, inputs: LibraryInputSettings) -> LibraryTransform:
    """Build a model's transform with the sizes in ``inputs``; resized sides have at least one pixel."""
    sizes = inputs.sizes or usual.min_size
    if usual.fixed_size is not None:
        width, height = usual.fixed_size
        for name, value in {"min_size": inputs.min_size, "max_size": inputs.max_size}.items():
            if value is not None:
                raise ValueError(f"inputs.{name}: expected null for inputs of {height} x {width} pixels, got {value}")
    max_size = inputs.max_size or max(usual.max_size, *sizes)
    require_few_pixels(max(sizes), max_size)
    return LibraryTransform(
        min_size=sizes,
        max_size=max_size,
        image_mean=usual.image_mean,
        image_std=usual.image_std,
        size_divisible=inputs.size_divisor or usual.size_divisible,
        fixed_size=usual.fixed_size,
    )


def _thresholded(model: nn.Module) -> Any:
    """Return the module with the detection thresholds."""
    return model.roi_heads if isinstance(model, FasterRCNN) else model


def _limit_detections(model: nn.Module, settings: TorchvisionSettings) -> None:
    part = _thresholded(model)
    limits = {
        "score_thresh": settings.score_threshold,
        "nms_thresh": settings.nms,
        "detections_per_img": settings.detections,
    }
    for name, value in limits.items():
        if value is not None:
            setattr(part, name, value)
