"""Bootstrap over images: how much an AP, or the difference between two, depends on the choice of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bucketrank.evaluation.evaluator import Evaluator, IouType

Values = NDArray[np.float64]

IOUS = np.linspace(0.5, 0.95, 10)  # IoU thresholds of COCO AP
RECALLS = np.linspace(0, 1, 101)  # recalls at which COCO reads the precision
NUM_DRAWS = 500  # bootstrap draws for an interval


@dataclass(frozen=True)
class RankedMatches:
    """The detections of one class at one IoU threshold, highest score first."""

    images: NDArray[np.int64]  # (n,) position of each detection's image
    right: NDArray[np.bool_]  # (n,) True if the detection matches an object

    def ap(self, counts: Values, objects: Values) -> Values:
        """Compute the AP (B,) of B draws.

        ``counts`` (B, images) says how often a draw contains each image, ``objects`` (B,) how many objects it has.
        """
        weights = counts[:, self.images]
        true = np.cumsum(weights * self.right, axis=1)
        total = np.cumsum(weights, axis=1)
        precision = true / np.maximum(total, np.spacing(1))
        # COCO reads the precision at a recall as the best one at this or a higher recall.
        precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        recall = np.ascontiguousarray(true / np.maximum(objects, 1)[:, None])
        # torch searches all draws in one call; numpy would need a loop.
        recalls = np.tile(RECALLS, (len(recall), 1))
        positions = torch.searchsorted(torch.from_numpy(recall), torch.from_numpy(recalls)).numpy()
        precision = np.pad(precision, ((0, 0), (0, 1)))  # 0 at the recalls that are never reached
        mean: Values = np.take_along_axis(precision, positions, axis=1).mean(1)
        return mean


@dataclass(frozen=True)
class ImageAP:
    """All matched detections of one run, which give the AP of any image draw."""

    curves: list[list[RankedMatches]]  # matches of each class, at each IoU threshold
    objects: Values  # (classes, images) number of objects

    @classmethod
    def of(cls, evaluator: Evaluator, iou_type: IouType = "boxes") -> ImageAP:
        """Match the boxes or masks of an evaluator at all COCO AP thresholds."""
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
        """Compute the AP (B,), 0 to 1, of draws that contain image i ``counts[b, i]`` times; NaN without objects."""
        aps = []
        for own, objects in zip(self.curves, self.objects, strict=True):
            totals = counts @ objects
            mean = np.mean([curve.ap(counts, totals) for curve in own], axis=0)
            aps.append(np.where(totals > 0, mean, np.nan))  # a class without objects in a draw does not count
        known = np.isfinite(aps)
        sums, classes = np.where(known, aps, 0.0).sum(0), known.sum(0)
        mean_over_classes: Values = np.where(classes > 0, sums / np.maximum(classes, 1), np.nan)
        return mean_over_classes


@dataclass(frozen=True)
class BootstrapAP:
    """The AP of one run on all images and in bootstrap draws, from 0 to 100.

    A draw takes as many images as the data set has, with replacement. The draws depend only on the number of images and
    the seed: they are the same for all runs on a data set, on any machine.
    """

    ap: float  # AP on all images
    draws: Values  # (B,) AP in each draw

    @classmethod
    def of(cls, matches: ImageAP, *, draws: int = NUM_DRAWS, seed: int = 0) -> BootstrapAP:
        """Compute the AP of ``matches``, the matched detections of a run, in ``draws`` draws by ``seed``."""
        images = matches.objects.shape[1]
        counts = np.random.default_rng(seed).multinomial(images, np.full(images, 1 / images), size=draws)
        (whole,) = matches.ap(np.ones((1, images)))
        return cls(100 * float(whole), 100 * matches.ap(counts.astype(np.float64)))


@dataclass(frozen=True)
class Difference:
    """The difference between two mean APs with its 95 % interval, in AP from 0 to 100."""

    value: float  # AP difference, from -100 to 100
    low: float  # lower end of the interval
    high: float  # upper end of the interval

    @property
    def verdict(self) -> str:
        """The outcome: "ahead" or "behind" if the interval excludes 0, else "level"; "inconclusive" if there is none.

        The ends are rounded to one decimal, as in the tables: an end shown as 0.0 does not exclude 0.
        """
        if math.isnan(self.low) or math.isnan(self.high):
            return "inconclusive"
        return "ahead" if round(self.low, 1) > 0 else "behind" if round(self.high, 1) < 0 else "level"


def paired_difference(one: Sequence[BootstrapAP], other: Sequence[BootstrapAP]) -> Difference:
    """Compare the mean AP of the runs ``one`` with that of the runs ``other`` on the same images: one minus other.

    Run i of both has the same random seed. The squared standard error of the difference is the sum of two variances:
    over the bootstrap draws, which all runs share, and over the seeds. Few seeds say little about their variance, so
    the interval uses Student's t with Welch-Satterthwaite degrees of freedom. A single pair of runs says nothing about
    seeds; the interval then covers only the choice of images.
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
    """Compute half the interval width of a mean from its value per seed and per bootstrap draw."""
    from scipy.stats import t

    drawn = draws[np.isfinite(draws)]  # a draw may contain no object
    if len(drawn) < 2:
        return math.nan
    image_variance, num_seeds = drawn.var(ddof=1), len(by_seed)
    seed_variance = by_seed.var(ddof=1) / num_seeds if num_seeds > 1 else 0.0
    variance = image_variance + seed_variance
    # With hundreds of draws the image variance is known well, so only the seeds limit the degrees of freedom.
    freedom = (num_seeds - 1) * (variance / seed_variance) ** 2 if seed_variance > 0 else math.inf
    return float(t.ppf(0.975, freedom) * math.sqrt(variance))
