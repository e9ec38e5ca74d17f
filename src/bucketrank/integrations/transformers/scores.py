"""Calibrate the scores of detection transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from bucketrank.evaluation.calibration import Calibration, ScoreHead
from bucketrank.evaluation.calibration.fitting import MAX_IMAGES, FitSettings, Samples, calibrate_head
from bucketrank.integrations.ranking_loss import corners
from bucketrank.integrations.transformers.adapter import supported_family
from bucketrank.settings.choices import CalibrationTarget

MAX_DETECTIONS = 100  # per image, as in the library's image processors


def calibrate(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    target: CalibrationTarget = "match",
    per_class: bool = False,
    max_images: int | None = MAX_IMAGES,
) -> Calibration:
    """Turn the scores of a transformers ``model`` into probabilities, in place; return the fitted map with its errors.

    ``batches`` are training batches without augmentation: mappings with ``pixel_values``, optional ``pixel_mask``, and
    ``labels`` with ``class_labels`` and ``boxes`` per image. The detections in an image are the top 100 over all
    queries and classes. The other arguments are those of :func:`~bucketrank.evaluation.calibration.calibrate`.
    """
    head = score_head(model)
    untyped_model: Any = model
    device = next(model.parameters()).device

    def detect(inputs: Mapping[str, Any]) -> Mapping[str, Tensor]:
        outputs = untyped_model(**{name: value.to(device) for name, value in inputs.items()})
        scores = outputs.logits[0].float().sigmoid()
        best = scores.flatten().topk(min(MAX_DETECTIONS, scores.numel()))
        columns = scores.shape[1]
        boxes = corners(outputs.pred_boxes[0].float())[best.indices // columns]
        return {"boxes": boxes, "labels": best.indices % columns, "scores": best.values}

    samples = Samples.first(batches, detect, max_images=max_images, unbatch=_single_images)
    return calibrate_head(model, head, samples, FitSettings(target, per_class))


def score_head(model: nn.Module) -> ScoreHead:
    """Describe the classification layer whose logits ``model`` returns; labels count from 0."""
    supported_family("calibrate", model)
    untyped_model: Any = model
    columns = int(untyped_model.config.num_labels)
    decoder = getattr(untyped_model.model, "decoder", None)
    single = getattr(untyped_model, "class_embed", None) or getattr(untyped_model, "class_labels_classifier", None)
    if isinstance(single, nn.Linear):  # all decoder layers share it
        return ScoreHead("sigmoid", layers=(single,), columns=columns, first_label=0)
    index = getattr(decoder, "eval_idx", untyped_model.config.decoder_layers - 1)
    # The model and its decoder each have a list of layers, with tied weights.
    owners = (untyped_model, decoder)
    lists = [each for owner in owners if isinstance(each := getattr(owner, "class_embed", None), nn.ModuleList)]
    quality = getattr(decoder, "lqe_layers", None)  # D-FINE and DEIMv2 add a predicted quality to the logits
    return ScoreHead(
        "sigmoid",
        layers=tuple(each[index] for each in lists),
        columns=columns,
        first_label=0,
        summands=() if quality is None else (quality[index].reg_conf.layers[-1],),
    )


def _single_images(batch: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Split a batch into batches of one image, with ground-truth boxes as relative corners."""
    tensors = {name: value for name, value in batch.items() if name != "labels" and isinstance(value, Tensor)}
    for number, label in enumerate(batch["labels"]):
        inputs = {name: value[number : number + 1] for name, value in tensors.items()}
        target = {"boxes": corners(label["boxes"]), "labels": label["class_labels"]}
        yield inputs, target | {name: label[name] for name in ("iscrowd",) if name in label}
