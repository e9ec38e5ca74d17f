"""The detector base classes with torchvision's interface, input checks and transforms, and :func:`build`.

:class:`Detector` is the base of our own detectors, :class:`LibraryDetector` that of wrapped torchvision and
transformers models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.transform import GeneralizedRCNNTransform, resize_boxes

from bucketrank.detectors.backbone import build_backbone
from bucketrank.detectors.criterion import Criterion
from bucketrank.errors import require_choice, suggest
from bucketrank.evaluation.calibration.mapping import ScoreHead
from bucketrank.settings import (
    BackboneSettings,
    DetectorSettings,
    InputSettings,
    LibraryInputSettings,
    LossSettings,
    RankingSettings,
    Settings,
    describe,
    detector_settings,
    detector_spec,
    loss_names,
    loss_settings,
)
from bucketrank.settings.loss_specs import APSettings, RememberingSettings

Target = dict[str, Tensor]


def check_images(images: Sequence[Tensor]) -> None:
    """Raise unless every image is a float tensor (3, height, width)."""
    for number, image in enumerate(images):
        if not isinstance(image, Tensor) or image.dim() != 3 or image.shape[0] != 3:
            got = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(f"image {number}: expected a tensor of shape (3, height, width), got {got}")
        if not image.is_floating_point():
            raise TypeError(
                f"image {number}: expected floats from 0 to 1, got {image.dtype}; convert with "
                "torchvision.transforms.v2.functional.to_dtype(image, torch.float32, scale=True)"
            )


def check_targets(images: Sequence[Tensor], targets: Sequence[Target] | None, num_classes: int, *, masks: bool) -> None:
    """Raise unless every image has valid targets, naming the image and the box; an image may have no objects."""
    if targets is None:
        raise ValueError("targets: expected a list in training mode, got None; call model.eval() to detect")
    if len(targets) != len(images):
        raise ValueError(f"targets: expected one for each of {len(images)} images, got {len(targets)}")
    checks = []
    for number, (image, target) in enumerate(zip(images, targets, strict=True)):
        _check_shapes(number, image, target, masks=masks)
        checks += [(number, *check) for check in _value_checks(image, target, num_classes)]
    # Read all values at once, because each read is a device sync.
    if checks and torch.stack([invalid.any() for _, _, invalid, _ in checks]).any():
        number, values, invalid, expected = next(check for check in checks if check[2].any())
        box = int(torch.where(invalid)[0][0])
        value = values[box].tolist()
        value = [round(side, 3) for side in value] if isinstance(value, list) else value
        raise ValueError(f"{_name(number, targets[number])}: expected {expected}, got {value} for box {box}")


def _name(number: int, target: Target) -> str:
    """Name a target in an error message. Reading an image_id from the device is a sync, so only messages have it."""
    image_id: object = target.get("image_id")
    if isinstance(image_id, Tensor) and image_id.numel() == 1:
        image_id = image_id.item()
    return f"target of image {number}" + (f" (image_id {image_id})" if "image_id" in target else "")


def _check_shapes(number: int, image: Tensor, target: Target, *, masks: bool) -> None:
    for key in ("boxes", "labels", "masks")[: 3 if masks else 2]:
        if not isinstance(target.get(key), Tensor):
            got = type(target.get(key)).__name__
            raise TypeError(f"{_name(number, target)}: expected a tensor under {key!r}, got {got}")
    boxes, labels = target["boxes"], target["labels"]
    if not boxes.is_floating_point() or boxes.dim() != 2 or boxes.shape[1] != 4:
        raise ValueError(
            f"{_name(number, target)}: expected boxes as floats of shape (objects, 4), got {boxes.dtype} of shape "
            f"{tuple(boxes.shape)}"
        )
    if (
        labels.is_floating_point()
        or labels.is_complex()
        or labels.dtype == torch.bool
        or labels.shape != boxes.shape[:1]
    ):
        raise ValueError(
            f"{_name(number, target)}: expected labels as integers of shape ({len(boxes)},), one for each box, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    expected = (len(boxes), *image.shape[-2:])
    if masks and target["masks"].shape != expected:
        raise ValueError(
            f"{_name(number, target)}: expected masks of shape {expected}, one for each box, as large as the image, "
            f"got {tuple(target['masks'].shape)}"
        )


def _value_checks(image: Tensor, target: Target, num_classes: int) -> list[tuple[Tensor, Tensor, str]]:
    """List the values (n, ...), which of them are invalid (n,), and what was expected."""
    boxes, labels = target["boxes"], target["labels"]
    if not len(boxes):
        return []
    height, width = image.shape[-2:]
    x1, y1, x2, y2 = boxes.unbind(1)
    outside = (x2 <= 0) | (y2 <= 0) | (x1 >= width) | (y1 >= height)
    return [
        (boxes, ~boxes.isfinite().all(1), "finite boxes"),
        (boxes, (x2 <= x1) | (y2 <= y1), "boxes (x1, y1, x2, y2) with x1 < x2 and y1 < y2"),
        (boxes, outside, f"boxes that overlap the image of {width} x {height} pixels"),
        (labels, (labels < 1) | (labels > num_classes), f"labels from 1 to {num_classes}"),
    ]


class InputTransform(GeneralizedRCNNTransform):
    """Normalise, resize and pad images like torchvision's transform, but round the resized sides to the nearest pixel.

    Both sides are scaled by the same factor. As published, 480 x 640 pixels at a ``min_size`` of 800 become 800 x 1067;
    torchvision rounds down to 1066. A side has at least one pixel: 3000 x 2 at a ``max_size`` of 1333 become 1333 x 1.
    With ``published_masks``, masks are pasted into the image by :func:`paste_masks`, otherwise by torchvision.
    """

    published_masks = True

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        if self.fixed_size is not None:
            resized: tuple[Tensor, dict[str, Tensor] | None] = super().resize(image, target)
            return resized
        height, width = (int(side) for side in image.shape[-2:])
        shorter = self.torch_choice(self.min_size) if self.training else self.min_size[-1]
        scale = min(shorter / min(height, width), self.max_size / max(height, width))
        size = [max(1, int(side * scale + 0.5)) for side in (height, width)]
        image = F.interpolate(image[None], size=size, mode="bilinear", align_corners=False)[0]
        if target is None:
            return image, None
        changed = {"boxes": resize_boxes(target["boxes"], [height, width], size)}
        if "masks" in target:
            changed["masks"] = F.interpolate(target["masks"][:, None].float(), size=size)[:, 0].byte()
        return image, target | changed

    def postprocess(
        self,
        result: list[dict[str, Tensor]],
        image_shapes: Sequence[tuple[int, int]],
        original_image_sizes: Sequence[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        if not self.published_masks or self.training:
            detections: list[dict[str, Tensor]] = super().postprocess(result, image_shapes, original_image_sizes)
            return detections
        restored = []
        for each, resized, original in zip(result, image_shapes, original_image_sizes, strict=True):
            boxes = resize_boxes(each["boxes"], resized, original)
            masks = {"masks": paste_masks(each["masks"], boxes, original)} if "masks" in each else {}
            restored.append(each | {"boxes": boxes} | masks)
        return restored


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Paste masks (N, 1, M, M), resized to their boxes (N, 4), into images of ``size``: (N, 1, H, W).

    Bilinear interpolation at pixel centres, as published; outside its box a mask is 0. An axis-aligned bilinear map is
    a product of two matrices, ``rows @ mask @ columns``.

    >>> mask = torch.ones(1, 1, 2, 2)
    >>> paste_masks(mask, torch.tensor([[1.0, 0, 3, 1]]), (1, 4))[0, 0]
    tensor([[0., 1., 1., 0.]])
    """
    height, width = size
    with torch.autocast(masks.device.type, enabled=False):
        masks, boxes = masks[:, 0].float(), boxes.float()
        rows = _interpolation(boxes[:, 1], boxes[:, 3], pixels=height, cells=masks.shape[1])
        columns = _interpolation(boxes[:, 0], boxes[:, 2], pixels=width, cells=masks.shape[2])
        pasted: Tensor = rows @ masks @ columns.transpose(1, 2)
    return pasted[:, None]


