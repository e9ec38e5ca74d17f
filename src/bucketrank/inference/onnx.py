"""Export a whole detector to ONNX, and verify the file by comparing its detections in onnxruntime with torch's.

Detections may differ without an error: if two overlapping candidates have equal scores, rounding decides which one NMS
keeps. That choice decides which further candidates are suppressed or cut off by the detection limit.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torchvision.models.detection.transform import resize_boxes
from torchvision.ops import box_iou, clip_boxes_to_image

from bucketrank.data.images import read_image
from bucketrank.data.shapes import Shapes
from bucketrank.detectors import Detector
from bucketrank.detectors.dense import DenseDetector
from bucketrank.errors import DataError, ExportError, OutOfMemoryError, first_line, is_out_of_memory
from bucketrank.lazy import missing_extra
from bucketrank.settings.choices import MAX_PIXELS
from bucketrank.weights.atomic import require_no_input, require_writable, write
from bucketrank.weights.load import load_model

Array = NDArray[Any]
Arrays = Mapping[str, Array]

OPSET = 17
PROPERTY = "bucketrank"  # metadata key that marks a file as ours
OUTPUTS = ("boxes", "labels", "scores", "masks")

# Two detections are the same if their classes are equal and they differ by no more than this.
BOX_TOLERANCE = 1e-4  # fraction of the image's longer side
SCORE_TOLERANCE = 1e-4
MASK_TOLERANCE = 1e-2  # difference of any mask pixel, from 0 to 1
# Two boxes may overlap by almost exactly the NMS threshold; rounding then decides which one is kept.
MAX_UNPAIRED = 0.02  # fraction of the detections
TIE = 1e-6  # scores that differ by no more than this are equal up to rounding
IOU_ROUNDING = 1e-3


@dataclass(frozen=True)
class Agreement:
    """Largest differences between the exported detector and the original, over all compared images."""

    images: int  # number of compared images
    detections: int  # number of compared detections
    unpaired: int  # number of detections without a counterpart on the other side
    tied: int  # number of unpaired detections explained by scores that are equal up to rounding
    box: float  # largest difference between box coordinates, in pixels
    score: float  # largest difference between scores
    mask: float  # largest difference between mask pixels, from 0 to 1; 0 without masks

    def __str__(self) -> str:
        paired = self.detections - self.unpaired
        masks = f", masks to {self.mask:.1g}" if self.mask else ""
        tied = f"; {self.tied} others differ because scores are equal up to rounding" if self.tied else ""
        return (
            f"{paired} of {self.detections} detections in {self.images} images agree: boxes to {self.box:.1g} "
            f"pixels, scores to {self.score:.1g}{masks}{tied}"
        )


class TracedDetector(nn.Module):
    """A detector that takes one image (1, 3, H, W) and returns its detections as a tuple of tensors."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector
        self.names = OUTPUTS if detector.masks else OUTPUTS[:3]

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        (detections,) = self.detector([image[0]])
        return tuple(detections[name] for name in self.names)


def export_onnx(
    model: Detector,
    path: Path | str,
    *,
    size: tuple[int, int],
    classes: Sequence[str],
    category_ids: Sequence[int] | None = None,
    threshold: float = 0.0,
    image: Image.Image | None = None,
) -> Agreement:
    """Export ``model`` to the file ``path`` for images of ``size`` (height, width), and verify it against torch.

    The graph's input ``image`` is (1, 3, height, width), RGB from 0 to 1. Scaling, normalising and NMS are part of the
    graph. The outputs are ``boxes`` (n, 4) in input pixels, ``labels`` (n,) from 1, ``scores`` (n,), highest first,
    and, for a detector with masks, ``masks`` (n, 1, height, width). The metadata hold ``classes``, the names of label
    1, 2, ..., and their annotation ids ``category_ids``, both as JSON, and the minimum score to report, ``threshold``.
    The graph also returns detections below the threshold.

    The detections are compared in the argument ``image``, its mirror image and its enlarged centre, or in drawn shapes
    if no image is given. Raises ExportError and writes no file if they differ by more than the tolerances on the page
    "Predict and export". For RetinaNet and ATSS, detections may also differ because scores are equal up to rounding.
    An existing file is replaced only if it is an earlier export; otherwise DataError is raised.
    """
    path = Path(path)
    try:
        import_module("onnx")
        import_module("onnxruntime")
    except ModuleNotFoundError as error:
        raise missing_extra("export_onnx", error, extra="export") from error
    _require_replaceable(path)
    _require_size(size)
    was_training = model.training
    traced = TracedDetector(model).eval()
    try:
        images = comparison_images(size, image)
        with torch.no_grad():
            expected = [dict(zip(traced.names, traced(each), strict=True)) for each in images]
            candidates = [Candidates.of(model, each) for each in images]

            def save(temporary: Path) -> Agreement:
                _trace(traced, images[0], temporary)
                _write_metadata(temporary, classes=classes, category_ids=category_ids, threshold=threshold)
                return _compare_all(temporary, images, expected, candidates)

            return write(path, save)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"expected enough memory for images of {size[0]} x {size[1]} pixels, got too little; choose a smaller size"
        ) from error
    finally:
        model.train(was_training)


