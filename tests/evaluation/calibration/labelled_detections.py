"""Ground truth for detections of untrained models: some of the detections themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bucketrank.evaluation.calibration.scores import as_detections


def objects_among(outputs: Iterable[Any]) -> list[dict[str, Tensor]]:
    """Make detections objects, the more likely the higher their score: half of them at the 80th percentile."""
    generator = torch.Generator().manual_seed(2)
    found = [as_detections(output) for output in outputs]
    logits = [each["scores"].double().logit(eps=1e-9) for each in found]
    every = torch.cat(logits)
    middle, spread = every.quantile(0.8), every.std()
    objects = []
    for each, values in zip(found, logits, strict=True):
        kept = torch.rand(len(values), generator=generator) < (3 * (values - middle) / spread).sigmoid()
        objects.append({name: each[name][kept] for name in ("boxes", "labels")})
    return objects
