"""The confusion matrix at the stored threshold: which classes are taken for which, or for background."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bucketrank.boxes import paired_iou
from bucketrank.report.chart import Html, join, table, tag
from bucketrank.report.matching import MIN_IOU, Detection, GroundTruthObject, MatchedImage

MAX_COLUMNS = 12  # classes up to which the whole matrix is shown
MAX_PAIRS = 15  # confused pairs shown for more classes
MAX_ROWS = 100  # classes in the table of errors


@dataclass(frozen=True)
class Confusion:
    """Counts (C + 1, C + 1): rows are ground truth, columns are detections; the last of each is the background."""

    categories: list[int]  # category ids of the first C rows and columns
    counts: NDArray[np.int64]

    @property
    def objects(self) -> NDArray[np.int64]:
        """Number of objects (C,) of each class."""
        totals: NDArray[np.int64] = self.counts[:-1].sum(1)
        return totals


def confusion(matched: Sequence[MatchedImage], categories: Sequence[int], *, threshold: float) -> Confusion:
    """Count the pairs of objects and detections with a score of at least ``threshold``.

    Correct detections are those of the COCO rule, so the diagonal counts the same as everywhere on the page. The
    others, highest score first, take the free object of another class with the highest IoU, if that is at least 0.5.
    What is left is background. Ignored detections and crowds do not count.
    """
    index = {category: number for number, category in enumerate(categories)}
    background = len(index)
    counts = np.zeros((background + 1, background + 1), dtype=np.int64)
    for image in matched:
        detections = [each for each in image.detections if each.score >= threshold]
        for each in detections:
            if each.outcome == "correct":
                counts[index[each.category], index[each.category]] += 1
        wrong = [each for each in detections if each.outcome == "wrong"]
        missed = [each for each in image.objects if not each.crowd and not each.is_detected(threshold)]
        taken = _cross_matches(wrong, missed)
        for number, each in enumerate(wrong):
            owner = taken.get(number)
            row = background if owner is None else index[missed[owner].category]
            counts[row, index[each.category]] += 1
        for number, lost in enumerate(missed):
            if number not in taken.values():
                counts[index[lost.category], background] += 1
    return Confusion(list(categories), counts)


def _cross_matches(wrong: Sequence[Detection], missed: Sequence[GroundTruthObject]) -> dict[int, int]:
    """Match detections, highest score first, to the free object of highest IoU: object index by detection index."""
    if not wrong or not missed:
        return {}
    boxes, objects = (torch.tensor([each.box for each in group], dtype=torch.float64) for group in (wrong, missed))
    ious = paired_iou(boxes[:, None], objects)
    taken: dict[int, int] = {}
    for number in range(len(wrong)):
        free = [owner for owner in range(len(missed)) if owner not in taken.values() and ious[number, owner] >= MIN_IOU]
        if free:
            taken[number] = max(free, key=lambda owner, row=number: float(ious[row, owner]))  # type: ignore[misc]
    return taken


def confusion_section(matrix: Confusion, class_names: Mapping[int, str], *, threshold: float) -> Html:
    """Show the matrix for few classes; for many classes the most confused pairs, and the errors of each class."""
    if threshold <= 0:
        return tag("p", "No matrix: these weights have no stored threshold.")
    if not matrix.counts.any():
        return tag("p", "No matrix: these images have no objects, and no detection reaches the stored threshold.")
    names = [class_names[category] for category in matrix.categories]
    about = (
        f"Detections with a score of at least {threshold:.3g}, matched at an IoU of 0.5. Rows are ground truth, "
        "columns are detections. A shade is a share of the objects or, for background, of the detections."
    )
    if len(names) <= MAX_COLUMNS:
        return join(_matrix(matrix.counts, names), tag("p", about, class_="note"))
    return join(
        tag("h5", "Most confused pairs"),
        _pairs(matrix, names),
        tag("h5", "Errors by class"),
        _errors(matrix, names),
        tag("p", about.partition(" Rows")[0] + " Classes with the most errors come first.", class_="note"),
    )


def _matrix(counts: NDArray[np.int64], names: Sequence[str]) -> Html:
    head = [tag("td"), *(tag("th", tag("span", name), scope="col") for name in [*names, "missed"])]
    rows = []
    for number, name in enumerate([*names, "background"]):
        is_background = number == len(names)
        totals = counts.sum(0) if is_background else np.full(len(counts), counts[number].sum())
        cells = [
            _cell(count, count / max(1, int(totals[column])), right=column == number)
            for column, count in enumerate(counts[number].tolist())
            if not (is_background and column == number)
        ]
        rows.append(tag("tr", tag("th", name, scope="row"), *cells))
    body = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), class_="confusion")
    return tag("div", body, class_="wide", tabindex="0", role="region", aria_label="confusion matrix")


def _cell(count: int, share: float, *, right: bool) -> Html:
    if not count:
        return tag("td", "0", class_="zero")
    shade = f"--share: {round(100 * share)}%"
    return tag("td", f"{count:,}", class_="right" if right else "error", style=shade, title=f"{100 * share:.0f} %")


def _pairs(matrix: Confusion, names: Sequence[str]) -> Html:
    between = matrix.counts[:-1, :-1].copy()
    np.fill_diagonal(between, 0)
    order = np.argsort(-between, axis=None, kind="stable")[:MAX_PAIRS]
    rows = []
    for row, column in (divmod(int(place), len(names)) for place in order):
        if between[row, column]:
            share = 100 * between[row, column] / matrix.objects[row]
            cells = [names[column], f"{between[row, column]:,}", f"{share:.1f} %"]
            rows.append([names[row], *cells])
    if not rows:
        return tag("p", "No object was taken for one of another class.")
    return table(["object", "detected as", "count", "share of the objects"], rows)


def _errors(matrix: Confusion, names: Sequence[str]) -> Html:
    inner = matrix.counts[:-1, :-1]
    right, missed, false = inner.diagonal(), matrix.counts[:-1, -1], matrix.counts[-1, :-1]
    confused = inner.sum(1) - right
    order = np.argsort(-(missed + false + confused), kind="stable")
    used = [row for row in order.tolist() if matrix.objects[row] or inner[:, row].any() or false[row]]
    rows = [
        [names[row], *(f"{int(each[row]):,}" for each in (matrix.objects, right, confused, missed, false))]
        for row in used[:MAX_ROWS]
    ]
    head = ["class", "objects", "correct", "detected as another class", "missed", "detections on background"]
    return table(head, rows, tall=True)
