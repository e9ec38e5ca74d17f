"""Calibrated scores for the detection transformers of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bucketrank.evaluation.calibration import Calibration, ScoreHead
from bucketrank.evaluation.calibration.fitting import MOST_IMAGES, FitSettings, Samples, calibrate_head
from bucketrank.evaluation.calibration.mapping import Target
from bucketrank.integrations.ranking_loss import corners
from bucketrank.integrations.transformers.adapter import supported_family

DETECTIONS = 100  # per image, as the image processors of the library keep them


def calibrate(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    target: Target = "match",
    per_class: bool = False,
    most: int | None = MOST_IMAGES,
) -> Calibration:
    """Turn the scores of a detection transformer into probabilities, in place; return the fitted map with its errors.

    ``batches`` are those of training, without augmentation: mappings with ``pixel_values``, maybe ``pixel_mask``, and
    ``labels`` with ``class_labels`` and ``boxes`` per image. The detections of an image are the 100 highest scores of
    all queries and classes. The other arguments are those of :func:`~bucketrank.evaluation.calibration.calibrate`.

    Args:
        model: a detection transformer.
        batches: batches as in training, without augmentation.
        target: ``"match"``, the probability of an IoU of at least 0.5 with an object, or ``"iou"``, the expected IoU.
        per_class: fit each class on its own.
        most: maximum number of images; None for all.
    """
    head = score_head(model)
    untyped_model: Any = model
    device = next(model.parameters()).device

    def detect(inputs: Mapping[str, Any]) -> Mapping[str, Tensor]:
        outputs = untyped_model(**{name: value.to(device) for name, value in inputs.items()})
        scores = outputs.logits[0].float().sigmoid()
        best = scores.flatten().topk(min(DETECTIONS, scores.numel()))
        columns = scores.shape[1]
        boxes = corners(outputs.pred_boxes[0].float())[best.indices // columns]
        return {"boxes": boxes, "labels": best.indices % columns, "scores": best.values}

    images = SingleImages(batches, most)
    items = list(images) if isinstance(batches, Iterator) else images  # a fit may read them twice
    return calibrate_head(model, head, Samples(items, detect), FitSettings(target, per_class))


def score_head(model: nn.Module) -> ScoreHead:
    """Return the classification layer whose logits a detection transformer returns; labels count from 0.

    Args:
        model: a detection transformer.
    """
    supported_family("calibrate", model)
    untyped_model: Any = model
    columns = int(untyped_model.config.num_labels)
    decoder = getattr(untyped_model.model, "decoder", None)
    single = getattr(untyped_model, "class_embed", None) or getattr(untyped_model, "class_labels_classifier", None)
    if isinstance(single, nn.Linear):  # the same for all decoder layers
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


@dataclass(frozen=True)
class SingleImages:
    """The first ``most`` images of batches, one at a time, with ground truth as corners in units of the image."""

    batches: Iterable[Mapping[str, Any]]
    most: int | None

    def __iter__(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        count = 0
        for batch in self.batches:
            for number, label in enumerate(batch["labels"]):
                if self.most is not None and count >= self.most:
                    return
                count += 1
                inputs = {
                    name: value[number : number + 1]
                    for name, value in batch.items()
                    if name != "labels" and isinstance(value, Tensor)
                }
                target = {"boxes": corners(label["boxes"]), "labels": label["class_labels"]}
                yield inputs, target | {name: label[name] for name in ("iscrowd",) if name in label}