def _interpolation(start: Tensor, end: Tensor, *, pixels: int, cells: int) -> Tensor:
    """Compute interpolation weights (N, pixels, cells) at pixel centres, for a mask from ``start`` to ``end``."""
    centres = torch.arange(pixels, device=start.device, dtype=start.dtype) + 0.5
    positions = (centres - start[:, None]) / (end - start).clamp(min=1e-6)[:, None] * cells - 0.5
    numbers = torch.arange(cells, device=start.device, dtype=start.dtype)
    return (1 - (positions[..., None] - numbers).abs()).clamp(min=0)


AnySettings = TypeVar("AnySettings", bound=DetectorSettings)


class Detector(nn.Module):
    """Base class of detectors: returns losses in training mode and detections in evaluation mode.

    ``images`` is a list of tensors (3, H, W) with values from 0 to 1; their sizes may differ. ``targets``, required in
    training, is a list of dicts with ``boxes`` (x1, y1, x2, y2 in pixels), ``labels`` from 1, and ``masks`` if the
    detector predicts masks. The detections of an image are a dict with ``boxes``, ``labels``, ``scores`` and, if
    predicted, ``masks``, sorted by descending score. ``num_classes`` does not count the background.

    A subclass adds its neck and heads, :meth:`losses` and :meth:`detect`. A wrapped model has neither ``backbone`` nor
    ``inputs``; it sets its own ``transform`` and overrides :meth:`forward`.
    """

    masks = False  # whether targets must have masks
    stored_threshold: float = 0.0  # minimum score to report; load_model sets the value stored with the weights
    stored_classes: Sequence[str] = ()  # class names; load_model sets those stored with the weights
    usual_size_divisor = 32
    backbone_prefix = "backbone."  # prefix of backbone parameter names
    neck: nn.Module

    def __init__(
        self, num_classes: int, *, backbone: BackboneSettings | None = None, inputs: InputSettings | None = None
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"num_classes: expected at least 1 object class, got {num_classes}")
        self.num_classes = num_classes
        if backbone is None or inputs is None:
            return
        self.backbone = build_backbone(backbone)
        self.size_divisor = self.usual_size_divisor if inputs.size_divisor is None else inputs.size_divisor
        self.transform = InputTransform(
            min_size=inputs.sizes,
            max_size=inputs.max_size,
            image_mean=list(inputs.image_mean or self.backbone.mean),
            image_std=list(inputs.image_std or self.backbone.std),
            size_divisible=self.size_divisor,
        )

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Target] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        check_images(images)
        if self.training:
            check_targets(images, targets, self.num_classes, masks=self.masks)
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        batch, resized = self.transform(list(images), list(targets) if self.training and targets is not None else None)
        features = self.neck(self.backbone(batch.tensors))
        if self.training:
            # Labels start at 1 in the interface, and at 0 in heads and criteria.
            return self.losses(batch, features, [target | {"labels": target["labels"] - 1} for target in resized])
        results = [result | {"labels": result["labels"] + 1} for result in self.detect(batch, features)]
        detections: list[dict[str, Tensor]] = self.transform.postprocess(results, batch.image_sizes, sizes)
        return detections

    @classmethod
    def predicts_masks(cls, settings: DetectorSettings) -> bool:
        """Return whether a detector built from these settings predicts masks."""
        return cls.masks

    def complete_settings(self, settings: AnySettings) -> AnySettings:
        """Fill in settings that were read when the detector was built, such as a configuration on the hub."""
        return settings

    def detecting_criterion(self) -> tuple[Criterion, int] | None:
        """Return the criterion of the head that detects, and the index of that head's input among the inputs of a step.

        Heads are built in the order in which they run, so the last criterion belongs to the detecting head. None if the
        model computes its own loss.
        """
        criteria = [module for module in self.modules() if isinstance(module, Criterion)]
        return (criteria[-1], -1) if criteria else None

    def score_head(self) -> ScoreHead:
        """Describe for calibration which layers produce the detection scores, and how logits become scores.

        Scores of a subclass that does not override this cannot be calibrated.
        """
        reason = f"{type(self).__name__} does not say which layers its scores come from; override score_head()"
        return ScoreHead("other", reason=reason)

    def losses(self, images: ImageList, features: list[Tensor], ground_truths: list[Target]) -> dict[str, Tensor]:
        """Compute the loss terms by name; labels count from 0."""
        raise NotImplementedError

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        """Detect objects per image, in pixels of the resized images; labels count from 0."""
        raise NotImplementedError


