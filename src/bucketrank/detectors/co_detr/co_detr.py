"""Co-DETR: a deformable DETR with auxiliary heads in training."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import clip_boxes_to_image

from bucketrank.calibration.score_head import ScoreHead
from bucketrank.catalogue import BackboneSettings, InputSettings, LossSettings
from bucketrank.catalogue.detector_specs import CoDETRSettings
from bucketrank.detectors.backbone import Backbone
from bucketrank.detectors.co_detr.auxiliary import AUXILIARY, AuxiliarySettings
from bucketrank.detectors.co_detr.decoder import Decoded, Decoder, SelectedQueries
from bucketrank.detectors.co_detr.geometry import Geometry
from bucketrank.detectors.co_detr.level_projection import LevelProjection, normalised
from bucketrank.detectors.co_detr.proposals import Proposer
from bucketrank.detectors.co_detr.queries import AuxiliaryQueries
from bucketrank.detectors.co_detr.query_matching import QueryLayer, QueryMatching, image_scales, in_pixels
from bucketrank.detectors.co_detr.transformer import Encoder, TransformerSettings
from bucketrank.detectors.criterion import Assigned, Criterion, HeadRecipe, LossTerms, build_criterion, named
from bucketrank.detectors.detector import Detector
from bucketrank.detectors.postprocess import best_entries
from bucketrank.detectors.targets import Target
from bucketrank.suggestions import require_choice

# The published weights: classification 2, L1 5 = 2 * 2.5 and GIoU 2. RS loss balances the box losses instead.
RECIPE = HeadRecipe(ranking_weight=2.0, scored_weight=2.0, l1_weight=2.5, prior=0.01, confident=False)
RANKING_CLASS_COST, SCORED_CLASS_COST = 4.0, 2.0


class CoDETR(Detector):
    """Two-stage deformable DETR with auxiliary heads; with ``loss="rs"`` it is BRS-DETR, with ``"focal"`` Co-DETR.

    The auxiliary heads train on the encoder's maps. Their positives become further queries of the same decoder, many
    for one object. Only the decoder detects.
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
            raise ValueError(f"detector.auxiliary: expected each head at most once, got {settings.auxiliary!r}")
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
        self.backbone.freeze_only_finest()
        if backbone.weights is not None and self.backbone.freeze_batch_norm:
            freeze_affine(self.backbone)
        self.criterion = build_criterion(loss, RECIPE)
        published = RANKING_CLASS_COST if self.criterion.ranking else SCORED_CLASS_COST
        self.matching = QueryMatching(
            published if settings.class_cost is None else settings.class_cost, *self.criterion.matching_focal
        )
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
            {name: AuxiliaryQueries(channels, limit=settings.auxiliary_queries) for name in settings.auxiliary}
        )
        self.fifth = normalised(channels, channels, kernel=3) if settings.auxiliary else None

    def losses(self, images: ImageList, features: list[Tensor], ground_truths: list[Target]) -> dict[str, Tensor]:
        geometry, memory = self.encode(images, features)
        proposals = self.proposer(memory, geometry)
        one_class = [each | {"labels": torch.zeros_like(each["labels"])} for each in ground_truths]
        decoded = self.decoder(self.selected(proposals.best(self.selected.count)), memory, geometry)
        layers = [QueryLayer(Decoded(proposals.logits, proposals.boxes), one_class, proposals.valid)]
        layers += [QueryLayer(layer, ground_truths) for layer in decoded]
        encoder, *decoder = self.matching.assign(layers, images.image_sizes)
        assigned = {"encoder": [encoder], "decoder": decoder}

        maps = geometry.maps(memory)
        if self.fifth is not None:
            maps.append(self.fifth(maps[-1]))
        auxiliary_terms: LossTerms = {}
        scales = image_scales(images.image_sizes, memory.device)
        for name, head in self.auxiliary.items():
            head_terms, candidates = head(images, maps, ground_truths)
            queries, matches = self.auxiliary_queries[name](candidates, images.image_sizes)
            decoded = self.decoder(queries, memory, geometry)
            assigned[f"{name}_queries"] = Assigned.from_queries(
                [(layer.logits, layer.boxes) for layer in decoded],
                matches=matches,
                ground_truths=ground_truths,
                scales=scales,
            )
            auxiliary_terms |= head_terms
        return self.summed_layers(assigned) | auxiliary_terms

    def encode(self, images: ImageList, features: list[Tensor]) -> tuple[Geometry, Tensor]:
        """Return the geometry of the tokens and the encoder's output (B, S, C), called memory."""
        height, width = images.tensors.shape[-2:]
        geometry = Geometry.of(features, (height, width), images.image_sizes)
        return geometry, self.encoder(features, geometry)

    def summed_layers(self, assigned: dict[str, list[Assigned]]) -> LossTerms:
        """Return the loss terms of each part, summed over its layers. One call ranks all layers, each on its own."""
        terms = iter(self.criterion([layer for layers in assigned.values() for layer in layers]))
        summed: LossTerms = {}
        for part, layers in assigned.items():
            of_layers = [next(terms) for _ in layers]
            totals = {name: torch.stack([each[name] for each in of_layers]).sum() for name in of_layers[0]}
            summed |= named(part, totals)
        return summed

    def detecting_criterion(self) -> tuple[Criterion, int]:
        # The inputs are the encoder's proposals, then each layer of the decoder, of which the last detects.
        return self.criterion, len(self.decoder.layers)

    def score_head(self) -> ScoreHead:
        # The proposals and the earlier layers have classifiers of their own, which do not score detections.
        last: nn.Linear = self.decoder.classes[-1]  # type: ignore[assignment]
        return ScoreHead("sigmoid", layers=(last,), columns=self.num_classes)

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        geometry, memory = self.encode(images, features)
        boxes = self.proposer(memory, geometry).best(self.selected.count)
        last = self.decoder(self.selected(boxes), memory, geometry)[-1]
        scales = image_scales(images.image_sizes, memory.device)
        results = []
        for image, size in enumerate(images.image_sizes):
            scores = self.criterion.scores(last.logits[image])
            values, rows, labels = best_entries(scores, limit=self.detections, threshold=-1.0)
            best_boxes = clip_boxes_to_image(in_pixels(last.boxes[image, rows], scales[image]), size)
            results.append({"boxes": best_boxes, "scores": values, "labels": labels})
        return results


def freeze_affine(backbone: Backbone) -> None:
    """Freeze the affine parameters of batch norms too, as DETRs do with a pretrained backbone."""
    for name, module in backbone.named_modules():
        if isinstance(module, _BatchNorm):
            backbone.frozen += [f"{name}.{key}" for key, _ in module.named_parameters()]
    backbone.train(backbone.training)