def export_weights(
    weights: Path | str, path: Path | str, *, size: tuple[int, int] | None = None, image: Path | str | None = None
) -> Agreement:
    """Export a weights file with :func:`export_onnx`.

    The default ``size`` is the size of ``image`` or, without an image, a square with sides of the recipe's
    ``min_size``.
    """
    _require_replaceable(Path(path), inputs=(weights, image))
    if size is not None:
        _require_size(size)
    if image is not None and not Path(image).is_file():
        got = "a folder" if Path(image).is_dir() else "no such file"
        raise DataError(f"{image}: expected an image file, got {got}; correct the path")
    model, meta = load_model(weights)
    decoded = None if image is None else Image.fromarray(read_image(Path(image), upright=True))
    if size is None:
        side = model.transform.min_size[-1]
        size = (side, side) if decoded is None else (decoded.height, decoded.width)
    return export_onnx(
        model,
        path,
        size=size,
        classes=meta.classes,
        category_ids=meta.category_ids,
        threshold=meta.threshold,
        image=decoded,
    )


def _require_size(size: tuple[int, int]) -> None:
    if min(size) < 1:
        raise DataError(f"size: expected a height and a width of at least 1, got {size[0]} x {size[1]}")
    if size[0] * size[1] > MAX_PIXELS:
        raise DataError(
            f"size: expected images of at most {MAX_PIXELS:,} pixels, got {size[0]} x {size[1]}; choose a smaller size"
        )


def _require_replaceable(path: Path, inputs: Sequence[Path | str | None] = ()) -> None:
    """Raise DataError if ``path`` is a folder, one of ``inputs``, or a file that was not exported by bucketrank."""
    require_writable(path, "model.onnx")
    require_no_input(path, inputs)
    if os.path.lexists(path) and not _is_our_export(path):
        raise DataError(f"{path}: expected a new file or an earlier export, got another file; choose another --out")


def _is_our_export(path: Path) -> bool:
    import onnx

    if not path.is_file():
        return False
    try:
        # The default format depends on the file name.
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except Exception:  # noqa: BLE001 (protobuf and system errors share no narrower class)
        return False
    return any(entry.key == PROPERTY for entry in model.metadata_props)


