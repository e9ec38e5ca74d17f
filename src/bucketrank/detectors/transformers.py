"""Detection models of the transformers library behind our detector interface.

Models are loaded from a folder or the hub with their weights, or rebuilt from a stored configuration. Input size and
normalisation come from the user, the model's folder or its family, in this order. Remote code is never run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn
from torchvision.ops import box_convert, clip_boxes_to_image
from transformers.image_processing_utils import get_size_dict
from transformers.utils import logging as library_logging

from bucketrank.detectors.backbone import IMAGENET_MEAN, IMAGENET_STD
from bucketrank.detectors.base import LibraryDetector, LibraryTransform, Target, ranking_arguments
from bucketrank.detectors.dense import top_scores
from bucketrank.errors import first_line
from bucketrank.evaluation.calibration.mapping import ScoreHead
from bucketrank.integrations.transformers import use_ranking_loss
from bucketrank.integrations.transformers.adapter import REFUSED
from bucketrank.integrations.transformers.scores import score_head
from bucketrank.settings import LibraryInputSettings, LossSettings
from bucketrank.settings.detector_specs import require_few_pixels
from bucketrank.settings.library_specs import TransformersSettings
from bucketrank.weights.sources import hub_access, hub_offline

SQUARE_SIDE = 640  # default for square inputs
SHORTER_SIDE, LONGER_SIDE = 800, 1333  # default for other inputs
PROCESSOR_KEYS = ("size", "do_normalize", "image_mean", "image_std")  # keys in preprocessor_config.json


@dataclass(frozen=True)
class Family:
    """Default inputs of a model family: square or not, normalised or not, sides a multiple of ``divisor``."""

    square: bool = True
    normalised: bool = True
    divisor: int = 32


# Keys are the configuration's ``model_type``.
FAMILIES = {
    "deformable_detr": Family(square=False, divisor=1),
    "conditional_detr": Family(square=False, divisor=1),
    "dab-detr": Family(square=False, divisor=1),
    "rt_detr": Family(normalised=False),
    "rt_detr_v2": Family(normalised=False),
    "d_fine": Family(normalised=False),
    "deimv2": Family(normalised=False),
    "lw_detr": Family(),
    "rf_detr": Family(),
}


class SquareTransform(LibraryTransform):
    """Resize all images of a batch to a square of the same size, drawn at random in training."""

    def forward(
        self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> tuple[Any, list[dict[str, Tensor]] | None]:
        side = self.torch_choice(list(self.min_size)) if self.training else self.min_size[-1]
        self.fixed_size = (side, side)
        batch, resized = super().forward(images, targets)
        return batch, resized


def input_transform(config: Any, processor: Mapping[str, Any], inputs: LibraryInputSettings) -> LibraryTransform:
    """Build a model's transform from the user's settings, else its folder, else its family."""
    family = FAMILIES[config.model_type]
    size = processor.get("size") or {}
    square = "height" in size or (family.square and "shortest_edge" not in size)
    normalised = processor.get("do_normalize", family.normalised)
    mean = inputs.image_mean or (processor.get("image_mean") or IMAGENET_MEAN if normalised else (0.0, 0.0, 0.0))
    std = inputs.image_std or (processor.get("image_std") or IMAGENET_STD if normalised else (1.0, 1.0, 1.0))
    normalisation: dict[str, Any] = {"image_mean": list(mean), "image_std": list(std)}
    if not square:
        sizes = inputs.sizes or (int(size.get("shortest_edge", SHORTER_SIDE)),)
        longest = inputs.max_size or max(int(size.get("longest_edge", LONGER_SIDE)), *sizes)
        require_few_pixels(max(sizes), longest)
        divisor = inputs.size_divisor or 1
        return LibraryTransform(min_size=sizes, max_size=longest, size_divisible=divisor, **normalisation)
    sides = inputs.sizes or (int(size.get("height", _usual_side(config))),)
    require_few_pixels(max(sides), max(sides))
    _check_sides(config, sides, inputs)
    return SquareTransform(min_size=sides, max_size=max(sides), size_divisible=1, fixed_size=None, **normalisation)


def side_divisor(config: Any) -> int:
    """Return the divisor of a model's valid input sides."""
    backbone = getattr(config, "backbone_config", None)
    patch, windows = getattr(backbone, "patch_size", None), getattr(backbone, "num_windows", None)
    if config.model_type == "lw_detr" and patch and windows:
        return int(patch) * math.isqrt(windows)
    if config.model_type == "rf_detr" and patch and windows:
        return int(patch) * int(windows)
    return FAMILIES[config.model_type].divisor


