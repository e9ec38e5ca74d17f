"""The detections of one image, with class names, and their conversion to and from supervision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bucketrank.errors import MissingPackageError, suggest
from bucketrank.settings.choices import MASK_THRESHOLD

if TYPE_CHECKING:
    import supervision

CLASS_NAME = "class_name"  # where supervision keeps the names
MAX_SHOWN = 5  # detections in a repr


class Detections(dict[str, Tensor]):
    """The detections of one image, highest score first: a dict with class names.

    ``values`` are the tensors ``boxes`` (n, 4) as x1, y1, x2, y2 in pixels, ``scores`` (n,), ``labels`` (n,) from 1
    and, with a mask head, ``masks`` (n, 1, H, W). ``classes`` are the names of label 1, 2, ...; they may be unknown.

    >>> scores, labels = torch.tensor([0.9]), torch.tensor([2])
    >>> values = {"boxes": torch.zeros(1, 4), "scores": scores, "labels": labels}
    >>> Detections(values, classes=["cat", "dog"])
    Detections(1: dog 0.90)
    """

    def __init__(self, values: Mapping[str, Tensor], classes: Sequence[str] = ()) -> None:
        super().__init__(values)
        self.classes = tuple(classes)

    @property
    def names(self) -> list[str]:
        """The class name of each detection; its label as text if the names are unknown."""
        known = dict(enumerate(self.classes, start=1))
        return [known.get(label, str(label)) for label in self["labels"].tolist()]

    def __repr__(self) -> str:
        pairs = zip(self.names[:MAX_SHOWN], self["scores"][:MAX_SHOWN].tolist(), strict=True)
        shown = [f"{name} {score:.2f}" for name, score in pairs]
        shown += ["..."] if len(self["scores"]) > MAX_SHOWN else []
        return f"Detections({len(self['scores'])}{': ' if shown else ''}{', '.join(shown)})"

    def to_supervision(self) -> supervision.Detections:
        """Convert to ``supervision.Detections``.

        Class ids count from 0, so they are the labels minus 1. The names are in ``data["class_name"]``, and masks are
        true from a probability of 0.5 on.
        """
        try:
            import supervision
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                "to_supervision: needs supervision, which is not installed; install it with: pip install supervision"
            ) from error
        arrays = {name: values.detach().cpu().numpy() for name, values in self.items()}
        masks = arrays.get("masks")
        return supervision.Detections(
            xyxy=arrays["boxes"].astype(np.float32),
            confidence=arrays["scores"].astype(np.float32),
            class_id=arrays["labels"].astype(int) - 1,
            mask=None if masks is None else masks.reshape(len(masks), *masks.shape[-2:]) >= MASK_THRESHOLD,
            data={CLASS_NAME: np.array(self.names, dtype=str)} if self.classes else {},
        )

    @classmethod
    def from_supervision(
        cls, detections: supervision.Detections, *, classes: Sequence[str] | None = None
    ) -> Detections:
        """Convert from ``supervision.Detections``, sorted by score.

        With ``classes``, the names of label 1, 2, ..., labels follow the names in ``data["class_name"]`` of
        ``detections`` if there are any. Otherwise they are the class ids plus 1. Detections without a confidence, such
        as ground truth, get a score of 1.
        """
        given = detections.data.get(CLASS_NAME)
        names = None if given is None else [str(name) for name in given]
        labels = _labels(detections.class_id, names, classes)
        count = len(labels)
        confidence = np.ones(count) if detections.confidence is None else detections.confidence
        scores = torch.from_numpy(np.array(confidence, dtype=np.float32))
        values = {
            "boxes": torch.from_numpy(np.array(detections.xyxy, dtype=np.float32)).reshape(count, 4),
            "scores": scores,
            "labels": labels,
        }
        if detections.mask is not None:
            values["masks"] = torch.from_numpy(np.array(detections.mask, dtype=np.float32))[:, None]
        order = scores.argsort(descending=True, stable=True)
        known = _classes(labels, names) if classes is None else classes
        return cls({name: tensor[order] for name, tensor in values.items()}, known)


def _labels(ids: Any, names: list[str] | None, classes: Sequence[str] | None) -> Tensor:
    if names is not None and classes is not None:
        unknown = [name for name in names if name not in classes]
        if unknown:
            raise ValueError(
                f"from_supervision: expected names among the {len(classes)} classes, got {unknown[0]!r}"
                f"{suggest(unknown[0], classes)}"
            )
        return torch.tensor([classes.index(name) + 1 for name in names], dtype=torch.int64)
    if ids is None:
        raise ValueError("from_supervision: expected class_id, got None; set it, or data['class_name'] and classes")
    return torch.from_numpy(np.array(ids, dtype=np.int64)) + 1


def _classes(labels: Tensor, names: list[str] | None) -> list[str]:
    """Collect the names of the labels; labels without a detection get their number as name."""
    if names is None:
        return []
    known = dict(zip(labels.tolist(), names, strict=True))
    return [known.get(label, str(label)) for label in range(1, max(known, default=0) + 1)]
