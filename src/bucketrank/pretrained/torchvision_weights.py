"""Weights of torchvision's detectors: its COCO weights, or a .safetensors file with the same names."""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from bucketrank.detectors.safetensors_reading import read_safetensors
from bucketrank.detectors.torchvision_download import coco_weights

# The layers whose shape depends on the number of classes, as parts of the names of their tensors.
CLASS_LAYERS = (
    "roi_heads.box_predictor.",
    "roi_heads.mask_predictor.mask_fcn_logits.",
    "head.classification_head.cls_logits.",
    "head.classification_head.module_list.",  # SSD
)
OTHER_WEIGHTS = (
    "pass a file with --detector.weights FILE.safetensors, or start from random weights with --detector.weights null"
)
SIZE_MISMATCH = re.compile(r"size mismatch for ([\w.]+):")  # in the message of torch
COUNTER = "num_batches_tracked"  # of batch norms; frozen ones have none


def load_torchvision_weights(model: nn.Module, name: str, weights: str) -> list[str]:
    """Load ``weights`` (coco or a file) into a model; return the names of tensors that keep their initial values.

    Only tensors of class layers may keep them, where the number of classes differs. Names of earlier versions of
    torchvision, which most of its COCO weights have, are renamed by torchvision itself. ValueError for weights of
    another architecture, ConnectionError if a download fails.
    """
    if weights == "coco":
        state, _ = coco_weights(name, setting="detector.weights", remedy=OTHER_WEIGHTS)
    else:
        state = read_safetensors(Path(weights), setting="detector.weights", others="null, coco")
    own = model.state_dict()
    reshaped = [
        each for each in own if each.startswith(CLASS_LAYERS) and each in state and own[each].shape != state[each].shape
    ]
    try:
        keys = model.load_state_dict({each: state[each] for each in state if each not in reshaped}, strict=False)
        misfits = [*(each for each in keys.missing_keys if each not in reshaped), *keys.unexpected_keys]
    except RuntimeError as error:
        misfits = SIZE_MISMATCH.findall(str(error)) or [str(error).partition("\n")[0]]
    misfits = [each for each in misfits if not each.endswith(COUNTER)]
    if misfits:
        raise ValueError(
            f"detector.weights: expected weights of torchvision's {name}, got {weights} with {len(misfits)} tensors "
            f"that are missing, unknown or of another shape, like {misfits[0]}; choose the model of the file with "
            "--detector torchvision/MODEL"
        )
    return reshaped
