"""The criterion base class, its input and the ranking scopes.

:class:`Assigned` is the input: the candidates of a batch with their predictions and assigned objects. A :class:`Scope`
defines which images are ranked together. A :class:`Criterion` turns the input into loss terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import box_convert

from bucketrank.boxes import giou_loss, paired_iou
from bucketrank.detectors.assignment import IGNORED
from bucketrank.integrations.ranking_loss import candidate_targets, iou_labels
from bucketrank.losses import self_balance
from bucketrank.settings import LossSettings
from bucketrank.settings.choices import MIN_LABEL

# Computes the quality branch targets (P,) from the anchors, predicted boxes and objects of P positives.
Quality = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Assigned:
    """The R candidates of a batch (anchors, proposals or queries) with their predictions and targets.

    The rows of all images are concatenated. P rows are positive; tensors with P rows are in the same order. The deltas
    are what the head regresses: box deltas as ``BoxCoder`` encodes them, or for DETR queries the box itself as
    (cx, cy, w, h) relative to the image size.
    """

    logits: Tensor  # (R, C), or (R, C + 1) with the background logit last
    labels: Tensor  # (R,) class of a positive, NEGATIVE or IGNORED
    image_index: Tensor  # (R,) image index of each row
    boxes: Tensor  # (P, 4) predicted boxes
    objects: Tensor  # (P, 4) boxes of the assigned objects
    box_deltas: Tensor  # (P, 4) predicted deltas
    target_deltas: Tensor  # (P, 4) deltas of the assigned objects
    quality_logits: Tensor | None = None  # (P,) logits of the quality branch
    quality_targets: Tensor | None = None  # (P,) values from 0 to 1
    min_label: float = MIN_LABEL  # label of a positive without overlap; 0 would make it a negative
    positive_rows: Tensor | None = None  # (P,) if known; otherwise ``rows`` needs a device sync

    @property
    def positives(self) -> Tensor:
        """Mask (R,) of the positive rows."""
        return self.labels >= 0

    @cached_property
    def rows(self) -> Tensor:
        """Indices (P,) of the positive rows."""
        return torch.where(self.positives)[0] if self.positive_rows is None else self.positive_rows

    def targets(self, values: Tensor | float) -> Tensor:
        """Build loss targets (R, C): ``values`` (P,) at the positives' classes, -1 in ignored rows, else 0."""
        columns, ignored = self.labels[self.rows], self.labels == IGNORED
        return candidate_targets(self.logits, values, rows=self.rows, columns=columns, ignored=ignored)

    @cached_property
    def ious(self) -> Tensor:
        """IoU labels (P,) of the positives: IoU of box and object, detached, at least ``min_label``."""
        return iou_labels(paired_iou(self.boxes.detach(), self.objects), min_label=self.min_label)

    @classmethod
    def from_candidates(
        cls,
        logits: Tensor,
        box_deltas: Tensor,
        *,
        candidates: Sequence[Tensor],
        matches: Sequence[Tensor],
        ground_truths: Sequence[dict[str, Tensor]],
        coder: BoxCoder,
        quality_logits: Tensor | None = None,
        quality: Quality | None = None,
    ) -> Assigned:
        """Build the criterion's input from anchors or proposals.

        ``logits`` is (R, C); ``box_deltas`` is (R, 4), or (R, C, 4) with one box per class. Per image, ``candidates``
        is (A, 4) and ``matches`` (A,) holds the object index of each candidate, NEGATIVE or IGNORED. ``ground_truths``
        holds one dict per image with ``boxes`` and ``labels``; classes count from 0. If the head has a quality branch,
        pass its ``quality_logits`` (R,) and the function ``quality`` that computes their targets.
        """
        labels, image_index, rows, objects = _targets_of(matches, ground_truths)
        anchors = torch.cat(list(candidates))[rows].float()
        # Heads return half precision under autocast; decoding and ranking need float32.
        per_class = box_deltas.dim() == 3 and box_deltas.shape[1] > 1
        deltas = (box_deltas[rows, labels[rows]] if per_class else box_deltas.reshape(-1, 4)[rows]).float()
        boxes = coder.decode_single(deltas, anchors)
        return cls(
            logits=logits.float(),
            labels=labels,
            image_index=image_index,
            boxes=boxes,
            objects=objects,
            box_deltas=deltas,
            target_deltas=coder.encode_single(objects, anchors),
            quality_logits=None if quality_logits is None else quality_logits[rows].float(),
            quality_targets=None if quality is None else quality(anchors, boxes.detach(), objects),
            positive_rows=rows,
        )

    @classmethod
    def from_queries(
        cls,
        layers: Sequence[tuple[Tensor, Tensor]],
        *,
        matches: Sequence[Tensor],
        ground_truths: Sequence[dict[str, Tensor]],
        scales: Tensor,
        rows: Tensor | None = None,
        min_label: float = MIN_LABEL,
    ) -> list[Assigned]:
        """Build the criterion's inputs from DETR decoder layers that share ``matches``.

        A layer has logits (B, Q, C) and boxes (B, Q, 4) as (cx, cy, w, h) relative to the image size. Per image,
        ``matches`` is (Q,) and ``scales`` (B, 4) holds width, height, width and height. Passing the positive ``rows``
        (P,) saves a device sync.
        """
        labels, image_index, rows, objects = _targets_of(matches, ground_truths, rows)
        scales = scales[image_index[rows]]
        target_deltas = box_convert(objects / scales, "xyxy", "cxcywh")
        assigned = []
        for logits, boxes in layers:
            relative_boxes = boxes.flatten(0, 1)[rows].float()
            assigned.append(
                cls(
                    logits=logits.flatten(0, 1).float(),
                    labels=labels,
                    image_index=image_index,
                    boxes=box_convert(relative_boxes, "cxcywh", "xyxy") * scales,
                    objects=objects,
                    box_deltas=relative_boxes,
                    target_deltas=target_deltas,
                    min_label=min_label,
                    positive_rows=rows,
                )
            )
        return assigned


