"""Export of a whole detector to ONNX, and the proof that it detects the same.

The graph is traced by torch's older exporter (``dynamo=False``). The newer one cannot follow how many proposals and
detections there are: torchvision's NMS and pooling ask for these numbers in Python.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from bucketrank.data.image_files import read_image
from bucketrank.data.shapes import Shapes
from bucketrank.detectors import Detector
from bucketrank.training.atomic import write
from bucketrank.training.weights import load_model

OPSET = 17
OUTPUTS = ("boxes", "labels", "scores", "masks")

# What counts as the same detection: of the same class, and this near.
BOX_TOLERANCE = 1e-4  # of the longer side of the image
SCORE_TOLERANCE = 1e-4
MASK_TOLERANCE = 1e-2  # of a mask's pixel, from 0 to 1
# Where two boxes overlap by just the limit of the NMS, the last bit decides which stays: so many may have no partner.
UNPAIRED = 0.02

Arrays = Mapping[str, NDArray[Any]]


class ExportError(RuntimeError):
    """The detector cannot be exported, or what was exported detects something else; the message says what."""


@dataclass(frozen=True)
class Agreement:
    """How near the exported detector is to the original, over all pictures compared: the largest differences."""

    pictures: int
    detections: int
    unpaired: int  # detections of one without a partner of the other
    box: float  # in pixels
    score: float
    mask: float  # of a pixel; 0 without masks

    def __str__(self) -> str:
        paired = self.detections - self.unpaired
        masks = f", masks to {self.mask:.1g}" if self.mask else ""
        return (
            f"{paired} of {self.detections} detections on {self.pictures} pictures agree: boxes to {self.box:.1g} "
            f"pixels, scores to {self.score:.1g}{masks}"
        )


class Whole(nn.Module):
    """One image (1, 3, H, W) in, the tensors of its detections out."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector
        self.names = OUTPUTS if detector.masks else OUTPUTS[:3]

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        (found,) = self.detector([image[0]])
        return tuple(found[name] for name in self.names)


def export_onnx(
    model: Detector,
    path: Path | str,
    *,
    size: tuple[int, int],
    classes: Sequence[str],
    category_ids: Sequence[int] | None = None,
    threshold: float = 0.0,
    picture: Image.Image | None = None,
) -> Agreement:
    """Write ``model`` for images of ``size`` (height, width) as ONNX, if onnxruntime then detects the same with it.

    The input ``image`` is (1, 3, height, width), RGB from 0 to 1; scaling, normalising and NMS are inside. The outputs
    are ``boxes`` (n, 4) in the pixels of the input, ``labels`` (n,) from 1, ``scores`` (n,), best first, and ``masks``
    (n, 1, height, width) of a detector that has them. The metadata have ``classes``, ``category_ids`` (both JSON) and
    ``threshold``, by which nothing is cut off in the graph.

    Compared are the detections on ``picture``, on its mirror image and on its middle, enlarged; without a picture on
    drawn shapes. ExportError, and no file, if they differ by more than the tolerances of this module.
    """
    path = Path(path)
    was_training = model.training
    whole = Whole(model).eval()
    images = check_images(size, picture)
    try:
        with torch.no_grad():
            expected = [dict(zip(whole.names, whole(image), strict=True)) for image in images]
            agreed: list[Agreement] = []

            def save(temporary: Path) -> None:
                _trace(whole, images[0], temporary)
                _describe(temporary, classes=classes, category_ids=category_ids, threshold=threshold)
                agreed.append(_compare_all(temporary, images, expected))

            write(path, save)
    finally:
        model.train(was_training)
    return agreed[0]


def export_weights(
    weights: Path | str, path: Path | str, *, size: tuple[int, int] | None = None, image: Path | str | None = None
) -> Agreement:
    """A weights file by :func:`export_onnx`; without a size that of ``image``, or a square of the ``min_size``."""
    model, meta = load_model(weights)
    picture = None if image is None else Image.fromarray(read_image(Path(image), upright=True))
    if size is None:
        side = model.transform.min_size[-1]
        size = (side, side) if picture is None else (picture.height, picture.width)
    return export_onnx(
        model,
        path,
        size=size,
        classes=meta.classes,
        category_ids=meta.category_ids,
        threshold=meta.threshold,
        picture=picture,
    )