def comparison_images(size: tuple[int, int], image: Image.Image | None = None) -> list[Tensor]:
    """Make three tensors (1, 3, height, width): the image, its mirror image and its enlarged centre.

    They usually have different numbers of detections, so a graph with a fixed number fails the comparison.
    """
    height, width = size
    full = image or Image.fromarray(Shapes(size=max(32, min(512, *size)), min_objects=8, max_objects=8).draw(0).pixels)
    full = full.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    centre = (width // 4, height // 4, max(width * 3 // 4, width // 4 + 1), max(height * 3 // 4, height // 4 + 1))
    views = (
        full,
        full.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        full.crop(centre).resize((width, height), Image.Resampling.BILINEAR),
    )
    return [torch.from_numpy(np.array(view)).permute(2, 0, 1)[None].float() / 255 for view in views]


def compare(expected: Arrays, actual: Arrays, *, longer_side: int, candidates: Candidates | None = None) -> Agreement:
    """Pair each expected detection with the actual one of the same class and nearest box, within the tolerances.

    ``longer_side`` of the image is in pixels. With ``candidates``, unpaired detections that follow from equal scores
    are counted as tied.
    """
    limit = BOX_TOLERANCE * longer_side
    free = np.ones(len(actual["scores"]), dtype=bool)
    box = score = mask = 0.0
    paired: set[int] = set()
    for row in range(len(expected["scores"])):
        boxes = np.abs(actual["boxes"] - expected["boxes"][row]).max(axis=1, initial=0.0)
        scores = np.abs(actual["scores"] - expected["scores"][row])
        near = free & (actual["labels"] == expected["labels"][row]) & (scores <= SCORE_TOLERANCE) & (boxes <= limit)
        if not near.any():
            continue
        partner = int(np.where(near, boxes, np.inf).argmin())
        masks = 0.0
        if "masks" in expected:
            masks = float(np.abs(actual["masks"][partner] - expected["masks"][row]).max(initial=0.0))
            if masks > MASK_TOLERANCE:
                continue
        free[partner] = False
        paired.add(row)
        box, score, mask = max(box, float(boxes[partner])), max(score, float(scores[partner])), max(mask, masks)
    count = max(len(expected["scores"]), len(actual["scores"]))
    unpaired = [row for row in range(len(expected["scores"])) if row not in paired], np.flatnonzero(free).tolist()
    tied = 0
    if candidates is not None and any(unpaired):
        explained = tied_detections(candidates, expected, actual, unpaired, box_limit=limit)
        unexplained = max(len(rows) - number for rows, number in zip(unpaired, explained, strict=True))
        tied = count - len(paired) - unexplained
    return Agreement(1, count, count - len(paired), tied=tied, box=box, score=score, mask=mask)


def _trace(traced: TracedDetector, image: Tensor, path: Path) -> None:
    names = list(traced.names)
    try:
        with warnings.catch_warnings(), _stdout_discarded():
            # Tracing warns about every shape it records as fixed; the comparison finds the ones that matter.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                traced,
                (image,),
                str(path),
                dynamo=False,
                opset_version=OPSET,
                input_names=["image"],
                output_names=names,
                dynamic_axes={name: {0: "detections"} for name in names},
            )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
        name = type(traced.detector).__name__
        raise ExportError(f"{name}: this detector cannot be written as ONNX: {first_line(error)}") from error