def build(
    name: str | DetectorSettings,
    *,
    num_classes: int,
    backbone: str | BackboneSettings | None = None,
    loss: str | LossSettings = "rs",
    inputs: InputSettings | LibraryInputSettings | None = None,
    **settings: Any,
) -> Detector:
    """Build a detector for ``num_classes`` object classes, without the background, to be trained with ``loss``.

    ``name``, ``backbone`` and ``loss`` are registered names, or settings. ``name`` may also be a torchvision or
    transformers model, like ``"torchvision/retinanet_resnet50_fpn_v2"``, which brings its own backbone. Our own
    detectors use resnet50 unless ``backbone`` says otherwise. ``inputs`` are the input size and normalisation. Further
    keywords, ``settings``, are settings of the detector, the loss, the backbone or the inputs; these names never clash.

    >>> size = {"min_size": 320, "max_size": 512}
    >>> model = build("atss", num_classes=3, backbone="resnet18", delta=0.25, **size)
    >>> model.criterion.delta
    0.25
    """
    detector = detector_settings(name) if isinstance(name, str) else name
    loss = loss_settings(loss) if isinstance(loss, str) else loss
    spec = detector_spec(detector.name)
    groups: dict[str, Settings] = {"settings": detector, "loss": loss, "inputs": inputs or spec.inputs()}
    if not isinstance(groups["inputs"], spec.inputs):
        expected = f"{spec.inputs.__name__} for {detector.name}"
        raise TypeError(f"build: expected inputs as {expected}, got {type(inputs).__name__}")
    if spec.backbone:
        named = BackboneSettings(name=backbone) if isinstance(backbone, str) else backbone
        groups["backbone"] = named or BackboneSettings()
    elif backbone is not None:
        raise TypeError(f"build: {detector.name} brings its own backbone, got backbone {backbone!r}; leave it out")
    known = {group: {each.name for each in describe(type(value))} - {"name"} for group, value in groups.items()}
    for keyword in settings:
        if not any(keyword in names for names in known.values()):
            hint = suggest(keyword, sorted(set().union(*known.values())))
            raise TypeError(f"build: {detector.name} with loss {loss.name} has no setting {keyword!r}{hint}")
    for group, value in groups.items():
        changes = {keyword: settings[keyword] for keyword in settings if keyword in known[group]}
        groups[group] = replace(value, **changes)
    require_choice(f"loss.name for {detector.name}", loss.name, loss_names(detector.name))
    model: Detector = spec.load()(num_classes, **groups)
    return model


