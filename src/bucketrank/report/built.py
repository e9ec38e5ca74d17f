"""The settings a built detector really has, where a recipe says null: anchors, outputs, loss and box loss by head.

Two recipes with the same detector and another loss can build different heads. The report shows both, because a
difference in AP may come from either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from bucketrank.detectors import Detector
from bucketrank.detectors.anchors import Anchors
from bucketrank.detectors.base import InputTransform
from bucketrank.detectors.criterion import Criterion
from bucketrank.detectors.criterion.ranked import ALRP, Ranked
from bucketrank.detectors.criterion.scored import QualityScored
from bucketrank.report.chart import Html, join, tag
from bucketrank.settings import LossSettings, RankingSettings, loss_spec

Facts = dict[str, str]

WEIGHTINGS = {"confidence": "class score", "iou": "IoU", None: "none"}
NO_FACT = "-"
OF_LOSS_OR_MACHINE = ("loss.", "trainer.", "data.workers", "data.val_batch_size")  # settings that no warning names


def built_facts(model: Detector) -> Facts:
    """Describe the parts of a built detector in which runs may differ, by name."""
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    facts = {"trained parameters": f"{trained:,}"}
    if isinstance(model.transform, InputTransform):
        sides = ", ".join(str(side) for side in model.transform.min_size)
        facts["image sides"] = f"{sides}, at most {model.transform.max_size}"
    for name, module in model.named_modules():
        if isinstance(module, Anchors):
            facts |= _named(name.rpartition(".")[0], _anchors(module))
    criteria = [(name, module) for name, module in model.named_modules() if isinstance(module, Criterion)]
    for name, criterion in criteria:
        head = name.rpartition(".")[0]
        outputs = _outputs(model.get_submodule(head))
        facts |= _named(head, outputs | _loss(criterion, quality=outputs.get("quality branch") == "yes"))
    if not criteria:
        layers = [name for name, module in model.named_modules() if module in model.score_head().layers]
        facts |= {f"class outputs ({name})": str(_width(model.get_submodule(name))) for name in layers}
    return facts


def _named(head: str, facts: Mapping[str, str]) -> Facts:
    """Add the head's name to each fact, if the detector has several heads."""
    return {f"{head}: {name}" if head else name: text for name, text in facts.items()}


def _anchors(anchors: Anchors) -> Facts:
    sides = ", ".join(f"{side / anchors.strides[0]:.3g}" for side in anchors.sizes[0])
    count = anchors.num_anchors_per_location()[0]
    return {"anchors per location": f"{count} (sides of {sides} strides)"}


def _outputs(owner: nn.Module) -> Facts:
    """Describe the last layers of the head next to a criterion."""
    head = getattr(owner, "head", owner)
    facts = {}
    classes = getattr(head, "classes", None) or getattr(head, "cls_logits", None)
    if isinstance(classes, nn.Conv2d | nn.Linear):
        facts["class outputs"] = str(_width(classes))
    if hasattr(head, "quality"):
        facts["quality branch"] = "yes" if isinstance(head.quality, nn.Module) else "no"
    if isinstance(vote := getattr(owner, "vote", None), bool):
        facts["score voting"] = "yes" if vote else "no"
    return facts


def _width(layer: nn.Module) -> int:
    weight = layer.weight
    return len(weight) if isinstance(weight, nn.Parameter) else 0


def _loss(criterion: Criterion, *, quality: bool) -> Facts:
    settings = criterion.settings
    if isinstance(criterion, ALRP):
        weight = "set by the loss"
    elif criterion.box_balance:
        weight = "scaled to the classification loss"
    else:
        weight = f"{criterion.box_weight:g}"
    return {
        "loss": describe_loss(settings),
        "scores": "softmax with background" if criterion.softmax else "sigmoid per class",
        "initial score": f"{criterion.initial_score:g}",
        "candidates": "balanced sample" if criterion.samples else "all",
        "box loss": {"giou": "GIoU", "l1": "L1", "smooth_l1": "smooth L1"}[criterion.box_loss],
        "box loss weight": weight,
        "box weight per positive": _weighting(criterion, quality=quality),
    }


def _weighting(criterion: Criterion, *, quality: bool) -> str:
    """Say what weights the positives in the mean of the box loss."""
    given = criterion.settings.box_confidence
    if given is not None:
        return "class score" if given else "none"
    if isinstance(criterion, QualityScored):
        return WEIGHTINGS[criterion.spec.box_weights]
    if isinstance(criterion, Ranked):
        return "class score" if criterion.recipe.confident else "none"
    return "quality target" if quality else "none"


def describe_loss(settings: LossSettings) -> str:
    """Name the loss with its method and delta."""
    title = loss_spec(settings.name).title or settings.name
    if not isinstance(settings, RankingSettings):
        return title
    return f"{title}, {settings.method}, delta {settings.effective_delta:g}"


def differing(facts: Sequence[Facts]) -> list[str]:
    """Return the names of the facts in which the detectors differ, in their order.

    >>> differing([{"loss": "RS", "anchors": "3"}, {"loss": "focal", "anchors": "3", "masks": "yes"}])
    ['loss', 'masks']
    """
    names = dict.fromkeys(name for each in facts for name in each)
    return [name for name in names if len({each.get(name) for each in facts}) > 1]


def warning(facts: Sequence[Facts], keys: Sequence[str]) -> Html:
    """Say what differs besides the loss, its initial score and the number of parameters, if runs compare losses.

    ``keys`` are settings that differ. The warning is empty if only the loss differs, or if no loss does.
    """
    by_part = {name: name.rpartition(": ")[2] for name in differing(facts)}
    names = [name for name, part in by_part.items() if part not in ("loss", "initial score", "trained parameters")]
    names += [key for key in keys if not key.startswith(OF_LOSS_OR_MACHINE)]
    if "loss" not in by_part.values() or not names:
        return Html("")
    text = "These runs differ in more than the loss, so a difference in AP may have another cause: "
    return tag("p", tag("b", "Not only the loss. "), text, f"{', '.join(names)}.", class_="warning")


def fact_rows(
    facts: Sequence[Facts], names: Sequence[str] | None = None, *, mark: bool = True
) -> Iterator[list[str | Html]]:
    """Build one table row per fact; with ``mark``, those in which the detectors differ say so."""
    marked = differing(facts) if mark else []
    for name in dict.fromkeys(name for each in facts for name in each) if names is None else names:
        sign = tag("span", "differs", class_="differs") if name in marked else Html("")
        yield [join(name, sign), *(each.get(name, NO_FACT) for each in facts)]
