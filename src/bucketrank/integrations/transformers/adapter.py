"""Giving a model the ranking loss, and taking it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bucketrank.integrations.ranking import Ranking
from bucketrank.integrations.transformers.criterion import Target
from bucketrank.integrations.transformers.layouts import (
    Call,
    Result,
    Settings,
    d_fine,
    deimv2,
    detr,
    grouped,
    rt_detr,
)

Model = TypeVar("Model", bound=nn.Module)

MODELS: dict[str, Callable[[Call, Settings], Result]] = {
    "DeformableDetrForObjectDetection": detr,
    "DabDetrForObjectDetection": detr,
    "ConditionalDetrForObjectDetection": detr,
    "RTDetrForObjectDetection": rt_detr,
    "RTDetrV2ForObjectDetection": rt_detr,
    "DFineForObjectDetection": d_fine,
    "Deimv2ForObjectDetection": deimv2,
    "LwDetrForObjectDetection": grouped,
    "RfDetrForObjectDetection": grouped,
}

_SOFTMAX = (
    "its classifier is a softmax with a no-object class, so its logits say how the classes of one query compare and "
    "not how queries compare, which a ranking needs"
)
_TEXT = "it scores queries against the words of a prompt, so its logits have no fixed classes to be ranked over"
_MASKS = "its loss matches and trains masks, which the ranking loss does not cover yet"
REFUSED = {
    "DetrForObjectDetection": _SOFTMAX,
    "YolosForObjectDetection": _SOFTMAX,
    "TableTransformerForObjectDetection": _SOFTMAX,
    "GroundingDinoForObjectDetection": _TEXT,
    "MMGroundingDinoForObjectDetection": _TEXT,
    "OmDetTurboForObjectDetection": _TEXT,
    "OwlViTForObjectDetection": _TEXT,
    "Owlv2ForObjectDetection": _TEXT,
    "ConditionalDetrForSegmentation": _MASKS,
    "DetrForSegmentation": _MASKS,
    "RfDetrForInstanceSegmentation": _MASKS,
}


class RankingLoss:
    """What ``model.loss_function`` becomes.

    Not a module: transformers would register that as a part of the model and go on with its own loss. Not a closure
    either, so that a model can be copied and pickled with it.
    """

    def __init__(self, family: Callable[[Call, Settings], Result], settings: Settings) -> None:
        self.family, self.settings = family, settings
        self.replaced: dict[str, Any] = {}
        self.hooks: list[Any] = []
        self.proposals: tuple[Tensor, Tensor] | None = None

    def __call__(
        self,
        logits: Tensor,
        labels: list[Target],
        device: torch.device,  # noqa: ARG002  what the models pass
        pred_boxes: Tensor,
        config: Any,
        outputs_class: Tensor | None = None,
        outputs_coord: Tensor | None = None,
        enc_outputs_class: Tensor | None = None,
        enc_outputs_coord: Tensor | None = None,
        **more: Any,
    ) -> Result:
        more |= {"enc_outputs_class": enc_outputs_class, "enc_outputs_coord": enc_outputs_coord}
        # Costs and box losses need more digits than bfloat16 has, and so does a ranking.
        with torch.autocast(logits.device.type, enabled=False):
            call = Call(
                logits=_precise(logits),
                labels=[{**target, "boxes": _precise(target["boxes"])} for target in labels],
                boxes=_precise(pred_boxes),
                config=config,
                classes=_precise(outputs_class),
                coordinates=_precise(outputs_coord),
                more={name: _precise(value) for name, value in more.items()},
                proposals=_precise(self.proposals),
            )
            return self.family(call, self.settings)

    def keep_proposals(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        """Hook of Deformable DETR's inner model: the outer one does not hand the encoder's proposals to its loss."""
        self.proposals = (outputs.enc_outputs_class, outputs.enc_outputs_coord_logits)

    def forget_proposals(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        """Hook of the model itself: nothing is kept alive between two calls."""
        self.proposals = None


def use_ranking_loss(
    model: Model,
    *,
    loss: str = "rs",
    method: str = "exact",
    delta: float | None = None,
    class_cost: float | None = None,
) -> Model:
    """Train ``model`` with a ranking loss instead of its classification loss; in place, and returned.

    ``loss`` is ``"rs"`` (the labels are the IoUs of matched boxes) or ``"ap"``; ``method`` and ``delta`` are those of
    the losses. L1 and GIoU loss are balanced against the ranking loss, layer by layer, so the model's weights for them
    no longer count. ``class_cost`` replaces the weight of the class in the Hungarian matching: the paper doubles it
    to 4. A second call changes the settings; :func:`undo` restores the model's own loss. Not saved with the weights:
    call it again after ``from_pretrained``.
    """
    settings = Settings(Ranking(loss, method, delta), class_cost)
    family = _family(model)
    if class_cost is not None and not class_cost >= 0:
        raise ValueError(f"use_ranking_loss: expected class_cost to be a number of at least 0, got {class_cost!r}")
    if isinstance(_current(model), RankingLoss):
        undo(model)
    ranking_loss = RankingLoss(family, settings)
    ranking_loss.replaced = {name: model.__dict__[name] for name in ("_loss_function",) if name in model.__dict__}
    holder: Any = model
    if family is detr and getattr(holder.config, "two_stage", False):
        ranking_loss.hooks = [
            holder.model.register_forward_hook(ranking_loss.keep_proposals),
            holder.register_forward_hook(ranking_loss.forget_proposals, always_call=True),
        ]
    holder.loss_function = ranking_loss
    return model


def undo(model: Model) -> Model:
    """Restore the loss that ``model`` had before :func:`use_ranking_loss`; in place, and returned."""
    current = _current(model)
    if not isinstance(current, RankingLoss):
        raise TypeError(
            f"undo: expected a model with the loss of use_ranking_loss, got {type(model).__name__} with {current!r}; "
            "nothing was changed"
        )
    for hook in current.hooks:
        hook.remove()
    del model.__dict__["_loss_function"]
    model.__dict__.update(current.replaced)
    return model


def _current(model: nn.Module) -> Any:
    return model.__dict__.get("_loss_function")


def _family(model: nn.Module) -> Callable[[Call, Settings], Result]:
    # By name, through the bases: asking for the classes themselves would import all of these models.
    bases = [base.__name__ for base in type(model).__mro__ if base.__module__.startswith("transformers.")]
    name = type(model).__name__
    for base in bases:
        if base in REFUSED:
            raise TypeError(f"use_ranking_loss: expected a detector with sigmoid scores, got {name}: {REFUSED[base]}")
        if base in MODELS:
            if not getattr(model.config, "use_focal_loss", True):
                raise TypeError(f"use_ranking_loss: expected config.use_focal_loss to be True, got False: {_SOFTMAX}")
            return MODELS[base]
    raise TypeError(
        f"use_ranking_loss: expected one of {', '.join(MODELS)}, got {name}; call it on the transformers model itself, "
        "before DistributedDataParallel, torch.compile or another wrapper"
    )


def _precise(value: Any) -> Any:
    """Tensors of floats in float32 at least; all else as it is."""
    if isinstance(value, tuple):
        return tuple(_precise(part) for part in value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))
