"""The Co-DETR model, the base class that it shares with Co-DINO, the neck and the Hungarian matching of queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_convert, clip_boxes_to_image

from bucketrank.detectors.assignment import assign_hungarian
from bucketrank.detectors.assignment.hungarian import CostWeights, ImageQueries
from bucketrank.detectors.backbone import Backbone
from bucketrank.detectors.base import Detector, Target
from bucketrank.detectors.co_detr.auxiliary import AUXILIARY, AuxiliaryQueries
from bucketrank.detectors.co_detr.decoder import Decoded, Decoder, Proposer, SelectedQueries
from bucketrank.detectors.co_detr.transformer import Encoder, Geometry, TransformerSettings
from bucketrank.detectors.criterion import Assigned, Criterion, HeadRecipe, LossTerms, build_criterion, named
from bucketrank.detectors.dense import top_scores
from bucketrank.errors import require_choice
from bucketrank.evaluation.calibration.mapping import ScoreHead
from bucketrank.settings import BackboneSettings, InputSettings, LossSettings
from bucketrank.settings.choices import MIN_LABEL
from bucketrank.settings.detector_specs import CoDETRSettings, CollaborativeSettings


class LevelProjection(nn.Module):
    """The neck: 1x1 projections of the last backbone maps, and a map at stride 64 by a strided 3x3 convolution on C5.

    Four ``levels`` start at C3 and have strides 8 to 64, five start at C2.
    """

    def __init__(self, channels: list[int], width: int, *, levels: int = 4) -> None:
        super().__init__()
        self.skipped = len(channels) + 1 - levels
        self.strides = tuple(4 * 2 ** (self.skipped + level) for level in range(levels))
        used = channels[self.skipped :]
        self.levels = nn.ModuleList(normalised(count, width, kernel=1) for count in used)
        self.top = normalised(used[-1], width, kernel=3)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Compute the maps of all levels from those of the backbone, at strides 4 to 32."""
        used = maps[self.skipped :]
        return [*(level(feature) for level, feature in zip(self.levels, used, strict=True)), self.top(used[-1])]


