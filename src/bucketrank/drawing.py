"""Draw detections on an image: boxes, masks, class and score, with the ground truth for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from bucketrank.output import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from bucketrank.settings.choices import MASK_THRESHOLD

Colour = tuple[int, int, int]
Detections = Mapping[str, Tensor]

# Colours of the first classes; further classes get lighter, then darker shades.
COLOURS: tuple[Colour, ...] = tuple(
    (int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16))
    for colour in (ORANGE, SKY, GREEN, PURPLE, YELLOW, BLUE, VERMILION)
)
SHADES = ((255, 0.0), (255, 0.5), (0, 0.35))  # grey level mixed into the palette, and its share
WHITE, INK = (255, 255, 255), (25, 25, 25)

MIN_SIDE = 640  # pixels of the longer side; smaller images are enlarged
CROWDED, MIN_CROWDED_SIDE = 24, 960  # images with at least 24 detections are enlarged to 960 pixels
MAX_NAME = 100  # characters of a class name
MASK_SHARE = 0.42  # opacity of a mask


class Style(NamedTuple):
    """Line width and font size in pixels."""

    line: int
    font_size: int


class Area(NamedTuple):
    """A rectangle in the drawn image, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: Area) -> float:
        """Compute the area of the intersection."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0) * max(height, 0)


def draw(
    image: Tensor | Image.Image | NDArray[np.uint8],
    detections: Detections | None = None,
    *,
    classes: Sequence[str],
    threshold: float = 0.0,
    ground_truth: Detections | None = None,
) -> Image.Image:
    """Draw the detections with a score of at least ``threshold``, and the ground-truth boxes dashed in white.

    ``image`` is a tensor (3, H, W) of bytes or of floats from 0 to 1, an array (H, W, 3) of bytes, or a Pillow image.
    ``detections`` and ``ground_truth`` have torchvision's format: ``boxes``, ``labels`` from 1 (named by ``classes``)
    and, optionally, ``scores`` and ``masks`` (n, H, W) or (n, 1, H, W). Higher scores are drawn on top. Small images
    are enlarged. A label without free space is shortened to its score or left out; a legend below the image then names
    the colours.

    >>> import torch
    >>> boxes, labels, scores = torch.tensor([[10.0, 10, 50, 40]]), torch.tensor([2]), torch.tensor([0.7])
    >>> detections = {"boxes": boxes, "labels": labels, "scores": scores}
    >>> draw(torch.zeros(3, 60, 80), detections, classes=["cat", "dog"]).size
    (640, 480)
    """
    canvas = as_rgb(image)
    boxes, labels, scores, masks = _selected(detections, threshold)
    min_side = MIN_CROWDED_SIDE if len(boxes) >= CROWDED else MIN_SIDE
    scale = max(1.0, min_side / max(canvas.size))
    size = round(canvas.width * scale), round(canvas.height * scale)
    scales = size[0] / canvas.width, size[1] / canvas.height
    canvas = canvas.resize(size, Image.Resampling.LANCZOS) if scale > 1 else canvas
    unit = max(size) / min_side
    style = Style(line=max(2, round(2.5 * unit)), font_size=max(11, round(15 * unit)))

    colours = [colour_of(label) for label in labels]
    for mask, colour in reversed(list(zip(masks, colours, strict=False))):
        canvas = _with_mask(canvas, mask, colour)
    pen = ImageDraw.Draw(canvas, "RGBA")
    for box in () if ground_truth is None else ground_truth["boxes"].tolist():
        _box(pen, _scaled(box, scales, size), WHITE, style, dashed=True)
    areas = [_scaled(box, scales, size) for box in boxes]
    for area, colour in reversed(list(zip(areas, colours, strict=True))):
        _box(pen, area, colour, style)
    texts = [_text(label, score, classes) for label, score in zip(labels, scores, strict=True)]
    if _labels(pen, areas, texts, colours, size, style):
        return _with_legend(canvas, [(colour_of(label), _name(label, classes)) for label in sorted(set(labels))], style)
    return canvas


def grid(images: Sequence[Image.Image], titles: Sequence[str] = (), *, columns: int) -> Image.Image:
    """Arrange images row by row in cells as large as the largest image; the first images get the titles.

    >>> page = grid([Image.new("RGB", (640, 480))] * 3, ["ground truth", "detections"], columns=2)
    >>> page.width > 2 * 640, page.height > 2 * 480
    (True, True)
    """
    if columns < 1 or not images or len(titles) > len(images):
        raise ValueError(
            f"grid: expected at least 1 column, 1 image and no more titles than images, got {columns}, "
            f"{len(images)} and {len(titles)}"
        )
    width, height = (max(image.size[side] for image in images) for side in (0, 1))
    gap = round(0.02 * width)
    font = font_of_size(max(14, round(width / 26)))
    rows = [images[first : first + columns] for first in range(0, len(images), columns)]
    headings = [list(titles[first : first + columns]) for first in range(0, len(images), columns)]
    # Only rows with a title have space for one.
    title_heights = [round(1.9 * font.size) if any(heading) else 0 for heading in headings]
    page = Image.new(
        "RGB",
        (gap + min(columns, len(images)) * (width + gap), gap + sum(title_heights) + len(rows) * (height + gap)),
        WHITE,
    )
    pen = ImageDraw.Draw(page)
    top = gap
    for row, heading, title_height in zip(rows, headings, title_heights, strict=True):
        for column, image in enumerate(row):
            left = gap + column * (width + gap)
            if column < len(heading):
                text = _fitting(heading[column], font, width)
                pen.text((left, top + title_height / 2 - gap / 4), text, fill=INK, font=font, anchor="lm")
            page.paste(image, (left + (width - image.width) // 2, top + title_height))
        top += title_height + height + gap
    return page


def colour_of(label: int) -> Colour:
    """Return the colour of a class; labels count from 1."""
    base = COLOURS[(label - 1) % len(COLOURS)]
    tone, share = SHADES[(label - 1) // len(COLOURS) % len(SHADES)]
    red, green, blue = (round((1 - share) * part + share * tone) for part in base)
    return red, green, blue


def as_rgb(image: Tensor | Image.Image | NDArray[np.uint8]) -> Image.Image:
    """Convert an image to a new Pillow image in RGB."""
    if isinstance(image, Image.Image):
        return image.convert("RGB").copy()
    if isinstance(image, Tensor):
        pixels = image.detach().cpu()
        if pixels.dim() != 3 or pixels.shape[0] != 3:
            raise ValueError(f"draw: expected an image of shape (3, height, width), got {tuple(pixels.shape)}")
        if pixels.is_floating_point():
            pixels = (pixels.clamp(0, 1) * 255).round()
        image = pixels.permute(1, 2, 0).byte().numpy()
    return Image.fromarray(np.ascontiguousarray(image)).convert("RGB")


@cache
def font_of_size(size: int) -> ImageFont.FreeTypeFont:
    """Load DejaVu Sans, which matplotlib includes, in this size."""
    return ImageFont.truetype(str(Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)


def _selected(
    detections: Detections | None, threshold: float
) -> tuple[list[list[float]], list[int], list[float | None], list[NDArray[np.bool_]]]:
    """Select boxes, labels, scores and masks of the detections to draw, in descending order of score."""
    if detections is None:
        return [], [], [], []
    boxes, labels, scores = detections["boxes"], detections["labels"], detections.get("scores")
    order = list(range(len(boxes)))
    if scores is not None:
        descending = scores.argsort(descending=True, stable=True).tolist()
        order = [each for each in descending if float(scores[each]) >= threshold]
    binary: list[NDArray[np.bool_]] = []
    if (masks := detections.get("masks")) is not None:
        chosen = masks[order].detach().cpu().reshape(len(order), *masks.shape[-2:])
        binary = list((chosen >= MASK_THRESHOLD if chosen.is_floating_point() else chosen.bool()).numpy())
    return (
        boxes[order].tolist(),
        labels[order].int().tolist(),
        [None] * len(order) if scores is None else scores[order].tolist(),
        binary,
    )


def _name(label: int, classes: Sequence[str]) -> str:
    name = classes[label - 1] if 1 <= label <= len(classes) else f"class {label}"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name[:MAX_NAME])


def _text(label: int, score: float | None, classes: Sequence[str]) -> tuple[str, str]:
    """Make the full and the short text of a label."""
    name = _name(label, classes)
    if score is None:
        return name, ""
    # The scores of a ranking loss may all be small, so show two significant digits.
    shown = f"{score:.2f}" if score >= 0.1 else f"{score:.2g}"
    return f"{name} {shown}", shown.removeprefix("0")


def _scaled(box: Sequence[float], scales: tuple[float, float], size: tuple[int, int]) -> Area:
    x1, y1, x2, y2 = box
    left, right = (min(max(x * scales[0], 0), size[0] - 1) for x in (x1, x2))
    top, bottom = (min(max(y * scales[1], 0), size[1] - 1) for y in (y1, y2))
    return Area(left, top, max(left, right), max(top, bottom))


def _with_mask(canvas: Image.Image, mask: NDArray[np.bool_], colour: Colour) -> Image.Image:
    soft = Image.fromarray(mask.astype(np.uint8) * 255).resize(canvas.size, Image.Resampling.BILINEAR)
    inside = soft.point([255 if value > 127 else 0 for value in range(256)])
    tinted = Image.blend(canvas, Image.new("RGB", canvas.size, colour), MASK_SHARE)
    return Image.composite(tinted, canvas, inside)


def _box(pen: ImageDraw.ImageDraw, area: Area, colour: Colour, style: Style, *, dashed: bool = False) -> None:
    """Draw a frame with a thin dark or light edge on both sides, visible on any background."""
    line = max(2, style.line * 2 // 3) if dashed else style.line
    edge = (0, 0, 0, 130) if _brightness(colour) > 70 else (255, 255, 255, 130)
    for width, fill in ((line + 2, edge), (line, (*colour, 255))):
        for piece in _pieces(area, width / 2, dash=4 * style.line if dashed else None):
            pen.rectangle(tuple(round(each) for each in piece), fill=fill)


def _pieces(area: Area, half: float, *, dash: int | None) -> list[Area]:
    """Split a frame into its sides, or their dashes, as rectangles that extend by ``half`` on both sides."""
    left, top, right, bottom = area
    pieces = []
    for start, end in _dashes(left, right, dash):
        pieces += [Area(start - half, y - half, end + half - 1, y + half - 1) for y in (top, bottom)]
    for start, end in _dashes(top, bottom, dash):
        pieces += [Area(x - half, start - half, x + half - 1, end + half - 1) for x in (left, right)]
    return pieces


def _dashes(start: float, end: float, dash: int | None) -> list[tuple[float, float]]:
    """Split a side into dashes (start, end), with a dash at both corners; one stroke if ``dash`` is None."""
    if dash is None or end - start <= 2 * dash:
        return [(start, end)]
    count = round((end - start + 0.8 * dash) / (1.8 * dash))
    step = (end - start - dash) / max(count - 1, 1)
    return [(start + each * step, start + each * step + dash) for each in range(count)]


def _labels(
    pen: ImageDraw.ImageDraw,
    areas: Sequence[Area],
    texts: Sequence[tuple[str, str]],
    colours: Sequence[Colour],
    size: tuple[int, int],
    style: Style,
) -> bool:
    """Write the labels in descending order of score, each where it hides least; return whether any was shortened."""
    font, pad = font_of_size(style.font_size), max(2, style.font_size // 5)
    ascent, descent = font.getmetrics()
    height = ascent + descent + pad
    taken: list[Area] = []
    shortened = False
    for area, choices, colour in zip(areas, texts, colours, strict=True):
        for text in choices:
            width = font.getlength(text) + 2 * pad
            place, hidden = _place(area, width, height, size, taken, style.line)
            if hidden <= 0:
                break
        if hidden > 0.35 * width * height or not text:
            # It would also make another label unreadable, so leave it out.
            shortened = True
            continue
        shortened |= text != choices[0]
        taken.append(place)
        pen.rounded_rectangle(tuple(place), radius=pad, fill=(*colour, 235), outline=(0, 0, 0, 90))
        middle = (place.left + place.right) / 2, (place.top + place.bottom) / 2
        pen.text(middle, text, fill=INK if _brightness(colour) > 115 else WHITE, font=font, anchor="mm")
    return shortened


def _place(
    area: Area, width: float, height: float, size: tuple[int, int], taken: Sequence[Area], line: int
) -> tuple[Area, float]:
    """Find the position where a label hides the least of earlier labels, and the area it hides."""
    inner = line / 2
    lefts = (area.left - inner, area.right + inner - width, (area.left + area.right - width) / 2)
    tops = (area.top - height - inner, area.bottom + inner, area.top + inner, area.bottom - height - inner)
    hidden: dict[Area, float] = {}
    for top, left in product(tops, lefts):
        x = min(max(left, 0), max(size[0] - width, 0))
        y = min(max(top, 0), max(size[1] - height, 0))
        place = Area(x, y, x + width, y + height)
        hidden[place] = sum(place.shared(other) for other in taken)
        if not hidden[place]:
            break
    return min(hidden.items(), key=lambda each: each[1])


def _brightness(colour: Colour) -> float:
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def _with_legend(canvas: Image.Image, entries: Sequence[tuple[Colour, str]], style: Style) -> Image.Image:
    font = font_of_size(style.font_size)
    step = round(1.7 * style.font_size)
    places: list[tuple[float, int]] = []
    x, row = 0.5 * style.font_size, 0
    for _, name in entries:
        width = font.getlength(name) + 2.6 * style.font_size
        if x + width > canvas.width and x > style.font_size:
            x, row = 0.5 * style.font_size, row + 1
        places.append((x, row))
        x += width
    page = Image.new("RGB", (canvas.width, canvas.height + (row + 1) * step), WHITE)
    page.paste(canvas)
    pen = ImageDraw.Draw(page)
    for (colour, name), (left, line) in zip(entries, places, strict=True):
        middle = canvas.height + (line + 0.5) * step
        half = style.font_size * 0.4
        pen.rectangle((left, middle - half, left + 2 * half, middle + half), fill=colour, outline=INK)
        pen.text((left + 1.3 * style.font_size, middle), name, fill=INK, font=font, anchor="lm")
    return page


def _fitting(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
