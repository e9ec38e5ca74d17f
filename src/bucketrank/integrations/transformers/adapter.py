"""Switch a transformers model to a ranking loss, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bucketrank.integrations.ranking_loss import LossName, RankingLoss, Target
from bucketrank.integrations.transformers.criterion import check_targets
from bucketrank.integrations.transformers.layouts import (
    LossInput,
    LossOutput,
    d_fine_loss,
    deimv2_loss,
    detr_loss,
    grouped_detr_loss,
    rt_detr_loss,
)
from bucketrank.losses.functional import check_number
from bucketrank.settings.choices import Method

Model = TypeVar("Model", bound=nn.Module)

FamilyLoss = Callable[[LossInput], LossOutput]

FAMILY_LOSSES: dict[str, FamilyLoss] = {
    "DeformableDetrForObjectDetection": detr_loss,
    "DabDetrForObjectDetection": detr_loss,
    "ConditionalDetrForObjectDetection": detr_loss,
    "RTDetrForObjectDetection": rt_detr_loss,
    "RTDetrV2ForObjectDetection": rt_detr_loss,
    "DFineForObjectDetection": d_fine_loss,
    "Deimv2ForObjectDetection": deimv2_loss,
    "LwDetrForObjectDetection": grouped_detr_loss,
    "RfDetrForObjectDetection": grouped_detr_loss,
}

_SOFTMAX = (
    "its classifier is a softmax with a no-object class, so its logits compare the classes of one query, while a "
    "ranking has to compare queries"
)
_TEXT = "it scores queries against the words of a prompt, so it has no fixed classes to rank"
_MASKS = "its loss matches and trains masks, which the ranking loss does not support yet"
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

# Families whose models build denoising queries from the targets before the loss sees them.
DENOISING = (rt_detr_loss, d_fine_loss, deimv2_loss)


class LossFunction:
    """The ``model.loss_function`` of a model with a ranking loss.

    It is not a module, because transformers would register a module as a submodule and keep its own loss. It is not a
    closure, so the model can be copied and pickled.
    """

    def __init__(self, family_loss: FamilyLoss, ranking_loss: RankingLoss, class_cost: float | None) -> None:
        self.family_loss, self.ranking_loss, self.class_cost = family_loss, ranking_loss, class_cost
        self.replaced: dict[str, Any] = {}
        self.hooks: list[Any] = []
        self.proposals: tuple[Tensor, Tensor] | None = None

    def __call__(
        self,
        logits: Tensor,
        labels: list[Target],
        device: torch.device,  # noqa: ARG002  the models pass it
        pred_boxes: Tensor,
        config: Any,
        outputs_class: Tensor | None = None,
        outputs_coord: Tensor | None = None,
        enc_outputs_class: Tensor | None = None,
        enc_outputs_coord: Tensor | None = None,
        **extras: Any,
    ) -> LossOutput:
        check_targets(labels, images=len(logits), classes=logits.shape[-1])
        extras |= {"enc_outputs_class": enc_outputs_class, "enc_outputs_coord": enc_outputs_coord}
        # bfloat16 is too coarse for matching costs, box losses and rankings.
        with torch.autocast(logits.device.type, enabled=False):
            inputs = LossInput(
                ranking_loss=self.ranking_loss,
                class_cost=self.class_cost,
                logits=_at_least_float32(logits),
                labels=[{**target, "boxes": _at_least_float32(target["boxes"])} for target in labels],
                boxes=_at_least_float32(pred_boxes),
                config=config,
                layer_logits=_at_least_float32(outputs_class),
                layer_boxes=_at_least_float32(outputs_coord),
                extras={name: _at_least_float32(value) for name, value in extras.items()},
                proposals=_at_least_float32(self.proposals),
            )
            return self.family_loss(inputs)

    def check_before_denoising(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the targets before the model builds denoising queries from them: a pre-forward hook of the model."""
        images = kwargs.get("pixel_values", args[0] if args else None)
        if kwargs.get("labels") is not None and images is not None:
            check_targets(kwargs["labels"], images=len(images), classes=model.config.num_labels)

    def keep_proposals(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        """Keep the encoder proposals, which the model does not pass to its loss: a hook of the inner model."""
        self.proposals = (outputs.enc_outputs_class, outputs.enc_outputs_coord_logits)

    def drop_proposals(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        """Release the proposals after each call: a hook of the model."""
        self.proposals = None


def use_ranking_loss(
    model: Model,
    *,
    loss: LossName = "rs",
    method: Method = "exact",
    delta: float | None = None,
    box_weight: float | None = None,
    class_cost: float | None = None,
) -> Model:
    """Replace the classification loss of ``model`` by a ranking loss; change the model in place and return it.

    By default L1 and GIoU loss are each self-balanced to the ranking loss of the same layer, for both ``"rs"`` and
    ``"ap"``, so the model's weights for them have no effect. The published code self-balances only Rank & Sort and
    gives AP loss a fixed weight. With a number for ``box_weight``, L1 and GIoU loss keep the model's weights,
    multiplied by that number.

    A second call replaces the settings. :func:`undo` restores the model's own loss. The loss is not saved with the
    weights: call this function again after ``from_pretrained``.

    Args:
        model: a detection transformer.
        loss: ``"rs"`` (Rank & Sort, whose labels are the IoUs of matched boxes) or ``"ap"``.
        method: how the ranks are computed: ``"exact"``, ``"pairwise"`` or ``"bucketed"``.
        delta: logits closer than this count as partly tied; by default 0.5 for Rank & Sort and 1 for AP loss.
        box_weight: factor on the box losses; by default they are self-balanced.
        class_cost: class weight in the Hungarian matching; by default the model's own. The paper doubles it, from 2 to
            4.
    """
    ranking_loss = RankingLoss(loss, method, delta, box_weight)
    family_loss = supported_family("use_ranking_loss", model)
    if class_cost is not None:
        check_number("use_ranking_loss", "class_cost", class_cost)
    if _ranking_function(model) is not None:
        undo(model)
    function = LossFunction(family_loss, ranking_loss, class_cost)
    function.replaced = {name: model.__dict__[name] for name in ("_loss_function",) if name in model.__dict__}
    untyped_model: Any = model
    if family_loss is detr_loss and getattr(untyped_model.config, "two_stage", False):
        function.hooks = [
            untyped_model.model.register_forward_hook(function.keep_proposals),
            untyped_model.register_forward_hook(function.drop_proposals, always_call=True),
        ]
    if family_loss in DENOISING:
        function.hooks = [untyped_model.register_forward_pre_hook(function.check_before_denoising, with_kwargs=True)]
    untyped_model.loss_function = function
    return model


def undo(model: Model) -> Model:
    """Restore the loss that ``model`` had before :func:`use_ranking_loss`; change the model in place and return it.

    Raises ``TypeError`` for a model that :func:`use_ranking_loss` does not support, and ``ValueError`` for a supported
    model that has no ranking loss.
    """
    supported_family("undo", model)
    function = _ranking_function(model)
    if function is None:
        raise ValueError(
            f"undo: expected a model with a ranking loss, got {type(model).__name__} with its own loss; "
            "call use_ranking_loss first"
        )
    for hook in function.hooks:
        hook.remove()
    del model.__dict__["_loss_function"]
    model.__dict__.update(function.replaced)
    return model


def _ranking_function(model: nn.Module) -> LossFunction | None:
    """Return the model's ranking loss function, or None if the model has its own loss."""
    function = model.__dict__.get("_loss_function")
    return function if isinstance(function, LossFunction) else None


def supported_family(caller: str, model: nn.Module) -> FamilyLoss:
    """Find the loss of the model's family; raise ``TypeError`` if the model is not supported."""
    # Classes are compared by name, because importing them would import all of these models.
    bases = [base.__name__ for base in type(model).__mro__ if base.__module__.startswith("transformers.")]
    name = type(model).__name__
    for base in bases:
        if base in REFUSED:
            raise TypeError(f"{caller}: expected a detector with sigmoid scores, got {name}: {REFUSED[base]}")
        if base in FAMILY_LOSSES:
            config: Any = model.config
            if not getattr(config, "use_focal_loss", True):  # RT-DETR with the DETR loss
                raise TypeError(f"{caller}: expected config.use_focal_loss to be True, got False: {_SOFTMAX}")
            return FAMILY_LOSSES[base]
    raise TypeError(
        f"{caller}: expected one of {', '.join(FAMILY_LOSSES)}, got {name}; pass the transformers model itself, "
        "without DistributedDataParallel, torch.compile or another wrapper"
    )


def _at_least_float32(value: Any) -> Any:
    """Convert float tensors, also inside tuples, to float32 or wider; return any other value unchanged."""
    if isinstance(value, tuple):
        return tuple(_at_least_float32(part) for part in value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))