def normalised(channels: int, width: int, *, kernel: int, bias: bool = False) -> nn.Sequential:
    """Build a convolution with group norm and no activation; its stride is 2 unless it is 1x1."""
    stride, padding = (1, 0) if kernel == 1 else (2, 1)
    convolution = nn.Conv2d(channels, width, kernel, stride=stride, padding=padding, bias=bias)
    nn.init.xavier_uniform_(convolution.weight)
    if convolution.bias is not None:
        nn.init.zeros_(convolution.bias)
    # Use at least two channels per group, because the map of a small image may have a single cell.
    return nn.Sequential(convolution, nn.GroupNorm(min(32, width // 2), width))


L1_COST, GIOU_COST = 5.0, 2.0


@dataclass(frozen=True)
class QueryLayer:
    """The queries of a layer, the objects of each image, and the mask (B, Q) of valid queries; None means all."""

    decoded: Decoded
    ground_truths: list[Target]
    valid: Tensor | None = None


def image_scales(image_sizes: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Convert sizes (height, width) to a tensor (B, 4) of width, height, width and height."""
    sizes = [(width, height) * 2 for height, width in image_sizes]
    return torch.tensor(sizes, dtype=torch.float32).to(device, non_blocking=True)


def in_pixels(boxes: Tensor, scales: Tensor) -> Tensor:
    """Convert relative (cx, cy, w, h) to (x1, y1, x2, y2) in pixels, given :func:`image_scales`."""
    corners: Tensor = box_convert(boxes.float(), "cxcywh", "xyxy") * scales
    return corners


# The published weights: classification 2, L1 5 = 2 * 2.5 and GIoU 2. RS loss balances the box losses instead.
RECIPE = HeadRecipe(
    ranking_weight=2.0, scored_weight=2.0, l1_weight=2.5, prior=0.01, confident=False, average_counts=True
)
RANKING_CLASS_COST, SCORED_CLASS_COST = 4.0, 2.0


class CollaborativeDETR(Detector):
    """Base class of Co-DETR and Co-DINO: two-stage deformable DETRs with auxiliary heads.

    The auxiliary heads train on the encoder's maps. Their positives become additional queries of the same decoder,
    many per object. Only the decoder detects.
    """

    usual_size_divisor = 1
    dino = False  # whether transformer and queries are Co-DINO's

    def __init__(
        self,
        num_classes: int,
        *,
        backbone: BackboneSettings,
        loss: LossSettings,
        inputs: InputSettings,
        settings: CollaborativeSettings,
        recipe: HeadRecipe = RECIPE,
        auxiliary_loss: LossSettings,
        proposal_logits: int,
        denoising: bool = False,  # whether noisy copies of the objects are queries too
        marks: int = 0,  # numbers that mark the queries of an auxiliary head
        min_label: float = MIN_LABEL,  # target of a matched query that does not overlap its object
    ) -> None:
        for name in settings.auxiliary:
            require_choice("detector.auxiliary", name, AUXILIARY)
        if len(set(settings.auxiliary)) < len(settings.auxiliary):
            raise ValueError(f"detector.auxiliary: expected each head at most once, got {settings.auxiliary!r}")
        channels, dino = settings.channels, self.dino
        transformer = TransformerSettings(
            width=channels,
            heads=settings.heads,
            points=settings.points,
            levels=settings.levels,
            feedforward=settings.feedforward,
            encoder_layers=settings.encoder_layers,
            decoder_layers=settings.decoder_layers,
            dropout=settings.dropout,
            checkpointing=settings.transformer_checkpointing,
            dino=dino,
        )
        super().__init__(num_classes, backbone=backbone, inputs=inputs)
        self.neck = LevelProjection(self.backbone.channels, channels, levels=settings.levels)
        if self.neck.skipped:
            self.backbone.freeze_only_finest()
        if self.backbone.freeze_batch_norm and (backbone.weights is not None or dino):
            freeze_affine(self.backbone)
        # The proposals, and the decoder layers with the selected, the noisy and each auxiliary head's queries.
        rankings = 1 + settings.decoder_layers * (1 + denoising + len(settings.auxiliary))
        self.criterion = build_criterion(loss, replace(recipe, inputs=rankings))
        published = RANKING_CLASS_COST if self.criterion.ranking else SCORED_CLASS_COST
        class_cost = published if settings.class_cost is None else settings.class_cost
        self.cost_weights = CostWeights(class_cost, L1_COST, GIOU_COST, *self.criterion.matching_focal)
        self.min_label = min_label
        self.detections = settings.detections
        score = self.criterion.initial_score
        self.encoder = Encoder(transformer)
        self.proposer = Proposer(channels, score=score, logits=proposal_logits, dino=dino)
        self.selected = SelectedQueries(channels, settings.queries, dino=dino)
        self.decoder = Decoder(transformer, num_classes=num_classes, score=score)
        shared: dict[str, Any] = {
            "num_classes": num_classes,
            "loss": auxiliary_loss,
            "strides": (*self.neck.strides, 2 * self.neck.strides[-1]),
            "size_divisor": self.size_divisor,
        }
        self.auxiliary = nn.ModuleDict({name: AUXILIARY[name](settings, **shared) for name in settings.auxiliary})
        self.auxiliary_queries = nn.ModuleDict(
            {
                name: AuxiliaryQueries(channels, limit=settings.auxiliary_queries, marks=marks)
                for name in settings.auxiliary
            }
        )
        # A coarser map for the auxiliary heads. The published convolution has a bias here, but not in the neck.
        self.fifth = normalised(channels, channels, kernel=3, bias=True) if settings.auxiliary else None

    def losses(self, images: ImageList, features: list[Tensor], ground_truths: list[Target]) -> dict[str, Tensor]:
        geometry, memory = self.encode(images, features)
        assigned = self.assigned_queries(images, geometry, memory, ground_truths)
        auxiliary, terms = self.auxiliary_losses(images, geometry, memory, ground_truths)
        return self.summed_layers(assigned | auxiliary) | terms

    def encode(self, images: ImageList, features: list[Tensor]) -> tuple[Geometry, Tensor]:
        """Return the token geometry and the encoder output (B, S, C), called memory."""
        height, width = images.tensors.shape[-2:]
        geometry = Geometry.of(features, (height, width), images.image_sizes)
        return geometry, self.encoder(features, geometry)

    def assigned_queries(
        self, images: ImageList, geometry: Geometry, memory: Tensor, ground_truths: list[Target]
    ) -> dict[str, list[Assigned]]:
        """Assign objects to the proposals and to the queries of every layer: ``encoder``, ``decoder`` and others."""
        raise NotImplementedError

    def auxiliary_losses(
        self, images: ImageList, geometry: Geometry, memory: Tensor, ground_truths: list[Target]
    ) -> tuple[dict[str, list[Assigned]], LossTerms]:
        """Train the auxiliary heads; return the decoder layers of their queries, and the heads' own loss terms."""
        maps = geometry.maps(memory)
        if self.fifth is not None:
            maps.append(self.fifth(maps[-1]))
        assigned: dict[str, list[Assigned]] = {}
        terms: LossTerms = {}
        scales = image_scales(images.image_sizes, memory.device)
        for name, head in self.auxiliary.items():
            head_terms, candidates = head(images, maps, ground_truths)
            queries, matches = self.auxiliary_queries[name](candidates, images.image_sizes)
            assigned[f"{name}_queries"] = Assigned.from_queries(
                [(layer.logits, layer.boxes) for layer in self.decoder(queries, memory, geometry)],
                matches=matches,
                ground_truths=ground_truths,
                scales=scales,
                min_label=self.min_label,
            )
            terms |= head_terms
        return assigned, terms

    def match_queries(self, layers: Sequence[QueryLayer], image_sizes: Sequence[tuple[int, int]]) -> list[Assigned]:
        """Match each layer separately, one query to one object, and build the criterion's inputs.

        One call matches all layers and images, so the number of device syncs is constant.
        """
        scales = image_scales(image_sizes, layers[0].decoded.boxes.device)
        batch = [
            ImageQueries(boxes, objects["boxes"], logits, objects["labels"], size, valid)
            for layer in layers
            for boxes, logits, objects, size, valid in zip(
                in_pixels(layer.decoded.boxes.detach(), scales[:, None]),
                layer.decoded.logits.detach(),
                layer.ground_truths,
                image_sizes,
                [None] * len(image_sizes) if layer.valid is None else layer.valid,
                strict=True,
            )
        ]
        matched = iter(assign_hungarian(batch, self.cost_weights))
        assigned = []
        for layer in layers:
            of_images = [next(matched) for _ in image_sizes]
            queries = layer.decoded.logits.shape[1]
            assigned += Assigned.from_queries(
                [(layer.decoded.logits, layer.decoded.boxes)],
                matches=[each.assignment for each in of_images],
                rows=torch.cat([each.queries + image * queries for image, each in enumerate(of_images)]),
                ground_truths=layer.ground_truths,
                scales=scales,
                min_label=self.min_label,
            )
        return assigned

    def summed_layers(self, assigned: dict[str, list[Assigned]]) -> LossTerms:
        """Sum the loss terms of each part over its layers. One call ranks all layers, each separately."""
        terms = iter(self.criterion([layer for layers in assigned.values() for layer in layers]))
        summed: LossTerms = {}
        for part, layers in assigned.items():
            of_layers = [next(terms) for _ in layers]
            totals = {name: torch.stack([each[name] for each in of_layers]).sum() for name in of_layers[0]}
            summed |= named(part, totals)
        return summed

    def detecting_criterion(self) -> tuple[Criterion, int]:
        # The inputs are the encoder's proposals, then the decoder layers, of which the last detects.
        return self.criterion, len(self.decoder.layers)

    def score_head(self) -> ScoreHead:
        # The classifiers of the proposals and the earlier layers do not score detections.
        last: nn.Linear = self.decoder.classes[-1]  # type: ignore[assignment]
        return ScoreHead("sigmoid", layers=(last,), columns=self.num_classes)

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        geometry, memory = self.encode(images, features)
        boxes = self.proposer(memory, geometry).best(self.selected.count)
        return self.top_detections(self.decoder(self.selected(boxes), memory, geometry)[-1], images.image_sizes)

    def top_detections(self, last: Decoded, image_sizes: list[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """Select the highest scores of the last layer, over queries and classes."""
        scales = image_scales(image_sizes, last.boxes.device)
        results = []
        for image, size in enumerate(image_sizes):
            scores = self.criterion.scores(last.logits[image])
            values, rows, labels = top_scores(scores, limit=self.detections, threshold=-1.0)
            best_boxes = clip_boxes_to_image(in_pixels(last.boxes[image, rows], scales[image]), size)
            results.append({"boxes": best_boxes, "scores": values, "labels": labels})
        return results


class CoDETR(CollaborativeDETR):
    """Co-Deformable-DETR; with ``loss="rs"`` it is BRS-DETR, with ``"focal"`` Co-DETR.

    Its proposals have a single class, and all tokens are trained.
    """

    def __init__(self, num_classes: int, *, loss: LossSettings, settings: CoDETRSettings, **shared: Any) -> None:
        super().__init__(
            num_classes,
            loss=loss,
            settings=settings,
            auxiliary_loss=loss,
            proposal_logits=num_classes if settings.published else 1,
            marks=1 if settings.published else settings.channels,
            min_label=0.0 if settings.published else MIN_LABEL,
            **shared,
        )

    def assigned_queries(
        self, images: ImageList, geometry: Geometry, memory: Tensor, ground_truths: list[Target]
    ) -> dict[str, list[Assigned]]:
        proposals = self.proposer(memory, geometry)
        one_class = [each | {"labels": torch.zeros_like(each["labels"])} for each in ground_truths]
        decoded = self.decoder(self.selected(proposals.best(self.selected.count)), memory, geometry)
        layers = [QueryLayer(Decoded(proposals.logits, proposals.boxes), one_class, proposals.valid)]
        layers += [QueryLayer(layer, ground_truths) for layer in decoded]
        encoder, *decoder = self.match_queries(layers, images.image_sizes)
        return {"encoder": [encoder], "decoder": decoder}


def freeze_affine(backbone: Backbone) -> None:
    """Also freeze the affine parameters of batch norms, as DETRs do with a pretrained backbone."""
    for name, module in backbone.named_modules():
        if isinstance(module, _BatchNorm):
            backbone.frozen += [f"{name}.{key}" for key, _ in module.named_parameters()]
    backbone.train(backbone.training)
