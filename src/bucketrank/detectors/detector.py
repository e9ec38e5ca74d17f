"""The base of every detector, with the interface of torchvision's detectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from bucketrank.calibration.score_head import ScoreHead
from bucketrank.catalogue import BackboneSettings, DetectorSettings, InputSettings
from bucketrank.detectors.backbone_builder import build_backbone
from bucketrank.detectors.criterion import Criterion
from bucketrank.detectors.input_resizing import InputTransform
from bucketrank.detectors.targets import Target, check_images, check_targets

AnySettings = TypeVar("AnySettings", bound=DetectorSettings)


class Detector(nn.Module):
    """A detector: it returns losses in training mode and detections in evaluation mode.

    ``images`` is a list of tensors (3, H, W) with values from 0 to 1; their sizes may differ. ``targets``, required in
    training, is a list of dicts with ``boxes`` (x1, y1, x2, y2 in pixels), ``labels`` from 1, and ``masks`` if the
    detector predicts masks. The detections of an image are a dict with ``boxes``, ``labels``, ``scores`` and maybe
    ``masks``, the highest score first. ``num_classes`` counts classes of objects, without the background.

    A subclass adds its neck and heads, :meth:`losses` and :meth:`detect`. A model of another library has neither
    ``backbone`` nor ``inputs``; it sets its own ``transform`` and overrides :meth:`forward`.

    Args:
        num_classes: number of classes of objects, without the background.
        backbone: settings of the backbone.
        inputs: settings of the images.
    """

    masks = False  # whether targets must have masks
    stored_threshold: float = 0.0  # minimum score to report; load_model sets the one stored with the weights
    usual_size_divisor = 32
    backbone_prefix = "backbone."  # of the names of the backbone's parameters
    neck: nn.Module

    def __init__(
        self, num_classes: int, *, backbone: BackboneSettings | None = None, inputs: InputSettings | None = None
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"num_classes: expected at least 1 class of objects, got {num_classes}")
        self.num_classes = num_classes
        if backbone is None or inputs is None:
            return
        self.backbone = build_backbone(backbone)
        self.size_divisor = self.usual_size_divisor if inputs.size_divisor is None else inputs.size_divisor
        sizes = (inputs.min_size,) if isinstance(inputs.min_size, int) else tuple(inputs.min_size)
        self.transform = InputTransform(
            min_size=sizes,
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
        """Return whether a detector of this class with these settings has masks."""
        return cls.masks

    def complete_settings(self, settings: AnySettings) -> AnySettings:
        """Return the settings with everything filled in that was read from elsewhere when the detector was built."""
        return settings

    def detecting_criterion(self) -> tuple[Criterion, int] | None:
        """Return the criterion of the head whose scores become detections, and which of its inputs per step that is.

        Heads are built in the order in which they run, so the last criterion belongs to the detecting head. None if the
        model computes its loss without a criterion of this package.
        """
        criteria = [module for module in self.modules() if isinstance(module, Criterion)]
        return (criteria[-1], -1) if criteria else None

    def score_head(self) -> ScoreHead:
        """Return the layers behind the scores of detections and how logits become scores, for calibration.

        A subclass overrides it; without that its scores cannot be calibrated.
        """
        reason = f"{type(self).__name__} does not say which layers its scores come from; override score_head()"
        return ScoreHead("other", reason=reason)

    def losses(self, images: ImageList, features: list[Tensor], ground_truths: list[Target]) -> dict[str, Tensor]:
        """Return the loss terms by name; labels count from 0."""
        raise NotImplementedError

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        """Return the detections of each image, in pixels of the resized images; labels count from 0."""
        raise NotImplementedError