class LibraryTransform(InputTransform):
    """torchvision's transform, which rounds resized sides down, but with at least one pixel per side."""

    published_masks = False

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        is_thin = int(min(image.shape[-2:]) * self.max_size / max(image.shape[-2:])) < 1
        resize = InputTransform.resize if is_thin else GeneralizedRCNNTransform.resize
        resized: tuple[Tensor, dict[str, Tensor] | None] = resize(self, image, target)
        return resized


class LibraryDetector(Detector):
    """A wrapped torchvision or transformers model, ``model``, with the interface and checks of our detectors.

    A subclass sets ``model`` and ``transform`` and adds :meth:`model_losses` and :meth:`model_detections`.
    """

    model: nn.Module

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Target] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        check_images(images)
        if not self.training:
            return self.model_detections(list(images))
        check_targets(images, targets, self.num_classes, masks=self.masks)
        return self.model_losses(list(images), list(targets or ()))

    def model_losses(self, images: list[Tensor], targets: list[Target]) -> dict[str, Tensor]:
        """Compute the loss terms by name; labels count from 1."""
        raise NotImplementedError

    def model_detections(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        """Detect objects per image, in its own pixels; labels count from 1."""
        raise NotImplementedError


def ranking_arguments(loss: LossSettings) -> dict[str, Any] | None:
    """Convert loss settings to ``use_ranking_loss`` arguments; None for the model's own loss.

    Raise ValueError for settings that wrapped models do not support.
    """
    loss.require("ranking_scope", "batch for a model of another library", holds=loss.ranking_scope == "batch")
    for name in ("box_balance", "box_confidence"):
        loss.require(name, "null for a model of another library", holds=getattr(loss, name) is None)
    loss.require("smooth_l1_beta", "1 for a model of another library", holds=loss.smooth_l1_beta == 1)
    if not isinstance(loss, RankingSettings):
        for name in ("box_loss", "box_weight"):
            loss.require(name, "null with the model's own loss", holds=getattr(loss, name) is None)
        return None
    loss.require("box_loss", "giou or null for a model of another library", holds=loss.box_loss in (None, "giou"))
    if isinstance(loss, RememberingSettings):
        loss.require("memory", "0 for a model of another library", holds=not loss.memory)
    if isinstance(loss, APSettings):
        loss.require("interpolate", "false for a model of another library", holds=not loss.interpolate)
    return {"loss": loss.name, "method": loss.method, "delta": loss.delta, "box_weight": loss.box_weight}