def _usual_side(config: Any) -> int:
    """Return the backbone's native side, or the default, rounded to a valid side."""
    side = getattr(getattr(config, "backbone_config", None), "image_size", None)
    divisor = side_divisor(config)
    usual = side if config.model_type == "rf_detr" and isinstance(side, int) else SQUARE_SIDE
    return max(divisor, round(usual / divisor) * divisor)


def _check_sides(config: Any, sides: tuple[int, ...], inputs: LibraryInputSettings) -> None:
    divisor = side_divisor(config)
    for side in sides:
        if side % divisor:
            near = max(divisor, round(side / divisor) * divisor)
            raise ValueError(
                f"inputs.min_size: expected multiples of {divisor} for the square inputs of {config.model_type}, "
                f"got {side}; the nearest is {near}"
            )
    if inputs.max_size is not None and inputs.max_size != max(sides):
        raise ValueError(
            f"inputs.max_size: expected null for a model with square inputs, got {inputs.max_size}; set inputs.min_size"
        )
    if inputs.size_divisor is not None:
        raise ValueError(
            f"inputs.size_divisor: expected null for a model with square inputs, which are not padded, "
            f"got {inputs.size_divisor}; set inputs.min_size"
        )


CLASS_LAYERS = ("class_embed", "class_labels_classifier", "enc_score_head", "denoising_class_embed")
LABEL_KEYS = ("id2label", "label2id", "num_labels")  # configuration keys; classes come from the data
PRIOR = 0.01  # initial score of new class layers, which transformers leaves at 0.5
REMEDY = "give a folder with config.json and model.safetensors: --detector transformers/FOLDER"


def load_pretrained(name: str, *, num_classes: int, weights: bool) -> tuple[Any, dict[str, Any]]:
    """Load a model with new class layers, and its input description, from a folder or the hub.

    If ``weights`` is False, only the configuration is read, and the weights are random.
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
    """Convert a configuration to plain values, without class names and private settings."""
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return {key: value for key, value in _public(content).items() if key not in LABEL_KEYS}


def parse_config(setting: str, text: str) -> dict[str, Any]:
    """Parse a stored JSON object."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"detector.{setting}: expected JSON, got {text!r:.60} ({error})") from error
    if not isinstance(content, dict):
        raise TypeError(f"detector.{setting}: expected a JSON object, got {text!r:.60}")
    return _public(content)


