"""The input of a criterion: the candidates of a batch with their predictions and the objects assigned to them."""

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

# The targets (P,) of the quality branch, from the anchors, predicted boxes and objects of P positives.
Quality = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Assigned:
    """The R candidates of a batch (anchors, proposals or queries) with their predictions and targets.

    The rows of all images follow each other. P rows are positive; tensors of P rows keep the order of the positives.
    The deltas are what the head regresses: a box relative to its candidate, as ``BoxCoder`` encodes it, or for a DETR's
    queries the box itself as (cx, cy, w, h) in units of the image.
    """

    logits: Tensor  # (R, C), or (R, C + 1) with the background logit last
    labels: Tensor  # (R,) the class of a positive, NEGATIVE or IGNORED
    image_index: Tensor  # (R,) the image that a row belongs to
    boxes: Tensor  # (P, 4) the predicted boxes
    objects: Tensor  # (P, 4) the boxes of the assigned objects
    box_deltas: Tensor  # (P, 4) the predicted deltas
    target_deltas: Tensor  # (P, 4) the deltas of the assigned objects
    quality_logits: Tensor | None = None  # (P,) of the branch that predicts how well a box fits
    quality_targets: Tensor | None = None  # (P,) from 0 to 1
    min_label: float = MIN_LABEL  # of a positive without overlap; at 0 a ranking loss takes it for a negative
    positive_rows: Tensor | None = None  # (P,) if known; otherwise ``rows`` finds them, for which the host waits

    @property
    def positives(self) -> Tensor:
        """(R,) whether each row is positive."""
        return self.labels >= 0

    @cached_property
    def rows(self) -> Tensor:
        """(P,) the rows of the positives."""
        return torch.where(self.positives)[0] if self.positive_rows is None else self.positive_rows

    def targets(self, values: Tensor | float) -> Tensor:
        """Return targets (R, C) for a loss: ``values`` (P,) at the positives' classes, -1 in ignored rows, else 0."""
        columns, ignored = self.labels[self.rows], self.labels == IGNORED
        return candidate_targets(self.logits, values, rows=self.rows, columns=columns, ignored=ignored)

    @cached_property
    def ious(self) -> Tensor:
        """(P,) the IoU of each positive's box with its object as a label: without gradient, at least ``min_label``."""
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
        """Build the input of a criterion from anchors or proposals.

        ``logits`` is (R, C); ``box_deltas`` is (R, 4), or (R, C, 4) with one box per class. Per image, ``candidates``
        is (A, 4) and ``matches`` (A,) holds the object of each candidate, NEGATIVE or IGNORED. ``ground_truths`` holds
        one dict per image with ``boxes`` and ``labels``; classes count from 0. ``quality_logits`` (R,) of the quality
        branch come with ``quality``, which computes their targets.
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
        """Build the inputs of a criterion from the layers of a DETR's decoder, all with the same ``matches``.

        A layer is its logits (B, Q, C) and its boxes (B, Q, 4) as (cx, cy, w, h) in units of the image. Per image,
        ``matches`` is (Q,) and ``scales`` (B, 4) holds width, height, width and height. ``rows`` (P,) are the positive
        rows if they are known; otherwise the host waits for them.
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
    """Return the label (R,) and the image (R,) of every row, the positive rows (P,) and their objects (P, 4)."""
    image_index = torch.cat([torch.full_like(match, image) for image, match in enumerate(matches)])
    labels = torch.cat(list(matches))
    if rows is None:
        rows = torch.where(labels >= 0)[0]  # the host waits here, and only here
    first, numbers = 0, []  # objects are numbered through the images
    for match, ground_truth in zip(matches, ground_truths, strict=True):
        numbers.append(match + first)
        first += len(ground_truth["labels"])
    owners = torch.cat(numbers)[rows]
    labels[rows] = torch.cat([ground_truth["labels"] for ground_truth in ground_truths])[owners]
    objects = torch.cat([ground_truth["boxes"] for ground_truth in ground_truths])[owners]
    return labels, image_index, rows, objects.float()