def check_images(size: tuple[int, int], picture: Image.Image | None = None) -> list[Tensor]:
    """Three pictures (1, 3, height, width) in which the numbers of detections may differ."""
    height, width = size
    if min(size) < 1:
        raise ValueError(f"export_onnx: expected a size (height, width) of at least 1, got {size}")
    whole = picture or Image.fromarray(Shapes(size=max(32, min(512, *size)), fewest=8, most=8).draw(0).pixels)
    whole = whole.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    quarter = (width // 4, height // 4, max(width * 3 // 4, width // 4 + 1), max(height * 3 // 4, height // 4 + 1))
    seen = (
        whole,
        whole.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        whole.crop(quarter).resize((width, height), Image.Resampling.BILINEAR),
    )
    return [torch.from_numpy(np.array(each)).permute(2, 0, 1)[None].float() / 255 for each in seen]


def compare(expected: Arrays, got: Arrays, *, longer_side: int) -> Agreement:
    """Pair the detections of the same class, next score and next box; unpaired are those further off than tolerated."""
    limit = BOX_TOLERANCE * longer_side
    free = np.ones(len(got["scores"]), dtype=bool)
    box = score = mask = 0.0
    paired = 0
    for place in range(len(expected["scores"])):
        boxes = np.abs(got["boxes"] - expected["boxes"][place]).max(axis=1, initial=0.0)
        scores = np.abs(got["scores"] - expected["scores"][place])
        near = free & (got["labels"] == expected["labels"][place]) & (scores <= SCORE_TOLERANCE) & (boxes <= limit)
        if not near.any():
            continue
        partner = int(np.where(near, boxes, np.inf).argmin())
        masks = 0.0
        if "masks" in expected:
            masks = float(np.abs(got["masks"][partner] - expected["masks"][place]).max(initial=0.0))
            if masks > MASK_TOLERANCE:
                continue
        free[partner] = False
        paired += 1
        box, score, mask = (
            max(box, float(boxes[partner])),
            max(score, float(scores[partner])),
            max(mask, masks),
        )
    count = max(len(expected["scores"]), len(got["scores"]))
    return Agreement(pictures=1, detections=count, unpaired=count - paired, box=box, score=score, mask=mask)


def _trace(whole: Whole, image: Tensor, path: Path) -> None:
    names = list(whole.names)
    try:
        with warnings.catch_warnings(), _silent():
            # Tracing warns of every shape it takes for fixed; what matters is compared afterwards.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                whole,
                (image,),
                str(path),
                dynamo=False,
                opset_version=OPSET,
                input_names=["image"],
                output_names=names,
                dynamic_axes={name: {0: "detections"} for name in names},
            )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        name = type(whole.detector).__name__
        raise ExportError(f"{name}: this detector cannot be written as ONNX: {reason}") from error


@contextmanager
def _silent() -> Iterator[None]:
    """Without the whole graph on the terminal, which the exporter's C++ prints when it fails."""
    sys.stdout.flush()
    terminal = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(terminal, 1)
        os.close(terminal)
        os.close(nowhere)


def _describe(path: Path, *, classes: Sequence[str], category_ids: Sequence[int] | None, threshold: float) -> None:
    import onnx

    model = onnx.load(path)
    ids = list(range(1, len(classes) + 1)) if category_ids is None else list(category_ids)
    properties = {
        "bucketrank": version("bucketrank"),
        "classes": json.dumps(list(classes)),
        "category_ids": json.dumps(ids),
        "threshold": repr(threshold),
    }
    onnx.helper.set_model_props(model, properties)
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "Loop" else ():
            # Of what grows in a loop the trace knows the first shape only, and onnxruntime would warn of each further.
            for value in (*attribute.g.output, *attribute.g.value_info):
                value.type.tensor_type.ClearField("shape")
    onnx.checker.check_model(model)
    onnx.save(model, path)


def _compare_all(path: Path, images: Sequence[Tensor], expected: Sequence[Mapping[str, Tensor]]) -> Agreement:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        results = [dict(zip(names, session.run(None, {"image": image.numpy()}), strict=True)) for image in images]
    except Exception as error:  # its errors have no other kind in common
        raise ExportError(f"onnxruntime cannot run what was exported: {error}") from error
    each = [
        compare({name: value.numpy() for name, value in wanted.items()}, got, longer_side=max(image.shape[-2:]))
        for wanted, got, image in zip(expected, results, images, strict=True)
    ]
    total = Agreement(
        pictures=len(each),
        detections=sum(one.detections for one in each),
        unpaired=sum(one.unpaired for one in each),
        box=max(one.box for one in each),
        score=max(one.score for one in each),
        mask=max(one.mask for one in each),
    )
    for number, (one, wanted, got) in enumerate(zip(each, expected, results, strict=True), start=1):
        if one.unpaired > UNPAIRED * one.detections:
            raise ExportError(
                f"the exported detector detects something else than torch: on picture {number} of {len(each)} torch "
                f"has {len(wanted['scores'])} detections and onnxruntime {len(got['scores'])}, of which {one.unpaired} "
                f"have no partner of the same class within {BOX_TOLERANCE:g} of the longer side, {SCORE_TOLERANCE:g} "
                f"of score and {MASK_TOLERANCE:g} of mask; nothing was written"
            )
    return total