def _public(content: dict[str, Any]) -> dict[str, Any]:
    """Drop private values, which could refer to code on the hub (kernels, remote classes)."""
    return {
        key: _public(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if not key.startswith("_") and key not in ("attn_implementation", "auto_map", "transformers_version")
    }


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn failures to read a folder, or the hub if no such folder exists, into one line with a remedy."""
    if Path(name).is_dir():
        try:
            yield
        except OSError as error:
            unread = f"detector.name: {name} cannot be read ({first_line(error):.300})"
            raise FileNotFoundError(f"{unread}; {REMEDY}") from error
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
            f"detector.name: expected a model built into transformers, got {name}, which brings its own Python code; "
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
    """Read the model's input size and normalisation; empty if its folder has none."""
    try:
        content, _ = transformers.ImageProcessingMixin.get_image_processor_dict(name)
    except OSError:
        return {}
    if isinstance(content.get("size"), int):  # older versions wrote a number, and the longer side as max_size
        longest = content.get("max_size")
        content["size"] = get_size_dict(content["size"], max_size=longest, default_to_square=longest is None)
    return {key: content[key] for key in PROCESSOR_KEYS if key in content}


def _check_loaded(name: str, info: Mapping[str, Any]) -> None:
    """Raise unless every tensor came from the file; only class layers may have another shape."""
    reshaped = [key for key, *_ in info["mismatched_keys"]]
    others = [key for key in reshaped if not any(layer in key for layer in CLASS_LAYERS)]
    misfits = [*sorted(info["missing_keys"]), *sorted(info["unexpected_keys"]), *sorted(others)]
    if misfits:
        raise ValueError(
            f"detector.name: expected weights that fit the config.json of {name}, got {len(misfits)} tensors that are "
            f"missing, unknown or have another shape, like {misfits[0]}; {REMEDY}"
        )


def _set_priors(model: nn.Module, names: list[str]) -> None:
    """Set zero biases of new class layers to the focal loss prior."""
    parameters = dict(model.named_parameters())
    for name in names:
        is_bias = name in parameters and name.endswith("bias") and any(layer in name for layer in CLASS_LAYERS)
        if is_bias and not parameters[name].any():
            nn.init.constant_(parameters[name], -math.log((1 - PRIOR) / PRIOR))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log and progress bars of transformers; this module does its own checks."""
    verbosity, bars = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(verbosity)
        if bars:
            library_logging.enable_progress_bar()


class TransformersDetector(LibraryDetector):
    """A detection transformer for ``num_classes`` classes, with its own loss or a ranking loss.

    Its single loss term is the weighted sum over all terms and layers. Boxes are relative to the resized image without
    padding.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        settings: TransformersSettings,
        loss: LossSettings,
        inputs: LibraryInputSettings,
    ) -> None:
        super().__init__(num_classes)
        ranking = ranking_arguments(loss)
        if ranking is None:
            settings.require("class_cost", "null with the model's own loss", holds=settings.class_cost is None)
        self.detections, self.score_threshold = settings.detections, settings.score_threshold
        model, processor = _build(num_classes, settings)
        self.model = model
        self.config_text = json.dumps(stored_config(model.config), sort_keys=True)
        self.processor_text = json.dumps(processor, sort_keys=True)
        self.transform = input_transform(model.config, processor, inputs)
        part = "backbone" if hasattr(model.model, "backbone") else "conv_encoder"  # the latter in DEIMv2
        self.backbone_prefix = f"model.model.{part}."
        for name, parameter in model.named_parameters():
            if name.endswith("mask_token"):  # a leftover of masked pretraining that gets no gradient, which stops DDP
                parameter.requires_grad_(requires_grad=False)
        if settings.freeze_backbone:
            getattr(model.model, part).requires_grad_(requires_grad=False)
        if ranking is not None:
            use_ranking_loss(model, **ranking, class_cost=settings.class_cost)
        self.train()

    def complete_settings(self, settings: Any) -> Any:
        return replace(settings, config=self.config_text, processor=self.processor_text)

    def score_head(self) -> ScoreHead:
        return replace(score_head(self.model), first_label=1, thresholds=((self, "score_threshold"),))

    def model_losses(self, images: list[Tensor], targets: list[Target]) -> dict[str, Tensor]:
        batch, resized = self.transform(images, targets)
        labels = []
        for target, (height, width) in zip(resized, batch.image_sizes, strict=True):
            sides = target["boxes"].new_tensor([width, height, width, height])
            boxes = box_convert(target["boxes"] / sides, "xyxy", "cxcywh")
            labels.append({"class_labels": target["labels"] - 1, "boxes": boxes})
        output = self.model(pixel_values=batch.tensors, pixel_mask=_pixel_mask(batch), labels=labels)
        return {"loss": output.loss}

    def model_detections(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        batch, _ = self.transform(images)
        output = self.model(pixel_values=batch.tensors, pixel_mask=_pixel_mask(batch))
        results = []
        for logits, boxes, (height, width) in zip(output.logits, output.pred_boxes, sizes, strict=True):
            scores, rows, labels = top_scores(
                logits.float().sigmoid(), limit=self.detections, threshold=self.score_threshold
            )
            sides = boxes.new_tensor([width, height, width, height]).float()
            corners = box_convert(boxes[rows].float(), "cxcywh", "xyxy") * sides
            clipped = clip_boxes_to_image(corners, (height, width))
            results.append({"boxes": clipped, "labels": labels + 1, "scores": scores})
        return results


def _build(num_classes: int, settings: TransformersSettings) -> tuple[Any, dict[str, Any]]:
    if settings.weights is not None or settings.config is None:
        return load_pretrained(settings.model, num_classes=num_classes, weights=settings.weights is not None)
    model = build_model(parse_config("config", settings.config), num_classes=num_classes)
    return model, {} if settings.processor is None else parse_config("processor", settings.processor)


def _pixel_mask(batch: Any) -> Tensor:
    """Build a mask (B, H, W): 1 on the images, 0 on padding."""
    height, width = batch.tensors.shape[-2:]
    device = batch.tensors.device
    sizes = torch.tensor(batch.image_sizes, device=device)
    rows = torch.arange(height, device=device) < sizes[:, :1]
    columns = torch.arange(width, device=device) < sizes[:, 1:]
    return (rows[:, :, None] & columns[:, None]).long()