# The scope of a ranking: the images of this process, each image alone, or the images of all processes.


# From logits, targets and one value per positive (None if the loss takes none) to the terms of the loss. Some
# losses also take ``sizes``, the lengths of consecutive parts to rank apart, and return the mean of their terms.
LossFunction = Callable[..., Sequence[Tensor]]


class Scope:
    """Rank all images of this process together, as in the paper. Also the base of the other scopes."""

    joins_calls = True  # whether the rankings of several heads or layers may share one call of the loss

    def rank(
        self,
        loss: LossFunction,
        logits: Tensor,
        targets: Tensor,
        *,
        image_index: Tensor,
        values: Tensor | None = None,
        parts: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return the terms of ``loss``.

        ``logits`` and ``targets`` are (R, C), ``image_index`` (R,) holds the image of each row, and ``values`` (P,)
        belong to ``logits[targets > 0]`` in that order. ``parts`` says whether the loss takes ``sizes``.
        """
        return tuple(loss(logits, targets, values))

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of ``value`` over all processes that are ranked together."""
        return value

    def average(self, count: Tensor) -> Tensor:
        """Return the mean of ``count`` over all processes, without gradient."""
        if _process_count() == 1:
            return count
        mean = count.detach().clone()
        dist.all_reduce(mean)
        return mean / _process_count()


class ImageScope(Scope):
    """Rank every image alone, and return the mean over the images with positives."""

    joins_calls = False

    def rank(
        self,
        loss: LossFunction,
        logits: Tensor,
        targets: Tensor,
        *,
        image_index: Tensor,
        values: Tensor | None = None,
        parts: bool = False,
    ) -> tuple[Tensor, ...]:
        # The rows of an image follow each other, so that an image is a consecutive part of the list.
        rows = torch.bincount(image_index).tolist()
        if parts:
            return tuple(loss(logits, targets, values, sizes=[count * targets.shape[1] for count in rows]))
        positives = [int((part > 0).sum()) for part in targets.split(rows)]
        own_values = [None] * len(rows) if values is None else values.split(positives)
        images = zip(logits.split(rows), targets.split(rows), own_values, positives, strict=True)
        terms = [loss(*image) for *image, count in images if count]
        if not terms:
            return super().rank(loss, logits, targets, image_index=image_index, values=values)
        return tuple(torch.stack(per_image).mean() for per_image in zip(*terms, strict=True))


class GlobalScope(Scope):
    """Rank the images of all processes together. Each process computes the whole ranking and trains its own part.

    DistributedDataParallel averages the gradients of the processes. So each process multiplies the gradient of its part
    by the number of processes: the average is then the gradient of one loss over the whole batch.
    """

    joins_calls = False

    def rank(
        self,
        loss: LossFunction,
        logits: Tensor,
        targets: Tensor,
        *,
        image_index: Tensor,
        values: Tensor | None = None,
        parts: bool = False,
    ) -> tuple[Tensor, ...]:
        if _process_count() == 1:
            return super().rank(loss, logits, targets, image_index=image_index, values=values)
        return tuple(loss(_gather(logits), _gather(targets), None if values is None else _gather(values)))

    def total(self, value: Tensor) -> Tensor:
        if _process_count() == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return _with_gradient_of(value, total)

    def average(self, count: Tensor) -> Tensor:
        return self.total(count)  # the sums that it divides cover all processes, too


SCOPES: dict[str, type[Scope]] = {"batch": Scope, "image": ImageScope, "global": GlobalScope}


def _process_count() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _gather(rows: Tensor) -> Tensor:
    """Return the rows of all processes in the order of their ranks; the gradient reaches the rows of this process."""
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(_process_count())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    longest = int(torch.stack(counts).max())
    # all_gather requires equal shapes: pad to the longest, and cut again.
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    parts = [part[: int(count)] for part, count in zip(parts, counts, strict=True)]
    rank = dist.get_rank()
    parts[rank] = _with_gradient_of(rows, parts[rank])
    return torch.cat(parts)


def _with_gradient_of(source: Tensor, value: Tensor) -> Tensor:
    """Return exactly ``value``; its gradient goes to ``source``, multiplied by the number of processes."""
    return value + (source - source.detach()) * _process_count()


# The base of every criterion: it turns the logits, boxes and assignment of one head into loss terms.


LossTerms = dict[str, Tensor]


@dataclass(frozen=True)
class HeadRecipe:
    """The published choices for the losses of a head; the user's settings have precedence."""

    ranking_weight: float = 1.0  # of all terms of the head under a ranking loss
    scored_weight: float = 1.0  # of all terms of the head under a score-based loss
    box_loss: str = "giou"  # under a score-based loss; the ranking losses use GIoU
    ranking_box_weight: float = 1.0  # under a ranking loss that does not balance the box loss
    scored_box_weight: float = 1.0
    l1_weight: float | None = None  # of an L1 loss of the deltas in addition to GIoU, as in DETR; None: no such loss
    quality_weight: float = 1.0
    prior: float = 0.5  # the initial probability of the classifier
    confident: bool = True  # whether ranking losses weight a box by its score; otherwise positives count equally
    min_iou: float = 0.5  # the minimum IoU of a positive; aLRP scales localisation errors by it
    average_counts: bool = False  # whether a score-based loss divides by counts averaged over processes; else its own
    samples: bool = False  # whether cross-entropy trains on a balanced sample of the candidates
    softmax: bool = False  # whether cross-entropy uses a softmax with a background logit


class Criterion(nn.Module):
    """Base class of the criteria: properties that a head reads when it is built, and parts that the losses share."""

    ranking = False  # whether it is a ranking loss, which needs no sampling
    quality_branch = False  # whether scores are multiplied by a predicted quality, as the loss does not see the IoU
    always_giou = True  # whether the published box loss is GIoU in every detector; otherwise the head's recipe says it
    self_balanced = False  # whether the published box and mask losses are scaled to the classification loss
    prior: float | None = None  # initial probability that the loss requires; None: the head's
    classification_terms: ClassVar[tuple[str, ...]] = ("cls",)  # the names of the terms that train the logits
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
    def samples(self) -> bool:
        """Whether the head must train on a sample of its candidates."""
        return False

    @property
    def softmax(self) -> bool:
        """Whether classes exclude each other and the last logit is the background's."""
        return False

    @property
    def initial_score(self) -> float:
        """The initial probability of the head's classifier."""
        return self.recipe.prior if self.prior is None else self.prior

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores (R, C) that rank detections."""
        return logits.float().softmax(-1)[..., :-1] if self.softmax else logits.float().sigmoid()

    def forward(self, assigned: Assigned | list[Assigned]) -> LossTerms | list[LossTerms]:
        """Return the loss terms of a head by name; training minimises their sum.

        A list of inputs, such as the layers of a decoder, gives a list of terms. Each input is ranked on its own, but
        one call of the loss ranks them all where the loss can do that.
        """
        if isinstance(assigned, Assigned):
            (terms,) = self.terms_of_all([assigned])
            return self.weighted(terms)
        return [self.weighted(terms) for terms in self.terms_of_all(assigned)]

    def weighted(self, terms: LossTerms) -> LossTerms:
        """Return the terms times the weight of the head."""
        weight = self.recipe.ranking_weight if self.ranking else self.recipe.scored_weight
        return {name: weight * term for name, term in terms.items()}

    def terms_of_all(self, batch: Sequence[Assigned]) -> list[LossTerms]:
        """Return the terms of several inputs before the head's weight applies."""
        return [self.terms(assigned) for assigned in batch]

    def terms(self, assigned: Assigned) -> LossTerms:
        """Return the terms of one input before the head's weight applies."""
        raise NotImplementedError

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the classification loss of a plain list, for reports.

        ``logits`` and ``targets`` are (n,); a target is the IoU of a positive, 0 for a negative, -1 if ignored.
        """
        raise NotImplementedError

    def classification_loss(self, terms: LossTerms) -> Tensor:
        """Return the sum of the terms that train the logits."""
        return torch.stack([term for name, term in terms.items() if name in self.classification_terms]).sum()

    def box_errors(self, assigned: Assigned) -> Tensor:
        """Return the box loss (P,) of each positive."""
        if self.box_loss == "giou":
            return giou_loss(assigned.boxes, assigned.objects)
        return delta_errors(assigned, beta=self.settings.smooth_l1_beta if self.box_loss == "smooth_l1" else 0.0)

    def box_parts(self, assigned: Assigned) -> dict[str, tuple[float, Tensor]]:
        """Return the box losses by name: each with its weight relative to the classification, and its errors (P,)."""
        parts = {"box": (self.box_weight, self.box_errors(assigned))}
        if self.recipe.l1_weight is not None:
            parts["l1"] = (self.recipe.l1_weight, delta_errors(assigned, beta=0.0))
        return parts

    def box_weights(self, assigned: Assigned) -> Tensor | None:
        """Return the weight (P,) of each positive in the mean of a box loss; None: they count equally."""
        if self.settings.box_confidence is None:
            return self.published_box_weights(assigned)
        return self.confidences(assigned) if self.settings.box_confidence else None

    def published_box_weights(self, assigned: Assigned) -> Tensor | None:
        """Return the weights as published for this loss."""
        return None

    def confidences(self, assigned: Assigned) -> Tensor:
        """Return the highest score (P,) of any class of each positive, without gradient."""
        return self.highest_scores(assigned.logits[assigned.rows])

    def highest_scores(self, logits: Tensor) -> Tensor:
        """Return the highest score (R,) of any class of each row, without gradient."""
        return self.scores(logits.detach()).amax(1)

    def box_terms(self, assigned: Assigned, classification: Tensor, norm: Tensor | None = None) -> LossTerms:
        """Return the box losses by name: each a mean over the positives, weighted or scaled to ``classification``.

        If the positives count equally, ``norm`` divides the sum of their errors; by default it is their number.
        """
        weights = self.box_weights(assigned)
        terms = {}
        for name, (weight, errors) in self.box_parts(assigned).items():
            if weights is None and norm is not None:
                mean = self.scope.total(errors.sum()) / norm
            else:
                mean = self.mean(errors, torch.ones_like(errors) if weights is None else weights)
            terms[name] = self_balance(mean, to=classification) if self.box_balance else weight * mean
        return terms

    def mean(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted mean of ``values`` over the ranking scope; 0 if there are none."""
        return self.scope.total((values * weights).sum()) / self.divisor(weights.sum()).clamp(min=1e-10)

    def divisor(self, count: Tensor) -> Tensor:
        """Return the number that sums are divided by, from the ``count`` of this process.

        As published, the score-based losses of ATSS and Co-DETR divide by the mean count of all processes. The gradient
        averaged over processes is then that of the whole batch. Otherwise the count of the ranking scope divides.
        """
        if self.recipe.average_counts and not self.ranking:
            return self.scope.average(count)
        return self.scope.total(count)


def delta_errors(assigned: Assigned, *, beta: float) -> Tensor:
    """Return the smooth L1 distance (P,) of the deltas, quadratic below ``beta``."""
    return F.smooth_l1_loss(assigned.box_deltas, assigned.target_deltas, reduction="none", beta=beta).sum(1)


def named(head: str, terms: LossTerms) -> LossTerms:
    """Return the terms with the name of their head before each name."""
    return {f"{head}_{name}": term for name, term in terms.items()}
