"""``build_backbone``: from the settings of a backbone to the backbone."""

from __future__ import annotations

from typing import Any

import timm

from bucketrank.catalogue import BackboneSettings
from bucketrank.detectors.backbone import IMAGENET_MEAN, IMAGENET_STD, STRIDES, Backbone
from bucketrank.detectors.backbone_weights import check_timm_weights
from bucketrank.detectors.deformable import make_deformable
from bucketrank.detectors.hub_download import downloading
from bucketrank.detectors.swin import SWIN, build_swin


def build_backbone(settings: BackboneSettings) -> Backbone:
    """Build the backbone of ``settings``, in training mode.

    >>> import torch
    >>> backbone = build_backbone(BackboneSettings(name="resnet18"))
    >>> [tuple(map.shape) for map in backbone(torch.rand(1, 3, 97, 131))]
    [(1, 64, 25, 33), (1, 128, 13, 17), (1, 256, 7, 9), (1, 512, 4, 5)]
    """
    settings.check_name()
    if settings.name in SWIN:
        body = build_swin(settings.name, settings.weights)
        maps, channels, mean, std = [0, 1, 2, 3], list(body.channels), IMAGENET_MEAN, IMAGENET_STD
    else:
        body = _build_timm(settings.name, settings.weights)
        maps = stride_positions(settings.name, body.feature_info.reduction())
        channels = [body.feature_info.channels()[i] for i in maps]
        mean, std = tuple(body.pretrained_cfg["mean"]), tuple(body.pretrained_cfg["std"])
    if settings.deformable_groups:
        make_deformable(body, groups=settings.deformable_groups)
    has_weights = settings.weights is not None
    frozen_stages = int(has_weights) if settings.frozen_stages is None else settings.frozen_stages
    freeze_batch_norm = settings.batch_norm == "frozen" or (settings.batch_norm == "auto" and has_weights)
    backbone = Backbone(
        body,
        maps=maps,
        channels=channels,
        mean=mean,
        std=std,
        frozen_stages=frozen_stages,
        freeze_batch_norm=freeze_batch_norm,
    )
    if settings.checkpointing:
        _use_checkpointing(settings.name, body)
    return backbone


def stride_positions(name: str, reductions: list[int]) -> list[int]:
    """Return the positions of the four strides among a model's maps; of maps with equal stride, the deepest one's."""
    if missing := [stride for stride in STRIDES if stride not in reductions]:
        raise ValueError(
            f"backbone.name: expected a model with maps at strides {STRIDES}, got {name!r} with "
            f"{list(reductions)} and without {missing}"
        )
    last = {reduction: i for i, reduction in enumerate(reductions)}
    return [last[stride] for stride in STRIDES]


def _build_timm(name: str, weights: str | None) -> Any:
    configuration = timm.get_pretrained_cfg(name)
    if configuration is not None and configuration.fixed_input_size:
        raise ValueError(
            f"backbone.name: expected a model for images of any size, got {name!r} for "
            f"{configuration.input_size[1]} x {configuration.input_size[2]}; for Swin use {' or '.join(SWIN)}"
        )
    if weights is None:
        return timm.create_model(name, features_only=True)
    if weights == "pretrained":
        if configuration is None or not configuration.has_weights:
            raise ValueError(
                f"backbone.weights: expected null or a file for {name}, which timm has no weights of, got pretrained"
            )
        with downloading(name):
            return timm.create_model(name, features_only=True, pretrained=True)
    check_timm_weights(name, weights)
    overlay = {"file": weights, "custom_load": False}
    return timm.create_model(name, features_only=True, pretrained=True, pretrained_cfg_overlay=overlay)


def _use_checkpointing(name: str, body: Any) -> None:
    if name in SWIN:
        body.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for part in body.children():  # each part is recomputed from its input, which it must not overwrite
        if getattr(part, "inplace", False):
            part.inplace = False
    owner = body if hasattr(body, "set_grad_checkpointing") else getattr(body, "model", None)
    try:
        owner.set_grad_checkpointing(enable=True)  # type: ignore[union-attr]
    except (AttributeError, AssertionError) as error:
        raise ValueError(
            f"backbone.checkpointing: expected false for {name!r}, which timm cannot checkpoint, got true"
        ) from error
