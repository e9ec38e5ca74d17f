"""Co-DETR: a deformable DETR that auxiliary heads help to train."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_convert, clip_boxes_to_image

from bucketrank.catalogue import BackboneSettings, InputSettings, LossSettings
from bucketrank.catalogue.detector_specs import CoDETRSettings
from bucketrank.detectors.backbone import Backbone
from bucketrank.detectors.co_detr.auxiliary import AUXILIARY, AuxiliarySettings
from bucketrank.detectors.co_detr.decoder import Decoded, Decoder, SelectedQueries
from bucketrank.detectors.co_detr.geometry import Geometry
from bucketrank.detectors.co_detr.level_projection import LevelProjection, normalised
from bucketrank.detectors.co_detr.proposals import Proposer
from bucketrank.detectors.co_detr.queries import AuxiliaryQueries
from bucketrank.detectors.co_detr.transformer import Encoder, TransformerSettings
from bucketrank.detectors.criterion import Criterion, HeadRecipe, Terms, assigned_queries, build_criterion, named
from bucketrank.detectors.detector import Detector
from bucketrank.detectors.postprocess import best_entries
from bucketrank.detectors.targets import Target
from bucketrank.ops.assignment import assign_hungarian
from bucketrank.suggestions import require_choice

# Classification 2, L1 5 and GIoU 2; RS loss balances the boxes instead.
RECIPE = HeadRecipe(ranking_weight=2.0, scored_weight=2.0, l1_weight=2.5, prior=0.01, confident=False)
RANKING_CLASS_COST, SCORED_CLASS_COST = 4.0, 2.0

# From what the queries (of one layer) say to the object of each, for every image.
Matching = Callable[[Tensor, Tensor], list[Tensor]]


class CoDETR(Detector):
    """Two-stage deformable DETR with auxiliary heads; with ``loss="rs"`` it is BRS-DETR, with ``"focal"`` Co-DETR.

    The encoder's maps also train the ``auxiliary`` heads, and what these find positive becomes further queries of the
    same decoder, many for one object. Detection is by the decoder alone.
    """

    usual_size_divisor = 1

    def __init__(
        self,
        num_classes: int,
        *,
        backbone: BackboneSettings,
        loss: LossSettings,
        inputs: InputSettings,
        settings: CoDETRSettings,
    ) -> None:
        for name in settings.auxiliary:
            require_choice("detector.auxiliary", name, AUXILIARY)
        if len(set(settings.auxiliary)) < len(settings.auxiliary):
            raise ValueError(f"detector.auxiliary: expected every head once, got {settings.auxiliary!r}")
        channels = settings.channels
        transformer = TransformerSettings(
            width=channels,
            heads=settings.heads,
            points=settings.points,
            feedforward=settings.feedforward,
            encoder_layers=settings.encoder_layers,
            decoder_layers=settings.decoder_layers,
            dropout=settings.dropout,
            checkpointing=settings.transformer_checkpointing,
        )
        super().__init__(num_classes, backbone=backbone, inputs=inputs)
        self.backbone.leave_out_finest()
        if backbone.weights is not None and self.backbone.freeze_batch_norm:
            freeze_affine(self.backbone)
        self.criterion = build_criterion(loss, RECIPE)
        usual = RANKING_CLASS_COST if self.criterion.ranking else SCORED_CLASS_COST
        self.class_cost = usual if settings.class_cost is None else settings.class_cost
        self.detections = settings.detections
        score = self.criterion.initial_score
        self.neck = LevelProjection(self.backbone.channels, channels)
        self.encoder = Encoder(transformer)
        self.proposer = Proposer(channels, score=score)
        self.selected = SelectedQueries(channels, settings.queries)
        self.decoder = Decoder(transformer, num_classes=num_classes, score=score)
        shared = AuxiliarySettings(
            width=channels,
            num_classes=num_classes,
            loss=loss,
            size_divisor=self.size_divisor,
            weight=settings.auxiliary_weight,
            sampling=settings.sampling,
            hidden=settings.hidden,
            proposals=settings.proposals,
            proposal_candidates=settings.proposal_candidates,
            topk=settings.topk,
        )
        self.auxiliary = nn.ModuleDict({name: AUXILIARY[name](shared) for name in settings.auxiliary})
        self.auxiliary_queries = nn.ModuleDict(
            {name: AuxiliaryQueries(channels, most=settings.auxiliary_queries) for name in settings.auxiliary}
        )
        self.fifth = normalised(channels, channels, kernel=3) if settings.auxiliary else None

    def losses(self, images: ImageList, features: list[Tensor], truths: list[Target]) -> dict[str, Tensor]:
        geometry, memory = self.encode(images, features)
        proposals = self.proposer(memory, geometry)
        objects = [truth | {"labels": torch.zeros_like(truth["labels"])} for truth in truths]
        match = self.matching(objects, images.image_sizes, valid=proposals.valid)
        terms = named("encoder", self.compare([Decoded(proposals.logits, proposals.boxes)], match, objects, images))

        decoded = self.decoder(self.selected(proposals.best(self.selected.count)), memory, geometry)
        match = self.matching(truths, images.image_sizes)
        terms |= named("decoder", self.compare(decoded, match, truths, images))

        maps = geometry.maps(memory)
        if self.fifth is not None:
            maps.append(self.fifth(maps[-1]))
        for name, head in self.auxiliary.items():
            found, candidates = head(images, maps, truths)
            queries, matches = self.auxiliary_queries[name](candidates, images.image_sizes)
            decoded = self.decoder(queries, memory, geometry)
            asked = self.compare(decoded, lambda *_, known=matches: known, truths, images)
            terms |= found | named(f"{name}_queries", asked)
        return terms

    def encode(self, images: ImageList, features: list[Tensor]) -> tuple[Geometry, Tensor]:
        """Where the tokens are, and what the encoder says of them (B, S, C)."""
        height, width = images.tensors.shape[-2:]
        geometry = Geometry.of(features, (height, width), images.image_sizes)
        return geometry, self.encoder(features, geometry)

    def matching(
        self, truths: list[Target], image_sizes: list[tuple[int, int]], valid: Tensor | None = None
    ) -> Matching:
        """One query for one object, by the Hungarian algorithm; ``valid`` (B, Q) says which queries take part."""
        alpha, gamma = self.criterion.matching_focal

        def match(logits: Tensor, boxes: Tensor) -> list[Tensor]:
            return [
                assign_hungarian(
                    in_pixels(boxes[image].detach(), size),
                    truth["boxes"],
                    logits=logits[image].detach(),
                    labels=truth["labels"],
                    image_size=size,
                    class_cost=self.class_cost,
                    alpha=alpha,
                    gamma=gamma,
                    valid=None if valid is None else valid[image],
                )
                for image, (truth, size) in enumerate(zip(truths, image_sizes, strict=True))
            ]

        return match

    def compare(self, layers: list[Decoded], match: Matching, truths: list[Target], images: ImageList) -> Terms:
        """The terms of a decoder's layers, added up: each layer is matched and ranked by itself."""
        found = [
            self.criterion(
                assigned_queries(
                    layer.logits,
                    layer.boxes,
                    matches=match(layer.logits, layer.boxes),
                    truths=truths,
                    image_sizes=images.image_sizes,
                )
            )
            for layer in layers
        ]
        return {name: torch.stack([terms[name] for terms in found]).sum() for name in found[0]}

    def detecting_criterion(self) -> tuple[Criterion, int]:
        # The first call compares the encoder's proposals, the next ones the decoder's layers; the last layer detects.
        return self.criterion, len(self.decoder.layers)

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        geometry, memory = self.encode(images, features)
        boxes = self.proposer(memory, geometry).best(self.selected.count)
        last = self.decoder(self.selected(boxes), memory, geometry)[-1]
        results = []
        for image, size in enumerate(images.image_sizes):
            scores = self.criterion.scores(last.logits[image])
            values, rows, labels = best_entries(scores, most=self.detections, threshold=-1.0)
            found = clip_boxes_to_image(in_pixels(last.boxes[image, rows], size), size)
            results.append({"boxes": found, "scores": values, "labels": labels})
        return results


def in_pixels(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Centre and size in units of an image of (height, width) as (x1, y1, x2, y2) in its pixels."""
    height, width = size
    found: Tensor = box_convert(boxes.float(), "cxcywh", "xyxy") * boxes.new_tensor([width, height, width, height])
    return found


def freeze_affine(backbone: Backbone) -> None:
    """Freeze the affine parameters of batch norms too: DETRs train nothing of a pretrained network's norms."""
    for name, module in backbone.named_modules():
        if isinstance(module, _BatchNorm):
            backbone.frozen += [f"{name}.{key}" for key, _ in module.named_parameters()]
    backbone.train(backbone.training)