def _targets_of(
    matches: Sequence[Tensor], ground_truths: Sequence[dict[str, Tensor]], rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the label (R,) and image index (R,) of every row, the positive rows (P,) and their objects (P, 4)."""
    image_index = torch.cat([torch.full_like(match, image) for image, match in enumerate(matches)])
    labels = torch.cat(list(matches))
    if rows is None:
        rows = torch.where(labels >= 0)[0]  # the only device sync
    first, numbers = 0, []  # objects are numbered across images
    for match, ground_truth in zip(matches, ground_truths, strict=True):
        numbers.append(match + first if first else match)
        first += len(ground_truth["labels"])
    owners = torch.cat(numbers)[rows]
    labels[rows] = torch.cat([ground_truth["labels"] for ground_truth in ground_truths])[owners]
    objects = torch.cat([ground_truth["boxes"] for ground_truth in ground_truths])[owners]
    return labels, image_index, rows, objects.float()


# Called with logits, targets and one value per positive (None if the loss takes none); returns the loss terms. Some
# losses also take ``sizes``, the lengths of consecutive parts to rank separately, and return the mean of their terms.
LossFunction = Callable[..., Sequence[Tensor]]


class Scope:
    """Rank all images of this process together, as in the paper; base class of the other scopes."""

    joins_calls = True  # whether several heads or layers may share one loss call

    def rank(
        self, loss: LossFunction, logits: Tensor, targets: Tensor, *, images: Tensor, values: Tensor | None, parts: bool
    ) -> tuple[Tensor, ...]:
        """Compute the terms of ``loss`` in this scope.

        ``logits`` and ``targets`` are (R, C), ``images`` (R,) holds the image of each row, and ``values`` (P,) belong
        to ``logits[targets > 0]`` in that order. ``parts`` tells whether the loss takes ``sizes``.
        """
        return tuple(loss(self.join(logits), self.join(targets), None if values is None else self.join(values)))

    def join(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes that are ranked together."""
        return rows

    def total(self, value: Tensor) -> Tensor:
        """Sum ``value`` over all processes that are ranked together."""
        return value

    def average(self, count: Tensor) -> Tensor:
        """Average ``count`` over all processes, without gradient."""
        if _process_count() == 1:
            return count
        mean = count.detach().clone()
        dist.all_reduce(mean)
        return mean / _process_count()


class ImageScope(Scope):
    """Rank each image separately and average over the images with positives."""

    joins_calls = False

    def rank(
        self, loss: LossFunction, logits: Tensor, targets: Tensor, *, images: Tensor, values: Tensor | None, parts: bool
    ) -> tuple[Tensor, ...]:
        # Rows are sorted by image, so each image is a consecutive part of the list.
        rows = torch.bincount(images).tolist()
        if parts:
            return tuple(loss(logits, targets, values, sizes=[count * targets.shape[1] for count in rows]))
        positives = [int((part > 0).sum()) for part in targets.split(rows)]
        own_values = [None] * len(rows) if values is None else values.split(positives)
        lists = zip(logits.split(rows), targets.split(rows), own_values, positives, strict=True)
        terms = [loss(*each) for *each, count in lists if count]
        if not terms:
            return super().rank(loss, logits, targets, images=images, values=values, parts=parts)
        return tuple(torch.stack(per_image).mean() for per_image in zip(*terms, strict=True))


class GlobalScope(Scope):
    """Rank the images of all processes together. Each process computes the whole ranking and trains its own part.

    DistributedDataParallel averages gradients over processes. So each process multiplies the gradient of its part by
    the number of processes: the average is then the gradient of one loss over the whole batch.
    """

    joins_calls = False

    def join(self, rows: Tensor) -> Tensor:
        return rows if _process_count() == 1 else _gather(rows)

    def total(self, value: Tensor) -> Tensor:
        if _process_count() == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return _with_gradient_of(value, total)

    def average(self, count: Tensor) -> Tensor:
        return self.total(count)  # the dividend is also a sum over all processes


SCOPES: dict[str, type[Scope]] = {"batch": Scope, "image": ImageScope, "global": GlobalScope}


def _process_count() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _gather(rows: Tensor) -> Tensor:
    """Gather the rows of all processes in rank order; only the rows of this process receive a gradient."""
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(_process_count())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    longest = int(torch.stack(counts).max())
    # all_gather requires equal shapes, so pad to the longest and truncate afterwards.
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    parts = [part[: int(count)] for part, count in zip(parts, counts, strict=True)]
    rank = dist.get_rank()
    parts[rank] = _with_gradient_of(rows, parts[rank])
    return torch.cat(parts)


def _with_gradient_of(source: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` unchanged, but route its gradient to ``source``, multiplied by the number of processes."""
    return value + (source - source.detach()) * _process_count()


LossTerms = dict[str, Tensor]


MIN_WEIGHT = 1e-10  # minimum sum of weights, against a division by 0


@dataclass(frozen=True)
class HeadRecipe:
    """The published loss choices for a head; user settings take precedence."""

    ranking_weight: float = 1.0  # weight of the head under a ranking loss
    scored_weight: float = 1.0  # weight of the head under a score-based loss
    box_loss: str = "giou"  # box loss under a score-based loss; the ranking losses use GIoU
    ranking_box_weight: float = 1.0  # used under a ranking loss that is not self-balanced
    scored_box_weight: float = 1.0
    l1_weight: float | None = None  # weight of an additional L1 loss on the deltas, as in DETR; None: no L1 loss
    quality_weight: float = 1.0
    prior: float = 0.5  # initial score of the classifier
    confident: bool = True  # whether ranking losses weight box losses by score; otherwise uniformly
    min_iou: float = 0.5  # minimum IoU of a positive, by which aLRP scales localisation errors
    average_counts: bool = False  # whether score-based losses divide by counts averaged over processes
    samples: bool = False  # whether cross-entropy trains on a balanced sample of the candidates
    softmax: bool = False  # whether cross-entropy uses a softmax with a background logit
    inputs: int = 1  # inputs per call, such as decoder layers, each with its own score memory


class Criterion(nn.Module):
    """Base class of the criteria: properties that a head reads when it is built, and shared loss parts."""

    ranking = False  # whether this is a ranking loss; ranking losses need no sampling
    quality_branch = False  # whether scores are multiplied by a predicted quality, since the loss ignores the IoU
    always_giou = True  # whether the published box loss is always GIoU; otherwise it is the head recipe's
    samples = False  # whether the head trains on a sample of its candidates
    softmax = False  # whether classes are mutually exclusive and the last logit is the background's
    self_balanced = False  # whether box and mask losses are scaled to the classification loss, as published
    prior: float | None = None  # initial score that the loss requires; None: the head recipe's
    classification_terms: ClassVar[tuple[str, ...]] = ("cls",)  # names of the terms that train the logits
    matching_focal = (0.25, 2.0)  # alpha and gamma of the class cost in Hungarian matching

    def __init__(self, settings: LossSettings, recipe: HeadRecipe) -> None:
        super().__init__()
        self.settings, self.recipe = settings, recipe
        self.scope = SCOPES[settings.ranking_scope]()
        published = recipe.ranking_box_weight if self.ranking else recipe.scored_box_weight
        self.box_weight = published if settings.box_weight is None else settings.box_weight
        self.box_loss = settings.box_loss or ("giou" if self.always_giou else recipe.box_loss)
        balanced = self.self_balanced and settings.box_weight is None
        self.box_balance = balanced if settings.box_balance is None else settings.box_balance

    @property
    def initial_score(self) -> float:
        """The initial score of the head's classifier."""
        return self.recipe.prior if self.prior is None else self.prior

    def scores(self, logits: Tensor) -> Tensor:
        """Convert logits to the scores (R, C) that rank detections."""
        return logits.float().softmax(-1)[..., :-1] if self.softmax else logits.float().sigmoid()

    def forward(self, assigned: Assigned | list[Assigned]) -> LossTerms | list[LossTerms]:
        """Compute the loss terms of a head by name; training minimises their sum.

        A list of inputs, such as decoder layers, gives a list of terms. Each input is ranked separately, in a single
        loss call if the loss supports it.
        """
        if isinstance(assigned, Assigned):
            (terms,) = self.terms_of_all([assigned])
            return self.weighted(terms)
        return [self.weighted(terms) for terms in self.terms_of_all(assigned)]

    def weighted(self, terms: LossTerms) -> LossTerms:
        """Multiply the terms by the head's weight."""
        weight = self.recipe.ranking_weight if self.ranking else self.recipe.scored_weight
        return {name: weight * term for name, term in terms.items()}

    def terms_of_all(self, batch: Sequence[Assigned]) -> list[LossTerms]:
        """Compute the unweighted terms of several inputs."""
        return [self.terms(assigned) for assigned in batch]

    def terms(self, assigned: Assigned) -> LossTerms:
        """Compute the unweighted terms of one input."""
        raise NotImplementedError

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the classification loss of a plain list, for reports.

        ``logits`` and ``targets`` are (n,); a target is the IoU of a positive, 0 for a negative, -1 if ignored.
        """
        raise NotImplementedError

    def classification_loss(self, terms: LossTerms) -> Tensor:
        """Sum the terms that train the logits."""
        return torch.stack([term for name, term in terms.items() if name in self.classification_terms]).sum()

    def box_errors(self, assigned: Assigned) -> Tensor:
        """Compute the box loss (P,) of each positive."""
        if self.box_loss == "giou":
            return giou_loss(assigned.boxes, assigned.objects)
        return delta_errors(assigned, beta=self.settings.smooth_l1_beta if self.box_loss == "smooth_l1" else 0.0)

    def box_parts(self, assigned: Assigned) -> dict[str, tuple[float, Tensor]]:
        """Return the box losses by name, each with its weight and its errors (P,)."""
        parts = {"box": (self.box_weight, self.box_errors(assigned))}
        if self.recipe.l1_weight is not None:
            parts["l1"] = (self.recipe.l1_weight, delta_errors(assigned, beta=0.0))
        return parts

    def box_weights(self, assigned: Assigned) -> Tensor | None:
        """Return the positives' weights (P,) in the mean of a box loss; None: uniform."""
        if self.settings.box_confidence is None:
            return self.published_box_weights(assigned)
        return self.confidences(assigned) if self.settings.box_confidence else None

    def published_box_weights(self, assigned: Assigned) -> Tensor | None:
        """Return the published weights for this loss."""
        return None

    def confidences(self, assigned: Assigned) -> Tensor:
        """Return the highest class score (P,) of each positive, without gradient."""
        return self.highest_scores(assigned.logits[assigned.rows])

    def highest_scores(self, logits: Tensor) -> Tensor:
        """Return the highest class score (R,) of each row, without gradient."""
        return self.scores(logits.detach()).amax(1)

    def box_terms(self, assigned: Assigned, classification: Tensor, norm: Tensor | None = None) -> LossTerms:
        """Compute the box losses by name: means over the positives, times a weight or scaled to ``classification``.

        With uniform weights, ``norm`` divides the sum of the errors; by default it is the number of positives.
        """
        weights = self.box_weights(assigned)
        terms = {}
        for name, (weight, errors) in self.box_parts(assigned).items():
            if weights is None and norm is not None:
                mean = self.scope.total(errors.sum()) / norm
            else:
                each = torch.ones_like(errors) if weights is None else weights
                mean = self.mean(errors, each, min_weight=self.min_box_weight)
            terms[name] = self_balance(mean, to=classification) if self.box_balance else weight * mean
        return terms

    @property
    def min_box_weight(self) -> float:
        """The minimum of the summed weights that divide a box loss."""
        return MIN_WEIGHT

    def mean(self, values: Tensor, weights: Tensor, *, min_weight: float = MIN_WEIGHT) -> Tensor:
        """Average ``values`` over the ranking scope; the sum of the weights counts at least ``min_weight``.

        It is 0 if there are none.
        """
        return self.scope.total((values * weights).sum()) / self.divisor(weights.sum()).clamp(min=min_weight)

    def divisor(self, count: Tensor) -> Tensor:
        """Turn the ``count`` of this process into the divisor of its sums.

        As published, the score-based losses of ATSS and Co-DETR divide by the mean count over processes. The gradient
        averaged over processes is then that of the whole batch. The other losses divide by the ranking scope's count.
        """
        if self.recipe.average_counts and not self.ranking:
            return self.scope.average(count)
        return self.scope.total(count)


def delta_errors(assigned: Assigned, *, beta: float) -> Tensor:
    """Compute the smooth L1 loss (P,) of the deltas, quadratic below ``beta``."""
    return F.smooth_l1_loss(assigned.box_deltas, assigned.target_deltas, reduction="none", beta=beta).sum(1)


def named(head: str, terms: LossTerms) -> LossTerms:
    """Prefix the term names with the head's name."""
    return {f"{head}_{name}": term for name, term in terms.items()}
