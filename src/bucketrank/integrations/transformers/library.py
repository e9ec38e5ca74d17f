"""Check, at import, the transformers functions and classes that the adapter relies on."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

SUPPORTED = "transformers 5 (tested with 5.0 and 5.22)"

_CALL = ("logits", "labels", "device", "pred_boxes", "config", "outputs_class", "outputs_coord")
_DENOISED = (*_CALL, "enc_topk_logits", "enc_topk_bboxes", "denoising_meta_values")
_REFINED = (*_DENOISED, "predicted_corners", "initial_reference_points")
_TERM = ("self", "loss", "outputs", "targets", "indices", "num_boxes")
_MATCHER = ("class_cost", "bbox_cost", "giou_cost")

# Module in transformers.loss: function or class: its first parameters. Models call our loss with the arguments of the
# library's loss.
EXPECTED = {
    "loss_deformable_detr": {
        "DeformableDetrForObjectDetectionLoss": _CALL,
        "DeformableDetrHungarianMatcher": _MATCHER,
        "DeformableDetrImageLoss": ("matcher", "num_classes", "focal_alpha", "losses"),
        "DeformableDetrImageLoss.get_loss": _TERM,
    },
    "loss_rt_detr": {
        "RTDetrForObjectDetectionLoss": _DENOISED,
        "RTDetrLoss": ("config",),
        "RTDetrLoss.get_loss": _TERM,
    },
    "loss_d_fine": {
        "DFineForObjectDetectionLoss": _REFINED,
        "DFineLoss": ("config",),
        "DFineLoss.get_loss": _TERM,
    },
    "loss_deimv2": {
        "Deimv2ForObjectDetectionLoss": _REFINED,
        "Deimv2Loss": ("config",),
        "Deimv2Loss.get_loss": _TERM,
    },
    "loss_lw_detr": {
        "LwDetrForObjectDetectionLoss": (*_CALL, "enc_outputs_class", "enc_outputs_coord"),
        "LwDetrHungarianMatcher": _MATCHER,
        "LwDetrImageLoss": ("matcher", "num_classes", "focal_alpha", "losses", "group_detr"),
        "LwDetrImageLoss.get_loss": _TERM,
    },
}


def check_library() -> None:
    """Raise ``ImportError``, naming the supported versions, if the installed transformers does not fit the adapter."""
    if find_spec("transformers") is None:
        raise ImportError(
            f"bucketrank.integrations.transformers: expected {SUPPORTED}, got none; "
            'install it with: pip install "bucketrank[transformers]"'
        )
    version = import_module("transformers").__version__
    if int(version.split(".")[0]) < 5:
        _refuse(version, "transformers 5 or newer", f"version {version}")
    loss_function = import_module("transformers").PreTrainedModel.__dict__.get("loss_function")
    if not isinstance(loss_function, property) or loss_function.fset is None:
        _refuse(version, "PreTrainedModel.loss_function to be a property with a setter", repr(loss_function))
    for module, functions in EXPECTED.items():
        # Some models were added after 5.0. A version without their loss does not have these models either.
        if find_spec(f"transformers.loss.{module}") is None:
            continue
        for name, parameters in functions.items():
            actual = _parameters(module, name)
            if actual[: len(parameters)] != parameters:
                _refuse(version, f"{module}.{name}({', '.join(parameters)})", f"({', '.join(actual)})")


def library_class(module: str, name: str) -> Any:
    """Import a class or function of ``transformers.loss`` on first use, because its module is slow to import."""
    return getattr(import_module(f"transformers.loss.{module}"), name)


def _parameters(module: str, name: str) -> tuple[str, ...]:
    attribute: Any = import_module(f"transformers.loss.{module}")
    for part in name.split("."):
        attribute = getattr(attribute, part, None)
    if attribute is None:
        return ("no such name",)
    return tuple(inspect.signature(attribute).parameters)


def _refuse(version: str, expected: str, got: str) -> None:
    raise ImportError(
        f"bucketrank.integrations.transformers: expected {expected}, got {got} in transformers {version}; "
        f"supported: {SUPPORTED}"
    )
