"""Models of transformers: from a folder or the hub with their weights, or from a stored configuration without any."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import nn
from transformers.utils import logging as library_logging

from bucketrank.detectors.hub_download import hub_access, hub_offline
from bucketrank.integrations.transformers.adapter import REFUSED
from bucketrank.pretrained.image_preparation import FAMILIES, PROCESSOR_KEYS

CLASS_LAYERS = ("class_embed", "class_labels_classifier", "enc_score_head", "denoising_class_embed")
LABEL_KEYS = ("id2label", "label2id", "num_labels")  # of a configuration; the classes are those of the data
PRIOR = 0.01  # probability of a new class layer that transformers leaves at 0.5
REMEDY = "give a folder with config.json and model.safetensors: --detector transformers/FOLDER"


def load_pretrained(name: str, *, num_classes: int, weights: bool) -> tuple[Any, dict[str, Any]]:
    """Return the model of a folder or hub name, with new class layers, and the description of its images.

    With ``weights`` False only the configuration is read, and the weights are random.
    """
    with _reading(name), _quiet():
        config = _read_config(name, num_classes)
        _check_type(name, config)
        processor = _read_processor(name)
        if not weights:
            return build_model(stored_config(config), num_classes=num_classes), processor
        # The default dtype would be that of the file, which may be half precision.
        model, info = transformers.AutoModelForObjectDetection.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    _check_loaded(name, info)
    _set_priors(model, [key for key, *_ in info["mismatched_keys"]])
    return model, processor


def build_model(config: Mapping[str, Any], *, num_classes: int) -> Any:
    """Build a model with random weights from a stored configuration; nothing is downloaded."""
    settings = dict(config)
    model_type = settings.pop("model_type", None)
    if model_type not in FAMILIES:
        raise ValueError(
            f"detector.config: expected a model_type among {', '.join(FAMILIES)}, got {model_type!r}; "
            "the text is the config.json of a model"
        )
    _require_timm_backbones(settings)
    with hub_offline(), _quiet():
        built = transformers.AutoConfig.for_model(model_type, **settings, num_labels=num_classes)
        model = transformers.AutoModelForObjectDetection.from_config(built, trust_remote_code=False)
    _set_priors(model, [name for name, _ in model.named_parameters()])
    return model


def stored_config(config: Any) -> dict[str, Any]:
    """Return a configuration as plain values, without the names of classes and without private settings."""
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return {key: value for key, value in _public(content).items() if key not in LABEL_KEYS}


def parse_config(setting: str, text: str) -> dict[str, Any]:
    """Return the values of a stored JSON text; ValueError if it is not a JSON object."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"detector.{setting}: expected JSON, got {text!r:.60} ({error})") from error
    if not isinstance(content, dict):
        raise TypeError(f"detector.{setting}: expected a JSON object, got {text!r:.60}")
    return _public(content)


def _public(content: dict[str, Any]) -> dict[str, Any]:
    """Return the values without private ones, which could name code on the hub (kernels, remote classes)."""
    return {
        key: _public(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if not key.startswith("_") and key not in ("attn_implementation", "auto_map", "transformers_version")
    }


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Read a folder, or the hub if there is no such folder; a failure becomes one line that says what to do."""
    if Path(name).is_dir():
        try:
            yield
        except OSError as error:
            reason = str(error).partition("\n")[0]
            raise FileNotFoundError(f"detector.name: {name} cannot be read ({reason:.300}); {REMEDY}") from error
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"detector.name: expected a folder or a name on the hub, got {name!r}; {REMEDY}")
    with hub_access(f"detector.name: {name}", REMEDY):
        yield


def _read_config(name: str, num_classes: int) -> Any:
    """Read a configuration; ValueError if it needs Python code from its folder, which is never run."""
    try:
        return transformers.AutoConfig.from_pretrained(name, num_labels=num_classes, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"detector.name: expected a model of transformers itself, got {name}, which brings Python code of its own; "
            f"such code is never run: choose a detector of type {', '.join(FAMILIES)}"
        ) from error


def _require_timm_backbones(config: Mapping[str, Any]) -> None:
    """Raise ValueError if a configuration names a backbone that timm would read from a folder or the hub."""
    for key, value in config.items():
        if isinstance(value, dict):
            _require_timm_backbones(value)
        elif key == "backbone" and value is not None and not (isinstance(value, str) and timm.is_model(value)):
            raise ValueError(
                f"detector.config: expected the name of a timm model as backbone, got {value!r:.100}; "
                "see timm.list_models()"
            )


def _check_type(name: str, config: Any) -> None:
    if config.model_type in FAMILIES and getattr(config, "use_focal_loss", True):
        return
    reasons = [REFUSED[each] for each in getattr(config, "architectures", None) or () if each in REFUSED]
    raise ValueError(
        f"detector.name: expected a detector of type {', '.join(FAMILIES)}, with sigmoid scores, got "
        f"{config.model_type} in {name}" + "".join(f": {reason}" for reason in reasons[:1])
    )


def _read_processor(name: str) -> dict[str, Any]:
    """Return the size and normalisation of the model's images; empty if its folder does not describe them."""
    try:
        content, _ = transformers.ImageProcessingMixin.get_image_processor_dict(name)
    except OSError:
        return {}
    return {key: content[key] for key in PROCESSOR_KEYS if key in content}


def _check_loaded(name: str, info: Mapping[str, Any]) -> None:
    """Raise unless every tensor came from the file, except those of class layers for another number of classes."""
    reshaped = [key for key, *_ in info["mismatched_keys"]]
    others = [key for key in reshaped if not any(layer in key for layer in CLASS_LAYERS)]
    misfits = [*sorted(info["missing_keys"]), *sorted(info["unexpected_keys"]), *sorted(others)]
    if misfits:
        raise ValueError(
            f"detector.name: expected weights that fit the config.json of {name}, got {len(misfits)} tensors that are "
            f"missing, unknown or have another shape, like {misfits[0]}; {REMEDY}"
        )


def _set_priors(model: nn.Module, names: list[str]) -> None:
    """Set the biases of new class layers that transformers leaves at 0 to the prior of focal loss."""
    parameters = dict(model.named_parameters())
    for name in names:
        is_bias = name in parameters and name.endswith("bias") and any(layer in name for layer in CLASS_LAYERS)
        if is_bias and not parameters[name].any():
            nn.init.constant_(parameters[name], -math.log((1 - PRIOR) / PRIOR))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the reports and progress bars of transformers: what matters is checked here."""
    verbosity, bars = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(verbosity)
        if bars:
            library_logging.enable_progress_bar()