@contextmanager
def _stdout_discarded() -> Iterator[None]:
    """Discard C++ output to stdout: the exporter prints the whole graph when it fails."""
    sys.stdout.flush()
    stdout = os.dup(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(devnull)


def _write_metadata(
    path: Path, *, classes: Sequence[str], category_ids: Sequence[int] | None, threshold: float
) -> None:
    import onnx

    model = onnx.load(path)
    ids = list(range(1, len(classes) + 1)) if category_ids is None else list(category_ids)
    properties = {
        PROPERTY: version("bucketrank"),
        "classes": json.dumps(list(classes)),
        "category_ids": json.dumps(ids),
        "threshold": repr(threshold),
    }
    onnx.helper.set_model_props(model, properties)
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "Loop" else ():
            # The trace holds the first iteration's shapes; onnxruntime warns when a later one differs.
            for value in (*attribute.g.output, *attribute.g.value_info):
                value.type.tensor_type.ClearField("shape")
    onnx.checker.check_model(model)
    onnx.save(model, path)


def _compare_all(
    path: Path,
    images: Sequence[Tensor],
    expected: Sequence[Mapping[str, Tensor]],
    candidates: Sequence[Candidates | None],
) -> Agreement:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        results = [dict(zip(names, session.run(None, {"image": image.numpy()}), strict=True)) for image in images]
    except Exception as error:  # onnxruntime's errors share no narrower class
        raise ExportError(f"onnxruntime cannot run the exported detector: {error}") from error
    agreements: list[Agreement] = []
    for tensors, result, image_candidates in zip(expected, results, candidates, strict=True):
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        one = compare(arrays, result, longer_side=max(images[0].shape[-2:]), candidates=image_candidates)
        agreements.append(one)
        if one.unpaired - one.tied > MAX_UNPAIRED * one.detections:
            raise ExportError(
                f"the exported detector does not match torch: in image {len(agreements)} of {len(images)} torch has "
                f"{len(arrays['scores'])} detections and onnxruntime {len(result['scores'])}, and "
                f"{one.unpaired - one.tied} have no counterpart of the same class within {BOX_TOLERANCE:g} of the "
                f"longer side, {SCORE_TOLERANCE:g} of score and {MASK_TOLERANCE:g} of mask; no file was written"
            )
    return Agreement(
        images=len(agreements),
        detections=sum(one.detections for one in agreements),
        unpaired=sum(one.unpaired for one in agreements),
        tied=sum(one.tied for one in agreements),
        box=max(one.box for one in agreements),
        score=max(one.score for one in agreements),
        mask=max(one.mask for one in agreements),
    )


@dataclass(frozen=True)
class Candidates:
    """Boxes (R, 4) of a dense detector before any selection, in input pixels, and their scores (R, C)."""

    boxes: Tensor
    scores: Tensor
    nms: float  # IoU above which the lower of two boxes of a class is suppressed

    @classmethod
    def of(cls, model: Detector, image: Tensor) -> Candidates | None:
        """Compute the candidates in an image (1, 3, H, W); None for other detectors, and with score voting."""
        if not isinstance(model, DenseDetector) or model.vote:
            return None
        batch, _ = model.transform([image[0]])
        features = model.neck(model.backbone(batch.tensors))
        output = model.head(features)
        boxes = model.coder.decode_single(output.box_deltas[0].float(), torch.cat(model.anchors(features)))
        size = batch.image_sizes[0]
        boxes = resize_boxes(clip_boxes_to_image(boxes, size), list(size), list(image.shape[-2:]))
        return cls(boxes, model.scores(output)[0], model.nms)

    def contain(self, box: Array, label: int, score: float, *, box_limit: float) -> bool:
        """Return whether a detection is one of the candidates; labels count from 1."""
        near = (self.boxes - torch.from_numpy(box)).abs().amax(1) <= box_limit
        return bool((near & ((self.scores[:, label - 1] - score).abs() <= SCORE_TOLERANCE)).any())

    def have_tie(self, box: Array, label: int, score: float) -> bool:
        """Return whether another candidate of the class overlaps with the same score, so that NMS keeps only one."""
        tied = (self.scores[:, label - 1] - score).abs() <= TIE
        competing = box_iou(torch.from_numpy(box)[None], self.boxes[tied])[0] > self.nms - IOU_ROUNDING
        return int(competing.sum()) > 1  # the detection itself is among them


def tied_detections(
    candidates: Candidates,
    one: Arrays,
    other: Arrays,
    unpaired: tuple[list[int], list[int]],
    *,
    box_limit: float,
) -> tuple[int, int]:
    """Count the unpaired detections in ``one`` and in ``other`` that follow from equal scores.

    A detection does if it is one of the candidates, within ``box_limit`` pixels and the score tolerance, and

    - a candidate that competes with it has the same score; or
    - it competes with an unpaired detection on the other side that follows from equal scores; or
    - its score exceeds the lowest on the other side only by rounding: the detection limit cut it off.
    """
    sides = (one, other)
    open_rows: list[set[int]] = [set(), set()]
    explained: list[set[int]] = [set(), set()]
    at_limit = len(one["scores"]) == len(other["scores"])
    for side, (detections, rows) in enumerate(zip(sides, unpaired, strict=True)):
        lowest = float(sides[1 - side]["scores"].min(initial=1.0))
        for row in rows:
            box, label = detections["boxes"][row], int(detections["labels"][row])
            score = float(detections["scores"][row])
            if candidates.contain(box, label, score, box_limit=box_limit):
                tied = candidates.have_tie(box, label, score) or (at_limit and score <= lowest + TIE)
                (explained if tied else open_rows)[side].add(row)
    changed = True
    while changed:
        changed = False
        for side in (0, 1):
            competing = {
                row
                for row in open_rows[side]
                if _competes(sides[side], row, sides[1 - side], explained[1 - side], candidates.nms)
            }
            open_rows[side] -= competing
            explained[side] |= competing
            changed |= bool(competing)
    return len(explained[0]), len(explained[1])


def _competes(detections: Arrays, row: int, others: Arrays, rows: set[int], nms: float) -> bool:
    """Return whether a detection overlaps one of these rows of the same class in ``others`` by more than ``nms``."""
    same = [each for each in sorted(rows) if others["labels"][each] == detections["labels"][row]]
    if not same:
        return False
    overlaps = box_iou(
        torch.from_numpy(detections["boxes"][row])[None], torch.from_numpy(others["boxes"][np.array(same)])
    )
    return bool((overlaps > nms - IOU_ROUNDING).any())
