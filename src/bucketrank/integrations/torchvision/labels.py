"""Check of the ground-truth labels in torchvision's targets."""

from __future__ import annotations

import torch
from torch import Tensor


def check_label_shapes(targets: list[dict[str, Tensor]]) -> None:
    """Raise unless every box has one label."""
    for index, target in enumerate(targets):
        if "labels" not in target:
            got = ", ".join(target)
            raise ValueError(
                f"use_ranking_loss: expected labels in every target, got {got} in target {index}; add them"
            )
        if target["labels"].shape != target["boxes"].shape[:1]:
            raise ValueError(
                f"use_ranking_loss: expected labels of shape ({len(target['boxes'])},), one for each box, got "
                f"{tuple(target['labels'].shape)} in target {index}; correct the targets"
            )


def check_labels(targets: list[dict[str, Tensor]], *, first: int, last: int) -> None:
    """Raise unless every box has one label, from ``first`` to ``last``.

    The check costs one device sync. torchvision itself syncs several times in the same step.
    """
    check_label_shapes(targets)
    labels = torch.cat([target["labels"] for target in targets])
    if labels.numel() == 0:
        return
    lowest, highest = torch.stack(labels.aminmax()).tolist()
    if first <= lowest and highest <= last:
        return
    background = " (0 is the background)" if first else ""
    wrong = lowest if not lowest >= first else highest
    raise ValueError(
        f"use_ranking_loss: expected labels from {first} to {last}{background}, got {wrong}; "
        "correct the targets, or build the model with more classes"
    )
