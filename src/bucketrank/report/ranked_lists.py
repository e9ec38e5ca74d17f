"""Draw ranked lists: the scored entries of one image, highest first, each with its loss gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bucketrank.report.built import describe_loss
from bucketrank.report.chart import Html, control, join, keys, tag, tick_label, ticks
from bucketrank.report.images import file_title
from bucketrank.report.matching import MatchedImage
from bucketrank.report.measurements import (
    Measurement,
    TrainingCandidates,
    delta_of,
    gradients,
    images_with_lists,
)
from bucketrank.settings import LossSettings, loss_spec
from bucketrank.weights.files import Meta

STEP = 8  # pixels per bar
MIN_WIDTH, MAX_WIDTH = 560, 1100  # drawing width; wider drawings scroll
LEFT, RIGHT, TOP = 54, 14, 26
UPPER, GAP, LOWER = 116, 40, 116  # heights of the scores, the gap and the gradients
BOTTOM = TOP + UPPER  # lower edge of the scores
MAX_ENTRIES = 200
ROLES = {"correct": "positive", "wrong": "negative", "ignored": "ignored"}  # outcome of a detection: its role


@dataclass(frozen=True)
class RankedEntry:
    """One bar: a detection, a positive candidate, or a bucket of negatives."""

    logit: float
    gradient: float
    role: str  # positive, negative or ignored
    text: str  # shown at the pointer


@dataclass(frozen=True)
class RankedList:
    """The entries, highest logit first, and a sentence about them."""

    entries: list[RankedEntry]
    about: str


def ranked_lists(measurement: Measurement, settings: LossSettings) -> Html:
    """Draw the lists of some images, with controls for the image and for the entries to rank."""
    images = [each for each in images_with_lists(measurement.best, measurement.worst) if each.detections]
    if not images:
        return tag("p", "No ranked lists: the images above have no detections.")
    sources = {"candidates": "training candidates, negatives in buckets"} if measurement.candidates else {}
    sources |= {"detections": "detections"}
    figures = []
    for number, image in enumerate(images):
        scores = trained_scores(image, measurement.meta)
        lists = {"detections": rank_detections(image, measurement.class_names, settings, scores=scores)}
        candidates = measurement.candidates.get(image.image["id"])
        if candidates is not None:
            lists["candidates"] = rank_candidates(candidates, list(measurement.class_names.values()))
        for source, ranked in lists.items():
            hidden = number > 0 or source != next(iter(sources))
            figures.append(_figure(file_title(image), ranked, settings, image=number, source=source, hidden=hidden))
    worst = {id(each) for each in measurement.worst}
    titles = [f"{file_title(each)} ({'worst' if id(each) in worst else 'best'})" for each in images]
    image_options = [tag("option", title, value=number) for number, title in enumerate(titles)]
    source_options = [tag("option", text, value=source) for source, text in sources.items()]
    controls = [
        control("Image ", tag("select", *image_options, class_="list-image")),
        control("Ranked entries ", tag("select", *source_options, class_="list-source")),
    ]
    return tag("div", tag("div", *controls, class_="controls scripted"), *figures, class_="ranking")


def trained_scores(image: MatchedImage, meta: Meta) -> list[float]:
    """Undo the calibration of the detection scores: these are the scores that the loss trained."""
    scores = [each.score for each in image.detections]
    if meta.calibration is None or meta.calibration.method != "platt" or not scores:
        return scores
    columns = np.array([meta.category_ids.index(each.category) for each in image.detections])
    before: list[float] = meta.calibration.score_map.inverse(np.array(scores), columns).tolist()
    return before


def rank_detections(
    image: MatchedImage,
    class_names: Mapping[int, str],
    settings: LossSettings,
    *,
    scores: Sequence[float] | None = None,
) -> RankedList:
    """List one entry per detection; correct detections are positive.

    The loss is computed from ``scores``, the scores before calibration; by default the detections' own.
    """
    computed = gradients(image.detections, settings, scores=scores)
    entries = []
    columns = zip(image.detections, computed.logits, computed.gradients, strict=True)
    for rank, (detection, logit, gradient) in enumerate(columns, start=1):
        role = ROLES[detection.outcome]
        text = (
            f"rank {rank}: {class_names[detection.category]}, {role}\n"
            f"score {detection.score:.3g} (log-odds {logit:.3g}), IoU {detection.iou:.2f}\n"
            f"gradient {gradient:+.3g}"
        )
        entries.append(RankedEntry(logit, gradient, role, text))
    positives = sum(entry.role == "positive" for entry in entries)
    about = f"{len(entries)} detections, {positives} of them positive; the loss is {computed.loss:.3g}."
    return _shortened(entries, about)


def rank_candidates(candidates: TrainingCandidates, class_names: Sequence[str]) -> RankedList:
    """List one entry per positive and one per bucket: the negatives between two positives."""
    entries = []
    logits, ious = candidates.logits.tolist(), candidates.ious.tolist()
    loss_gradients = candidates.gradients.tolist()
    classes, positives = candidates.classes.tolist(), candidates.positives.tolist()
    scores = candidates.logits.sigmoid().tolist()
    first = 0
    for rank in range(len(logits) + 1):
        last = rank == len(logits)
        if not last and not positives[rank]:
            continue
        if rank > first:
            count, total = rank - first, sum(loss_gradients[first:rank])
            mean = sum(logits[first:rank]) / count
            ranks = f"ranks {first + 1:,} to {rank:,}" if count > 1 else f"rank {rank:,}"
            text = (
                f"{ranks}: {count:,} negative{'s' * (count != 1)}\n"
                f"log-odds {logits[first]:.3g} to {logits[rank - 1]:.3g}, mean {mean:.3g}\n"
                f"gradient {total:+.3g} in total, {total / count:+.2g} on average"
            )
            entries.append(RankedEntry(mean, total, "negative", text))
        if not last:
            name = class_names[classes[rank]] if classes[rank] < len(class_names) else "object"
            text = (
                f"rank {rank + 1:,}: positive, {name}\n"
                f"score {scores[rank]:.3g} (log-odds {logits[rank]:.3g}), IoU {ious[rank]:.2f}\n"
                f"gradient {loss_gradients[rank]:+.3g}"
            )
            entries.append(RankedEntry(logits[rank], loss_gradients[rank], "positive", text))
        first = rank + 1
    count = sum(positives)
    about = (
        f"{count:,} positives and {len(logits) - count:,} negatives in {len(entries) - count:,} buckets; "
        f"the loss is {candidates.loss:.3g}."
    )
    return _shortened(entries, about)


def legend(settings: LossSettings, *, candidates: bool, calibrated: bool = False) -> Html:
    """Explain how to read the lists; with ``candidates``, also those of training candidates."""
    texts = {"positive": "positive", "negative": "negative or bucket of negatives", "ignored": "ignored (crowd)"}
    delta = delta_of(settings)
    about = (
        "The upper bars show the scored entries of one image, highest first. The lower bars show the loss gradient "
        f"({describe_loss(settings)}) for only this image. Upward bars are negative gradients: a training step would "
        "raise the score. "
    )
    about += loss_spec(settings.name).gradient_note
    about += " The vertical mark on the right is 2 delta long, the width of the ramp in the loss." if delta else ""
    about_candidates = (
        "Training candidates are the outputs of the head whose scores become the detections, with the objects assigned "
        "to them. The negatives between two positives, a bucket in the paper, are drawn as one bar: the mean of their "
        "log-odds above, the sum of their gradients below."
    )
    about_calibration = "The log-odds are from before calibration, as the loss ranked them in training."
    return join(
        tag("p", about),
        tag("p", about_candidates) if candidates else "",
        tag("p", about_calibration) if calibrated else "",
        keys(texts),
    )


def _shortened(entries: list[RankedEntry], about: str) -> RankedList:
    if len(entries) > MAX_ENTRIES:
        about += f" The drawing shows the first {MAX_ENTRIES} of {len(entries):,} bars."
    return RankedList(entries[:MAX_ENTRIES], about)


def _figure(title: str, ranked: RankedList, settings: LossSettings, *, image: int, source: str, hidden: bool) -> Html:
    count = len(ranked.entries)
    step = max(STEP, min((MIN_WIDTH - LEFT - RIGHT) / max(count, 1), 3 * STEP))
    width = round(max(MIN_WIDTH, LEFT + count * step + RIGHT))
    drawing = tag(
        "svg",
        _axes(ranked, settings, width),
        *(_bars(ranked, step)),
        viewBox=f"0 0 {width} {BOTTOM + GAP + LOWER + 8}",
        role="img",
        tabindex="0",
        aria_label=f"Ranked list of {title}, {source}. {ranked.about} Arrow keys move from bar to bar.",
        style=f"min-width:{width if width > MAX_WIDTH else min(width, 620)}px;max-width:{round(1.25 * width)}px",
    )
    box = tag("div", drawing, class_="wide")
    caption = tag("figcaption", ranked.about)
    return tag("figure", box, caption, class_="list", hidden=hidden, data_image=image, data_source=source)


def _range(ranked: RankedList) -> tuple[float, float]:
    logits = [entry.logit for entry in ranked.entries]
    low, high = min(logits, default=0.0), max(logits, default=1.0)
    margin = 0.08 * (high - low or 1.0)
    return low - margin, high + margin


def _gradient_range(ranked: RankedList) -> tuple[float, float]:
    """Find the largest negative gradient, as a positive number, and the largest positive one."""
    up = max((-entry.gradient for entry in ranked.entries), default=0.0)
    down = max((entry.gradient for entry in ranked.entries), default=0.0)
    min_height = 0.15 * max(up, down) or 1.0  # leaves space on both sides of 0
    return max(up, min_height), max(down, min_height)


def _zero(ranked: RankedList) -> float:
    up, down = _gradient_range(ranked)
    return round(BOTTOM + GAP + LOWER * up / (up + down), 1)  # y of gradient 0


def _axes(ranked: RankedList, settings: LossSettings, width: int) -> Html:
    low, high = _range(ranked)
    up, down = _gradient_range(ranked)
    right, zero = width - RIGHT, _zero(ranked)
    parts = [tag("line", x1=LEFT, x2=right, y1=y, y2=y, class_="axis") for y in (BOTTOM, zero)]
    marks = [
        (BOTTOM - UPPER * (value - low) / (high - low), tick_label(value)) for value in ticks(low, high, max_count=5)
    ]
    marks += [(zero, "0"), (BOTTOM + GAP, f"{-up:+.2g}"), (BOTTOM + GAP + LOWER, f"{down:+.2g}")]
    for y, text in marks:
        parts.append(tag("text", text, x=LEFT - 6, y=round(y + 4, 1), class_="tick", text_anchor="end"))
    titles = (
        (TOP - 14, "log-odds of the score"),
        (BOTTOM + GAP - 14, "gradient (upward: a training step raises the score)"),
    )
    parts += [tag("text", text, x=LEFT, y=y, class_="tick") for y, text in titles]
    delta = delta_of(settings)
    if delta and 2 * delta < 0.8 * (high - low):  # a longer mark would not fit beside the bars
        top, x = BOTTOM - UPPER * 2 * delta / (high - low), right + 7
        parts.append(tag("path", d=f"M{x - 3},{BOTTOM}h6M{x},{BOTTOM}V{top:.1f}M{x - 3},{top:.1f}h6", class_="delta"))
    return join(*parts)


def _bars(ranked: RankedList, step: float) -> list[Html]:
    low, high = _range(ranked)
    zero, unit = _zero(ranked), LOWER / sum(_gradient_range(ranked))
    bar_width = round(0.75 * step, 1)
    bars = []
    for number, entry in enumerate(ranked.entries):
        left = round(LEFT + number * step, 1)
        x = round(left + step / 8, 1)
        top = round(BOTTOM - UPPER * (entry.logit - low) / (high - low), 1)
        size = round(unit * abs(entry.gradient), 1)
        parts = [
            tag("rect", x=left, y=TOP, width=round(step, 1), height=UPPER + GAP + LOWER, class_="touch"),
            tag("rect", x=x, y=top, width=bar_width, height=round(BOTTOM - top, 1)),
        ]
        if entry.role == "positive":  # a dot, so that colour is not the only difference
            parts.append(tag("circle", cx=round(x + bar_width / 2, 1), cy=top, r=min(3.6, round(step / 2, 1))))
        if size > 0:
            y = zero if entry.gradient > 0 else round(zero - size, 1)
            parts.append(tag("rect", x=x, y=y, width=bar_width, height=size))
        bars.append(tag("g", tag("title", entry.text), *parts, class_=f"item {entry.role}"))
    return bars
