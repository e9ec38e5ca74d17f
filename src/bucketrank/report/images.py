"""Images with detections and ground truth as SVG; each image is stored once per page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from contourpy import contour_generator
from numpy.typing import NDArray
from PIL import Image

from bucketrank.data import Split
from bucketrank.data.annotations import file_name, size_of
from bucketrank.data.coco import decode_masks
from bucketrank.data.images import read_image
from bucketrank.errors import DataError
from bucketrank.report.chart import Html, tag
from bucketrank.report.matching import Detection, GroundTruthObject, MatchedImage

MAX_MASK_SIDE = 192  # pixels on the longer side of a mask before its outline is traced
MAX_SIDE = 480  # pixels on the longer side of a stored image
JPEG_QUALITY = 72
MAX_OUTLINES = 60  # mask outlines per image, for its top detections


def outline(segmentation: Any, size: tuple[int, int], shown: tuple[int, int]) -> str:
    """Trace a mask (polygons or RLE) as an SVG path; "" without a mask.

    ``size`` is the height and width of the image, ``shown`` that of the stored copy, whose pixels the path refers to.
    """
    if not segmentation:
        return ""
    mask = decode_masks([segmentation], size)[0].numpy() * 255
    scale = min(1.0, MAX_MASK_SIDE / max(size))
    small = max(1, round(size[1] * scale)), max(1, round(size[0] * scale))
    soft: NDArray[np.float32] = np.asarray(Image.fromarray(mask).resize(small, Image.Resampling.BOX), dtype=np.float32)
    # A border of zeros closes the outline of a mask that touches the image edge.
    lines = contour_generator(z=np.pad(soft, 1)).lines(127.5)
    to_shown = np.array([shown[1] / small[0], shown[0] / small[1]])
    pieces = []
    for line in lines:
        corners = np.clip((np.asarray(line) - 0.5) * to_shown, 0, [shown[1], shown[0]]).round(1)
        corners = corners[np.append(True, (np.diff(corners, axis=0) != 0).any(1))]
        if len(corners) > 2:
            pieces.append("M" + "L".join(f"{x:g},{y:g}" for x, y in corners) + "Z")
    return "".join(pieces)


class StoredImages:
    """Small copies of the images on a page; an image that several runs show is stored once."""

    def __init__(self) -> None:
        self._stored: dict[str, tuple[str, tuple[int, int], Html]] = {}

    def add(self, split: Split, image: Mapping[str, object]) -> tuple[str, tuple[int, int]]:
        """Store an image; return its element id, height and width. Raise DataError if the file cannot be read."""
        path = split.image_path(image)
        key = str(path.resolve())
        if key not in self._stored:
            name = f"image-{len(self._stored)}"
            copy = Image.fromarray(read_image(path))
            copy.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
            size = copy.height, copy.width
            stream = io.BytesIO()
            copy.save(stream, "JPEG", quality=JPEG_QUALITY, optimize=True)
            href = "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
            self._stored[key] = name, size, tag("image", id=name, href=href, width=size[1], height=size[0])
        name, size, _ = self._stored[key]
        return name, size

    def html(self) -> Html:
        """Build an invisible element that defines all stored images."""
        elements = [element for _, _, element in self._stored.values()]
        return tag("svg", tag("defs", *elements), width=0, height=0, class_="store", aria_hidden="true")


def image_figure(
    stored: StoredImages,
    split: Split,
    matched: MatchedImage,
    class_names: Mapping[int, str],
    *,
    threshold: float,
    masks: bool,
) -> Html:
    """Draw one image with its detections and objects as shapes that a script can show and hide."""
    title = file_title(matched)
    try:
        name, shown = stored.add(split, matched.image)
    except DataError as error:
        return tag("figure", tag("figcaption", str(error)), class_="image")
    canvas = _Canvas(size_of(matched.image), shown, class_names, threshold)
    shapes = [canvas.ground_truth(each, outlined=masks) for each in matched.objects]
    ranked = list(enumerate(matched.detections))
    shapes += [
        canvas.detection(each, outlined=masks and rank < MAX_OUTLINES)
        for rank, each in reversed(ranked)  # the best is drawn last, on top
    ]
    counts = matched.counts(threshold)
    summary = f"{counts.correct} correct, {counts.wrong} wrong, {counts.missed} missed"
    f1 = "" if counts.f1 is None else f"F1 {counts.f1:.2f}"
    drawing = tag(
        "svg",
        tag("use", href=f"#{name}"),
        *shapes,
        viewBox=f"0 0 {shown[1]} {shown[0]}",
        role="img",
        tabindex="0",
        aria_label=f"{title}: {summary}. Arrow keys move from box to box.",
    )
    caption = tag(
        "figcaption", tag("b", f1), " ", tag("span", summary, class_="counts"), tag("span", title, class_="file")
    )
    return tag("figure", drawing, caption, class_="image")


def file_title(matched: MatchedImage) -> str:
    """Return an image's file name without folders."""
    return file_name(matched.image).rpartition("/")[2]


@dataclass(frozen=True)
class _Canvas:
    """The sizes, class names and threshold that the shapes on one image share."""

    size: tuple[int, int]  # height and width of the image
    shown: tuple[int, int]  # height and width of its stored copy
    class_names: Mapping[int, str]
    threshold: float

    def detection(self, each: Detection, *, outlined: bool) -> Html:
        about = {
            "correct": f"correct, IoU {each.iou:.2f} with its object",
            "wrong": f"wrong, highest IoU with an object of its class: {each.iou:.2f}",
            "ignored": "ignored: on a crowd, or the image is not annotated for this class",
        }[each.outcome]
        text = f"{self.class_names[each.category]}, score {each.score:.3g}\n{about}"
        hidden = each.score < self.threshold
        return self._group(each, each.score, text, f"detection {each.outcome}", outlined=outlined, hidden=hidden)

    def ground_truth(self, each: GroundTruthObject, *, outlined: bool) -> Html:
        state = "crowd" if each.crowd else "detected" if each.is_detected(self.threshold) else "missed"
        text = f"ground truth: {self.class_names[each.category]}" + (" (crowd)" if each.crowd else "")
        if each.matched_score is not None:
            text += f"\ndetected with score {each.matched_score:.3g}"
        elif not each.crowd:
            text += "\nnot detected with any score"
        return self._group(each, each.matched_score, text, f"object {state}", outlined=outlined)

    def _group(
        self,
        each: Detection | GroundTruthObject,
        score: float | None,
        text: str,
        class_: str,
        *,
        outlined: bool,
        hidden: bool = False,
    ) -> Html:
        """Draw the box over a wider dark box, visible on any background, and the mask outline."""
        x_scale, y_scale = self.shown[1] / self.size[1], self.shown[0] / self.size[0]
        left, right = (min(max(x * x_scale, 0.0), float(self.shown[1])) for x in (each.box[0], each.box[2]))
        top, bottom = (min(max(y * y_scale, 0.0), float(self.shown[0])) for y in (each.box[1], each.box[3]))
        position = {"x": round(left, 1), "y": round(top, 1)}
        position |= {"width": round(right - left, 1), "height": round(bottom - top, 1)}
        path = outline(each.segmentation, self.size, self.shown) if outlined else ""
        return tag(
            "g",
            tag("title", text),
            tag("rect", **position, class_="edge"),
            tag("rect", **position, class_="box"),
            *([tag("path", d=path, class_="outline")] if path else []),
            class_=class_,
            data_score=None if score is None else f"{score:.8g}",
            data_class=each.category,
            hidden=hidden,
        )
