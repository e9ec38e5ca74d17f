"""The contract of torchvision's detectors, which every detector here keeps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from bucketrank.catalogue import BackboneSettings, InputSettings
from bucketrank.detectors.backbone import build_backbone
from bucketrank.detectors.criterion import Criterion
from bucketrank.detectors.targets import Target, check_images, check_targets


class Detector(nn.Module):
    """From images to losses in training, to detections in evaluation.

    ``images`` is a list of tensors (3, H, W) from 0 to 1 of any sizes; ``targets``, needed in training, a dict for each
    with ``boxes`` (x1, y1, x2, y2 in pixels) and ``labels`` from 1 (and ``masks``). A detection holds ``boxes``,
    ``labels`` and ``scores``, best first (and ``masks``). ``num_classes`` counts objects only.

    A detector adds its neck and heads, :meth:`losses` and :meth:`detect`.
    """

    masks = False  # whether targets have masks
    stored_threshold: float = 0.0  # minimum score to report; load_model sets the one stored with the weights
    usual_size_divisor = 32
    neck: nn.Module

    def __init__(self, num_classes: int, *, backbone: BackboneSettings, inputs: InputSettings) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(
                f"expected num_classes, the number of kinds of objects, to be at least 1, got {num_classes}"
            )
        self.num_classes = num_classes
        self.backbone = build_backbone(backbone)
        self.size_divisor = self.usual_size_divisor if inputs.size_divisor is None else inputs.size_divisor
        sizes = (inputs.min_size,) if isinstance(inputs.min_size, int) else tuple(inputs.min_size)
        self.transform = GeneralizedRCNNTransform(
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
            # Inside the house classes count from 0.
            return self.losses(batch, features, [target | {"labels": target["labels"] - 1} for target in resized])
        found = [result | {"labels": result["labels"] + 1} for result in self.detect(batch, features)]
        detections: list[dict[str, Tensor]] = self.transform.postprocess(found, batch.image_sizes, sizes)
        return detections

    def detecting_criterion(self) -> tuple[Criterion, int]:
        """Return the criterion of the head whose scores become detections, and which of its calls per step that is.

        Heads are built in the order in which they run: the last criterion is that of the detecting head.
        """
        criteria = [module for module in self.modules() if isinstance(module, Criterion)]
        return criteria[-1], -1

    def losses(self, images: ImageList, features: list[Tensor], truths: list[Target]) -> dict[str, Tensor]:
        """The terms by name; classes count from 0."""
        raise NotImplementedError

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        """The detections of each image, in the pixels of the resized images; classes count from 0."""
        raise NotImplementedError
