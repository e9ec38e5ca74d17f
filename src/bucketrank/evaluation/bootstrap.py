"""Bootstrap over images: how far an AP, or the difference of two, depends on the images that happened to be there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bucketrank.evaluation.evaluator import Evaluator, IouType

Values = NDArray[np.float64]

IOUS = np.linspace(0.5, 0.95, 10)  # the IoU thresholds of COCO's AP
RECALLS = np.linspace(0, 1, 101)  # the recalls at which it reads the precision
DRAWS = 500  # of the images, for an interval


@dataclass(frozen=True)
class RankedMatches:
    """The detections of one class at one IoU threshold, highest score first."""

    images: NDArray[np.int64]  # (n,) the position of each detection's image
    right: NDArray[np.bool_]  # (n,) whether it matches an object

    def ap(self, counts: Values, objects: Values) -> Values:
        """Return the AP (B,) of B draws; ``counts`` (B, images) of each image, ``objects`` (B,) of each draw."""
        weights = counts[:, self.images]
        true = np.cumsum(weights * self.right, axis=1)
        total = np.cumsum(weights, axis=1)
        precision = true / np.maximum(total, np.spacing(1))
        # COCO reads the precision at a recall as the best one at this or a higher recall.
        precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        recall = np.ascontiguousarray(true / np.maximum(objects, 1)[:, None])
        # torch searches all draws in one call, numpy only one draw.
        recalls = np.tile(RECALLS, (len(recall), 1))
        positions = torch.searchsorted(torch.from_numpy(recall), torch.from_numpy(recalls)).numpy()
        precision = np.pad(precision, ((0, 0), (0, 1)))  # 0 at the recalls that are never reached
        mean: Values = np.take_along_axis(precision, positions, axis=1).mean(1)
        return mean


@dataclass(frozen=True)
class ImageAP:
    """All matches of one run's detections, from which the AP of any draw of images follows."""

    curves: list[list[RankedMatches]]  # matches of each class, at each IoU threshold
    objects: Values  # (classes, images) number of objects

    @classmethod
    def of(cls, evaluator: Evaluator, iou_type: IouType = "boxes") -> ImageAP:
        """Match the boxes or masks of an evaluator at all thresholds of COCO's AP."""
        position = {image_id: number for number, image_id in enumerate(sorted(evaluator.image_ids))}
        owners = np.array([position[record["image_id"]] for record in evaluator.detections], dtype=np.int64)
        curves: list[list[RankedMatches]] = [[] for _ in evaluator.categories]
        for iou in IOUS:
            matched = evaluator.matched(iou_type, iou=float(iou), limited=True)
            order = np.argsort(-matched.scores, kind="stable")
            labels, right, images = matched.labels[order], matched.right[order], owners[matched.numbers[order]]
            for label, curve in enumerate(curves, start=1):
                own = labels == label
                curve.append(RankedMatches(images[own], right[own]))
        objects = np.zeros((len(evaluator.categories), len(position)))
        for image_id, label in evaluator.objects():
            objects[label - 1, position[image_id]] += 1
        return cls(curves, objects)

    def ap(self, counts: Values) -> Values:
        """Return the AP (B,), from 0 to 1, of draws that contain image i ``counts[b, i]`` times."""
        aps = []
        for own, objects in zip(self.curves, self.objects, strict=True):
            totals = counts @ objects
            mean = np.mean([curve.ap(counts, totals) for curve in own], axis=0)
            aps.append(np.where(totals > 0, mean, np.nan))  # a class without objects in a draw does not count
        mean_over_classes: Values = np.nanmean(aps, axis=0)
        return mean_over_classes


@dataclass(frozen=True)
class BootstrapAP:
    """The AP of one run, and its APs in bootstrap draws of the images, from 0 to 100.

    A draw takes as many images as there are, with replacement. The draws depend on the number of images and a seed
    alone: they are the same for all runs on a data set, on any machine.
    """

    ap: float  # AP of all images
    draws: Values  # (B,) of each draw

    @classmethod
    def of(cls, matches: ImageAP, *, draws: int = DRAWS, seed: int = 0) -> BootstrapAP:
        """Draw the images of a run.

        Args:
            matches: the matches of the run's detections.
            draws: number of draws.
            seed: seed of the draws.
        """
        images = matches.objects.shape[1]
        counts = np.random.default_rng(seed).multinomial(images, np.full(images, 1 / images), size=draws)
        (whole,) = matches.ap(np.ones((1, images)))
        return cls(100 * float(whole), 100 * matches.ap(counts.astype(np.float64)))


@dataclass(frozen=True)
class Difference:
    """The difference of two mean APs with its 95 % interval, in AP from 0 to 100."""

    value: float  # in AP from 0 to 100
    low: float  # lower end of the interval
    high: float  # upper end of the interval

    @property
    def verdict(self) -> str:
        """Say "ahead" or "behind" if the interval excludes 0, else "level"; "inconclusive" without an interval.

        The ends are rounded to one decimal, as the tables show them: one that is shown as 0.0 does not exclude 0.
        """
        if math.isnan(self.low) or math.isnan(self.high):
            return "inconclusive"
        return "ahead" if round(self.low, 1) > 0 else "behind" if round(self.high, 1) < 0 else "level"


def paired_difference(one: Sequence[BootstrapAP], other: Sequence[BootstrapAP]) -> Difference:
    """Return the mean AP of the runs ``one`` minus that of the runs ``other``, on the same images.

    Run number i of both has the same random seed. The squared standard error of the difference is the sum of two
    variances: over the bootstrap draws of the images, which all runs share, and over the seeds. Few seeds say little
    about their variance, so the interval is as wide as Student's t requires, with the degrees of freedom of Welch and
    Satterthwaite. A single pair of runs says nothing about seeds; the interval then covers the images alone.

    Args:
        one: the runs to compare.
        other: the runs to compare with, in the same order of seeds.
    """
    if len(one) != len(other) or not one:
        raise ValueError(f"paired_difference: expected as many runs on both sides, got {len(one)} and {len(other)}")
    pairs = list(zip(one, other, strict=True))
    if len({len(run.draws) for pair in pairs for run in pair}) > 1:
        raise ValueError("paired_difference: expected the same number of draws in all runs; draw the images again")
    by_seed = np.array([ours.ap - theirs.ap for ours, theirs in pairs])
    value = float(by_seed.mean())
    half_width = _half_width(by_seed, np.mean([ours.draws - theirs.draws for ours, theirs in pairs], axis=0))
    return Difference(value, value - half_width, value + half_width)


def _half_width(by_seed: Values, draws: Values) -> float:
    """Return half the width of the interval of a mean, from its values by seed and its bootstrap draws."""
    from scipy.stats import t

    drawn = draws[np.isfinite(draws)]  # a draw may contain no object
    if len(drawn) < 2:
        return math.nan
    of_images, seeds = drawn.var(ddof=1), len(by_seed)
    of_seeds = by_seed.var(ddof=1) / seeds if seeds > 1 else 0.0
    # The many draws tell the variance of the images well enough: it has no share in the degrees of freedom.
    freedom = (seeds - 1) * ((of_images + of_seeds) / of_seeds) ** 2 if of_seeds > 0 else math.inf
    return float(t.ppf(0.975, freedom) * math.sqrt(of_images + of_seeds))
