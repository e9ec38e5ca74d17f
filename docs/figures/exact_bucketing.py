"""Draw the cuts of exact bucketing and the gradients of the negatives: python -m docs.figures.exact_bucketing."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from docs.figures.theme import Palette, mark, save

Array = NDArray[np.float64]

DELTA = 0.5
POSITIVES = np.array([-0.7, 0.45, 1.1])
NEGATIVES = np.array([-1.45, -1.0, -0.85, -0.5, -0.4, -0.1, 0.15, 0.25, 0.35, 0.7, 0.8, 0.9, 1.3, 1.45, 1.9])


def compare(others: Array, positives: Array) -> Array:
    """Return H(others_j - positives_i), one row per positive."""
    clipped: Array = np.clip((others - positives[:, None]) / (2 * DELTA) + 0.5, 0, 1)
    return clipped


def ranks(others: Array, sizes: Array) -> Array:
    """Return rank(i) of each positive, with ``sizes`` negatives at each of ``others``."""
    total: Array = compare(POSITIVES, POSITIVES).sum(1) + compare(others, POSITIVES) @ sizes
    return total


def gradient(logits: Array, rank: Array) -> Array:
    """Return the gradient of a negative at each of ``logits``."""
    pushed: Array = (compare(logits, POSITIVES) / rank[:, None]).mean(0)
    return pushed


def draw(palette: Palette) -> Figure:
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(4.7, 5.0), sharex=True, layout="constrained", height_ratios=(1, 1.1)
    )
    edges = np.sort(np.concatenate([POSITIVES - DELTA, POSITIVES + DELTA]))
    span = (-1.78, 2.1)
    line = np.union1d(np.linspace(*span, 400), edges)

    for axes in (top, bottom):
        for left, right in zip(edges[::2], edges[1::2], strict=True):
            axes.axvspan(left, right, color=palette.band, alpha=0.1, linewidth=0)
        axes.axvspan(span[0], edges[0], facecolor="none", edgecolor=palette.faint, alpha=0.5, hatch="///", linewidth=0)
        mark(axes, edges, palette)

    for index, positive in enumerate(POSITIVES):
        colour = palette.series[index]
        top.plot(line, compare(line, POSITIVES[index : index + 1])[0], color=colour, linewidth=1.8)
        top.plot(positive, 0.5, marker="o", color=colour, markersize=6)
        top.annotate(
            f"$s_{index + 1}$", (positive, 0.5), (7, -9), textcoords="offset points", color=colour, fontsize=11
        )
    top.plot(NEGATIVES, np.full_like(NEGATIVES, -0.13), "|", color=palette.point, markersize=9, markeredgewidth=1.3)
    top.set(ylabel=r"$H(s - s_i)$", ylim=(-0.25, 1.24), yticks=[0, 0.5, 1])
    top.set_title("every ramp is straight in each of six buckets", fontsize=9, loc="left")
    # Numbers in the middle of the buckets; the last bucket ends with the drawing.
    ends = np.append(edges, span[1])
    for number, middle in enumerate((ends[:-1] + ends[1:]) / 2, start=1):
        top.annotate(f"$B_{number}$", (middle, 1.1), ha="center", color=palette.text, fontsize=9)
    top.annotate("discarded", ((span[0] + edges[0]) / 2, 1.1), ha="center", color=palette.text, fontsize=8)

    exact = ranks(NEGATIVES, np.ones_like(NEGATIVES))
    bucket = np.searchsorted(POSITIVES, NEGATIVES, side="right")
    relevant = POSITIVES.min() - DELTA <= NEGATIVES
    means = np.array([NEGATIVES[relevant & (bucket == b)].mean() for b in range(len(POSITIVES) + 1)])
    steps = gradient(means, ranks(means, np.bincount(bucket[relevant]).astype(float)))
    bounds = np.concatenate([[POSITIVES[0] - DELTA], POSITIVES, [span[1]]])
    bottom.stairs(steps, bounds, baseline=None, color=palette.rival, linewidth=1.4, linestyle="--")
    bottom.plot(means, steps, "D", color=palette.rival, markersize=4.5)
    bottom.plot(line, gradient(line, exact), color=palette.text, linewidth=1.6)
    bottom.plot(NEGATIVES, gradient(NEGATIVES, exact), "o", color=palette.text, markersize=4.5)
    for label, form, colour in (
        ("one mean between two positives (the paper)", "D--", palette.rival),
        ("exact, at each negative", "o-", palette.text),
    ):
        bottom.plot([], [], form, color=colour, markersize=4.5, linewidth=1.4, label=label)
    bottom.plot(NEGATIVES, np.full_like(NEGATIVES, -0.016), "|", color=palette.point, markersize=9, markeredgewidth=1.3)
    bottom.set(xlabel="logit $s$ of a negative (the ticks are the negatives)", ylabel="gradient of a negative")
    bottom.set(xlim=span, ylim=(-0.028, 0.2), yticks=[0, 0.05, 0.1, 0.15])
    bottom.legend(loc="upper left", handletextpad=0.3)
    return figure


if __name__ == "__main__":
    save("exact-bucketing", draw)
