"""Colours of losses and methods, and the files of a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bucketrank.output import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DARK, LIGHT = "#444444", "#AAAAAA"
# Losses and methods have the same colours in all figures.
LOSS_COLOURS = {
    "rs": BLUE,
    "rsq": SKY,
    "ap": GREEN,
    "focal": VERMILION,
    "ce": VERMILION,
    "qfl": ORANGE,
    "mal": ORANGE,
    "vfl": PURPLE,
    "bce": GREY,
    "iabce": YELLOW,
    "dr": PURPLE,
    "alrp": SKY,
}
METHOD_COLOURS = {"exact": BLUE, "bucketed": ORANGE, "pairwise": VERMILION}


def save_figure(figure: Figure, out: Path, name: str) -> list[Path]:
    """Write ``name``.png and ``name``.svg to the folder ``out`` and return both paths."""
    paths = [out / f"{name}.png", out / f"{name}.svg"]
    figure.savefig(paths[0], dpi=200)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths
