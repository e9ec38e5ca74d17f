"""Ranked lists of one image as drawings: what is scored, in the order of its scores, and how the loss would move it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bucketrank.detectors.settings import LossSettings
from bucketrank.report.candidates import Candidates
from bucketrank.report.chart import short, ticks
from bucketrank.report.gradients import delta_of, gradients, in_words
from bucketrank.report.markup import Html, join, tag
from bucketrank.report.matching import Matched
from bucketrank.report.measure import Measured, listed
from bucketrank.report.pictures import title_of

STEP = 8  # pixels of a rank
LEAST_WIDTH, MOST_WIDTH = 560, 1100  # of the whole drawing; a longer list scrolls
LEFT, RIGHT, TOP = 54, 14, 26
UPPER, GAP, LOWER = 116, 40, 116  # heights: scores, the space between, gradients
BOTTOM = TOP + UPPER  # of the scores
MOST_ENTRIES = 200
KINDS = {"right": "positive", "wrong": "negative", "excused": "excused"}


@dataclass(frozen=True)
class Entry:
    """A bar of the list: a detection, a positive candidate, or a bucket of negatives."""

    logit: float
    gradient: float
    kind: str  # positive, negative or excused
    text: str


@dataclass(frozen=True)
class RankedList:
    """The entries in falling order, and a sentence about them."""

    entries: list[Entry]
    about: str


def ranked_lists(measured: Measured, settings: LossSettings) -> Html:
    """The lists of some images; one select chooses the image, another what is ranked."""
    images = [each for each in listed(measured.best, measured.worst) if each.detections]
    if not images:
        return tag("p", "There is no detection in any of the images above, so there is nothing to rank.")
    kinds = {"candidates": "training candidates, negatives in buckets"} if measured.candidates else {}
    kinds |= {"detections": "detections"}
    figures = []
    for number, image in enumerate(images):
        lists = {"detections": of_detections(image, measured.names, settings)}
        found = measured.candidates.get(image.image["id"])
        if found is not None:
            lists["candidates"] = of_candidates(found, list(measured.names.values()))
        for kind, each in lists.items():
            hidden = number > 0 or kind != next(iter(kinds))
            figures.append(_figure(title_of(image), each, settings, image=number, ranked_by=kind, hidden=hidden))
    worst = {id(each) for each in measured.worst}
    names = [f"{title_of(each)} ({'worst' if id(each) in worst else 'best'})" for each in images]
    which = tag("select", *(tag("option", name, value=number) for number, name in enumerate(names)), class_="which")
    what = tag("select", *(tag("option", text, value=kind) for kind, text in kinds.items()), class_="what")
    controls = [
        tag("label", "Image ", which, class_="control"),
        tag("label", "What is ranked ", what, class_="control"),
    ]
    return tag("div", tag("div", *controls, class_="controls scripted"), *figures, class_="ranking")


def of_detections(image: Matched, names: Mapping[int, str], settings: LossSettings) -> RankedList:
    """Each detection by itself; a right one is positive."""
    found = gradients(image.detections, settings)
    entries = []
    each = zip(image.detections, found.logits, found.gradients, strict=True)
    for rank, (detection, logit, gradient) in enumerate(each, start=1):
        kind = KINDS[detection.outcome]
        text = (
            f"rank {rank}: {names[detection.category]}, {kind}\nscore {detection.score:.3g} (log-odds {logit:.3g}), "
            f"IoU {detection.iou:.2f}\ngradient {gradient:+.3g}"
        )
        entries.append(Entry(logit, gradient, kind, text))
    positives = sum(entry.kind == "positive" for entry in entries)
    return _cut(entries, f"{len(entries)} detections, {positives} of them positive; the loss is {found.loss:.3g}.")


def of_candidates(found: Candidates, names: Sequence[str]) -> RankedList:
    """Each positive by itself; the negatives between two positives are a bucket, and drawn as one."""
    entries = []
    logits, pushes, ious = found.logits.tolist(), found.gradients.tolist(), found.ious.tolist()
    classes, positives, scores = found.classes.tolist(), found.positives.tolist(), found.logits.sigmoid().tolist()
    first = 0
    for rank in range(len(logits) + 1):
        last = rank == len(logits)
        if not last and not positives[rank]:
            continue
        if rank > first:
            count, total = rank - first, sum(pushes[first:rank])
            mean = sum(logits[first:rank]) / count
            ranks = f"ranks {first + 1:,} to {rank:,}" if count > 1 else f"rank {rank:,}"
            text = (
                f"{ranks}: {count:,} negative{'s' * (count != 1)}\nlog-odds {logits[first]:.3g} to "
                f"{logits[rank - 1]:.3g}, mean {mean:.3g}\ngradient {total:+.3g} together, {total / count:+.2g} each"
            )
            entries.append(Entry(mean, total, "negative", text))
        if not last:
            text = (
                f"rank {rank + 1:,}: positive, {names[classes[rank]] if classes[rank] < len(names) else 'object'}\n"
                f"score {scores[rank]:.3g} (log-odds {logits[rank]:.3g}), IoU {ious[rank]:.2f}\n"
                f"gradient {pushes[rank]:+.3g}"
            )
            entries.append(Entry(logits[rank], pushes[rank], "positive", text))
        first = rank + 1
    count = sum(positives)
    about = (
        f"{count:,} positives, and {len(logits) - count:,} negatives in {len(entries) - count:,} buckets; "
        f"the loss is {found.loss:.3g}."
    )
    return _cut(entries, about)


def legend(settings: LossSettings, *, candidates: bool) -> Html:
    """How to read the lists, among them those of training candidates or not."""
    texts = {"positive": "positive", "negative": "negative, or a bucket of them", "excused": "excused (crowd)"}
    keys = [tag("span", tag("span", class_=f"key {name}"), text, class_="entry") for name, text in texts.items()]
    delta = delta_of(settings)
    about = (
        "Above: what is scored in one image, the best first. Below: how a step against the gradient would move it, by "
        f"{in_words(settings)}, with this image as a batch of its own. "
    )
    if delta is not None:
        about += (
            "A positive is pushed up for the negatives above it, and they are pushed down by as much; where the order "
            "is right nothing is pushed. "
        )
        about += "Of two positives the one of lower IoU should not stand above. " if settings.name == "rs" else ""
        about += "The upright mark is as long as the smoothed step, 2 delta." if delta else ""
    elif settings.name != "dr":
        about += "This loss looks at one score at a time: what stands above it does not matter."
    kinds = (
        "Training candidates are those of the head that detects, with what was assigned to them. The negatives between "
        "two positives, one bucket in the paper, are one bar: their mean above, their sum below."
    )
    return join(tag("p", about), tag("p", kinds) if candidates else "", tag("p", *keys, class_="keys"))


def _cut(entries: list[Entry], about: str) -> RankedList:
    if len(entries) > MOST_ENTRIES:
        about += f" The first {MOST_ENTRIES} of {len(entries):,} bars are drawn."
    return RankedList(entries[:MOST_ENTRIES], about)


def _figure(
    title: str, ranked: RankedList, settings: LossSettings, *, image: int, ranked_by: str, hidden: bool
) -> Html:
    count = len(ranked.entries)
    step = max(STEP, min((LEAST_WIDTH - LEFT - RIGHT) / max(count, 1), 3 * STEP))
    width = round(max(LEAST_WIDTH, LEFT + count * step + RIGHT))
    drawing = tag(
        "svg",
        _axes(ranked, settings, width),
        *(_bars(ranked, step)),
        viewBox=f"0 0 {width} {BOTTOM + GAP + LOWER + 8}",
        role="img",
        tabindex="0",
        aria_label=f"Ranked list of {title}, {ranked_by}. {ranked.about} Arrow keys go from bar to bar.",
        style=f"min-width:{width if width > MOST_WIDTH else min(width, 620)}px;max-width:{round(1.25 * width)}px",
    )
    box = tag("div", drawing, class_="wide")
    caption = tag("figcaption", ranked.about)
    return tag("figure", box, caption, class_="list", hidden=hidden, data_image=image, data_ranked=ranked_by)


def _range(ranked: RankedList) -> tuple[float, float]:
    logits = [entry.logit for entry in ranked.entries]
    low, high = min(logits, default=0.0), max(logits, default=1.0)
    room = 0.08 * (high - low or 1.0)
    return low - room, high + room


def _pushes(ranked: RankedList) -> tuple[float, float]:
    """How far the lower part reaches to gradients below 0, which push up, and above."""
    up = max((-entry.gradient for entry in ranked.entries), default=0.0)
    down = max((entry.gradient for entry in ranked.entries), default=0.0)
    least = 0.15 * max(up, down) or 1.0  # so that both sides are seen
    return max(up, least), max(down, least)


def _zero(ranked: RankedList) -> float:
    """Where the lower part has no gradient."""
    up, down = _pushes(ranked)
    return round(BOTTOM + GAP + LOWER * up / (up + down), 1)


def _axes(ranked: RankedList, settings: LossSettings, width: int) -> Html:
    low, high = _range(ranked)
    up, down = _pushes(ranked)
    right, zero = width - RIGHT, _zero(ranked)
    parts = [tag("line", x1=LEFT, x2=right, y1=y, y2=y, class_="axis") for y in (BOTTOM, zero)]
    marks = [(BOTTOM - UPPER * (value - low) / (high - low), short(value)) for value in ticks(low, high, most=5)]
    marks += [(zero, "0"), (BOTTOM + GAP, f"{-up:+.2g}"), (BOTTOM + GAP + LOWER, f"{down:+.2g}")]
    for y, text in marks:
        parts.append(tag("text", text, x=LEFT - 6, y=round(y + 4, 1), class_="tick", text_anchor="end"))
    titles = (
        (TOP - 14, "log-odds of the score"),
        (BOTTOM + GAP - 14, "gradient: up is pushed up, down is pushed down"),
    )
    parts += [tag("text", text, x=LEFT, y=y, class_="tick") for y, text in titles]
    delta = delta_of(settings)
    if delta and 2 * delta < 0.8 * (high - low):  # longer than the panel it would say nothing
        top, x = BOTTOM - UPPER * 2 * delta / (high - low), right + 7
        parts.append(tag("path", d=f"M{x - 3},{BOTTOM}h6M{x},{BOTTOM}V{top:.1f}M{x - 3},{top:.1f}h6", class_="delta"))
    return join(*parts)


def _bars(ranked: RankedList, step: float) -> list[Html]:
    low, high = _range(ranked)
    zero, unit = _zero(ranked), LOWER / sum(_pushes(ranked))
    thick = round(0.75 * step, 1)
    bars = []
    for number, entry in enumerate(ranked.entries):
        left = round(LEFT + number * step, 1)
        x = round(left + step / 8, 1)
        top = round(BOTTOM - UPPER * (entry.logit - low) / (high - low), 1)
        size = round(unit * abs(entry.gradient), 1)
        parts = [
            tag("rect", x=left, y=TOP, width=round(step, 1), height=UPPER + GAP + LOWER, class_="touch"),
            tag("rect", x=x, y=top, width=thick, height=round(BOTTOM - top, 1)),
        ]
        if entry.kind == "positive":  # told by its shape as well as by its colour
            parts.append(tag("circle", cx=round(x + thick / 2, 1), cy=top, r=min(3.6, round(step / 2, 1))))
        if size > 0:
            y = zero if entry.gradient > 0 else round(zero - size, 1)
            parts.append(tag("rect", x=x, y=y, width=thick, height=size))
        bars.append(tag("g", tag("title", entry.text), *parts, class_=f"item {entry.kind}"))
    return bars
