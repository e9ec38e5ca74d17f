"""The effect of delta on a comparison and on a gradient: python -m docs.figures.delta."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from docs.figures.theme import Palette, mark, save

Array = NDArray[np.float64]

POSITIVES = np.array([-1.0, 0.2, 0.9])
NEGATIVES = np.random.default_rng(0).normal(0, 1, 40)
DELTAS = (0.0, 0.5, 1.0)


def step(x: Array, delta: float) -> Array:
    return np.where(x >= 0, 1.0, 0.0) if delta == 0 else np.clip(x / (2 * delta) + 0.5, 0, 1)


def gradient(logits: Array, delta: float) -> Array:
    """Return the gradient of AP loss for a negative at each of ``logits``."""
    rank = sum(step(others - POSITIVES[:, None], delta).sum(1) for others in (POSITIVES, NEGATIVES))
    pushed: Array = (step(logits - POSITIVES[:, None], delta) / rank[:, None]).mean(0)
    return pushed


def draw(palette: Palette) -> Figure:
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(4.6, 5.2), layout="constrained")
    for colour, delta in zip(palette.series, DELTAS, strict=True):
        name = rf"$\delta = {delta:g}$"
        x = np.union1d(np.linspace(-1.6, 1.6, 801), [-1e-9, 0.0])
        upper.plot(x, step(x, delta), color=colour, linewidth=1.8, label=name)
        s = np.union1d(np.linspace(-2.4, 2.4, 1201), np.concatenate([POSITIVES, POSITIVES - 1e-9]))
        lower.plot(s, gradient(s, delta), color=colour, linewidth=1.8, label=name)
    upper.set(xlabel=r"$x = s_j - s_i$", ylabel="$H(x)$", yticks=[0, 0.5, 1], xlim=(-1.6, 1.6))
    upper.legend(loc="upper left")
    upper.set_title("one comparison", fontsize=9, loc="left")
    mark(lower, POSITIVES, palette)
    lower.set(xlabel="logit of a negative (dashed: positives)", ylabel="gradient of a negative", xlim=(-2.4, 2.4))
    lower.set_title("the gradient: three positives, 40 negatives", fontsize=9, loc="left")
    return figure


if __name__ == "__main__":
    save("delta", draw)
