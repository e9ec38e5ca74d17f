"""Images with what was detected and what is true, each picture stored once."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass

from PIL import Image

from bucketrank.data import DataError, Split
from bucketrank.data.annotations import file_name, size_of
from bucketrank.data.image_files import read_image
from bucketrank.report.markup import Html, tag
from bucketrank.report.matching import Detection, Matched, Object
from bucketrank.report.outline import outline

LONGEST = 480  # pixels of a picture's longer side
QUALITY = 72  # of JPEG
MOST_OUTLINES = 60  # detections of an image whose mask is drawn, the best ones


class Pictures:
    """The pictures of a page: small copies, each in the page once however many runs show it."""

    def __init__(self) -> None:
        self._stored: dict[str, tuple[str, tuple[int, int], Html]] = {}

    def add(self, split: Split, image: Mapping[str, object]) -> tuple[str, tuple[int, int]]:
        """The name under which a picture can be used, and its height and width; DataError if it cannot be read."""
        path = split.image_path(image)
        key = str(path.resolve())
        if key not in self._stored:
            name = f"picture-{len(self._stored)}"
            picture = Image.fromarray(read_image(path))
            picture.thumbnail((LONGEST, LONGEST), Image.Resampling.LANCZOS)
            size = picture.height, picture.width
            stream = io.BytesIO()
            picture.save(stream, "JPEG", quality=QUALITY, optimize=True)
            href = "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
            self._stored[key] = name, size, tag("image", id=name, href=href, width=size[1], height=size[0])
        name, size, _ = self._stored[key]
        return name, size

    def html(self) -> Html:
        """All of them, not shown by themselves."""
        images = [each for _, _, each in self._stored.values()]
        return tag("svg", tag("defs", *images), width=0, height=0, class_="store", aria_hidden="true")


def figure(
    pictures: Pictures, split: Split, matched: Matched, names: Mapping[int, str], *, threshold: float, masks: bool
) -> Html:
    """One image: its detections and objects as shapes that a script can show and hide."""
    title = title_of(matched)
    try:
        name, shown = pictures.add(split, matched.image)
    except DataError as error:
        return tag("figure", tag("figcaption", str(error)), class_="picture")
    canvas = _Canvas(size_of(matched.image), shown, names, threshold)
    shapes = [canvas.object(each, outlined=masks) for each in matched.objects]
    falling = list(enumerate(matched.detections))
    shapes += [
        canvas.detection(each, outlined=masks and number < MOST_OUTLINES)
        for number, each in reversed(falling)  # the best on top
    ]
    counts = matched.counts(threshold)
    f1 = "" if counts.f1 is None else f"F1 {counts.f1:.2f}"
    drawing = tag(
        "svg",
        tag("use", href=f"#{name}"),
        *shapes,
        viewBox=f"0 0 {shown[1]} {shown[0]}",
        role="img",
        tabindex="0",
        aria_label=f"{title}: {counts.right} right, {counts.wrong} false alarms, {counts.missed} missed. "
        "Arrow keys go from box to box.",
    )
    words = f"{counts.right} right, {counts.wrong} false, {counts.missed} missed"
    caption = tag(
        "figcaption", tag("b", f1), " ", tag("span", words, class_="counts"), tag("span", title, class_="file")
    )
    return tag("figure", drawing, caption, class_="picture")


def title_of(matched: Matched) -> str:
    """The name of an image's file."""
    return file_name(matched.image).rpartition("/")[2]


@dataclass(frozen=True)
class _Canvas:
    """What the shapes over one picture share: the image's size, that of its copy, the classes' names, the threshold."""

    size: tuple[int, int]
    shown: tuple[int, int]
    names: Mapping[int, str]
    threshold: float

    def detection(self, each: Detection, *, outlined: bool) -> Html:
        about = {
            "right": f"right, IoU {each.iou:.2f} with its object",
            "wrong": f"false alarm, IoU {each.iou:.2f} with the nearest object of its class",
            "excused": "excused: on a crowd, or nobody looked for it",
        }[each.outcome]
        text = f"{self.names[each.category]}, score {each.score:.3g}\n{about}"
        hidden = each.score < self.threshold
        return self._group(each, each.score, text, f"found {each.outcome}", outlined=outlined, hidden=hidden)

    def object(self, each: Object, *, outlined: bool) -> Html:
        missed = each.found_at is None or each.found_at < self.threshold
        kind = "crowd" if each.crowd else "missed" if missed else "met"
        text = f"true: {self.names[each.category]}" + (" (a crowd)" if each.crowd else "")
        if each.found_at is not None:
            text += f"\nfound with score {each.found_at:.3g}"
        elif not each.crowd:
            text += "\nnot found with any score"
        return self._group(each, each.found_at, text, f"true {kind}", outlined=outlined)

    def _group(
        self,
        each: Detection | Object,
        score: float | None,
        text: str,
        kind: str,
        *,
        outlined: bool,
        hidden: bool = False,
    ) -> Html:
        """The box twice, the wider one dark below it, to be seen on any ground; and the outline."""
        across, down = self.shown[1] / self.size[1], self.shown[0] / self.size[0]
        left, right = (min(max(x * across, 0.0), float(self.shown[1])) for x in (each.box[0], each.box[2]))
        top, bottom = (min(max(y * down, 0.0), float(self.shown[0])) for y in (each.box[1], each.box[3]))
        place = {"x": round(left, 1), "y": round(top, 1)}
        place |= {"width": round(right - left, 1), "height": round(bottom - top, 1)}
        path = outline(each.segmentation, self.size, self.shown) if outlined else ""
        return tag(
            "g",
            tag("title", text),
            tag("rect", **place, class_="edge"),
            tag("rect", **place, class_="box"),
            *([tag("path", d=path, class_="outline")] if path else []),
            class_=kind,
            data_score=None if score is None else f"{score:.8g}",
            data_class=each.category,
            hidden=hidden,
        )
