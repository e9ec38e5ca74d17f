"""Which trainings make up a table of the paper: rows of a detector with a loss. Nothing here needs torch.

Every row has two recipes: the paper's, for the paper's hardware and data, and one for a laptop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

LAPTOP = ("--inputs.min_size", "256", "--inputs.max_size", "256", "--trainer.pictures", "0")
EPOCHS = {  # of the laptop recipes in a study
    "atss-laptop": 2,
    "brs-detr-laptop": 1,
    "cascade-rcnn-laptop": 2,
    "faster-rcnn-laptop": 2,
    "mask-rcnn-laptop": 2,
    "paa-laptop": 2,
    "retinanet-laptop": 2,
}
TITLES = {
    ("rs", "pairwise"): "RS",
    ("rs", "bucketed"): "BRS",
    ("rs", "exact"): "RS, exact",
    ("ap", "pairwise"): "AP",
    ("ap", "bucketed"): "BAP",
    ("ap", "exact"): "AP, exact",
    ("alrp", "exact"): "aLRP",
    ("dr", ""): "DR",
    ("focal", ""): "focal",
    ("ce", ""): "CE",
}
SCORED = ("focal", "ce")


def _name(detector: str) -> str:
    """As in the recipes' names.

    >>> _name("Faster R-CNN")
    'faster-rcnn'
    """
    return detector.lower().replace("r-cnn", "rcnn").replace(" ", "-")


@dataclass(frozen=True)
class Row:
    """A detector trained with a loss by a method.

    ``small`` and ``paper`` are recipes; without one the row is not part of that budget. Rows of one loss share a
    learning rate, the best of those tried with the first of them. ``like`` is a row whose training time this one may
    use, for more epochs. ``hyperparameters`` is the paper's count for the loss.
    """

    detector: str
    loss: str
    method: str = ""
    small: str | None = None
    paper: str | None = None
    dataset: str = "COCO"
    hyperparameters: int | None = None
    like: str | None = None

    @property
    def key(self) -> str:
        """Its name in files."""
        parts = [_name(self.detector), self.loss, self.method, "longer" if self.like else ""]
        return "-".join(part for part in parts if part)

    @property
    def title(self) -> str:
        """The loss, as the paper's tables call it."""
        return TITLES[self.loss, self.method] + (" for longer" if self.like else "")

    @property
    def family(self) -> tuple[str, str]:
        """Rows that share a learning rate."""
        return self.detector, self.loss

    @property
    def flags(self) -> tuple[str, ...]:
        """What makes the laptop's recipe this row's."""
        chosen = ("--loss", self.loss, *(("--loss.method", self.method) if self.method else ()))
        return (*LAPTOP, "--schedule.epochs", str(EPOCHS[str(self.small)]), *chosen)


@dataclass(frozen=True)
class Study:
    """A study: its rows, and of which tables of the paper they are."""

    name: str
    title: str
    tables: str
    rows: tuple[Row, ...]
    counted: bool = False  # whether hyper-parameters are shown
    others: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)  # published by others: AP, 50, 75


def _rows(detector: str, small: str | None, paper: str, *losses: str, **own: object) -> tuple[Row, ...]:
    """Rows by names like ``rs-exact``; ``paper`` is the stem of the recipes' names."""
    names = {"rs-bucketed": "brs", "ap-bucketed": "bap", "rs-exact": "rs", "ap-exact": "ap", "alrp-exact": "alrp"}
    found = []
    for each in losses:
        loss, _, method = each.partition("-")
        recipe = f"{paper}-{names.get(each, each)}" if paper else None
        found.append(Row(detector, loss, method, small, recipe, **own))  # type: ignore[arg-type]
    return tuple(found)


RS = ("rs-exact", "rs-pairwise", "rs-bucketed")
AP = ("ap-exact", "ap-pairwise", "ap-bucketed")


def _dense(detector: str, *, focal: bool) -> tuple[Row, ...]:
    name = detector.lower()
    scored = _rows(detector, f"{name}-laptop", f"{name}-r50" if focal else "", "focal")
    return (*_rows(detector, f"{name}-laptop", f"{name}-r50", *RS, *AP), *scored)


def _counted(rows: tuple[Row, ...], counts: Mapping[str, int]) -> tuple[Row, ...]:
    return tuple(replace(row, hyperparameters=counts[row.loss]) for row in rows)


DETECTORS = Study(
    "detectors",
    "Time and accuracy of detectors with ranking losses",
    "table 1",
    (
        *_rows("Faster R-CNN", "faster-rcnn-laptop", "faster-rcnn-r50", *RS, "ce"),
        *_rows("Faster R-CNN R-101", None, "faster-rcnn-r101-dcn", *RS),
        *_rows("Cascade R-CNN", "cascade-rcnn-laptop", "cascade-rcnn-r50", *RS),
        *_rows("Cascade R-CNN", "cascade-rcnn-laptop", "", "ce"),
        *_dense("ATSS", focal=True),
        *_dense("PAA", focal=False),
    ),
)
SEGMENTATION = Study(
    "segmentation",
    "Time and accuracy of instance segmentation",
    "tables 2 and 3",
    (
        *_rows("Mask R-CNN", "mask-rcnn-laptop", "mask-rcnn-r50", *RS),
        *_rows("Mask R-CNN", "mask-rcnn-laptop", "", "ce"),
        *_rows("Mask R-CNN R-101", None, "mask-rcnn-r101", *RS),
        *_rows("Mask R-CNN Cityscapes", None, "mask-rcnn-r50-cityscapes", *RS, dataset="Cityscapes"),
        *_rows("Mask R-CNN LVIS", None, "mask-rcnn-r50-lvis", *RS, dataset="LVIS"),
    ),
)


def _budget(detector: str, paper: str, epochs: int) -> tuple[Row, ...]:
    small = f"{_name(detector)}-laptop"
    pairwise = Row(detector, "rs", "pairwise", small, f"{paper}-rs-pairwise")
    longer = {"exact": f"{paper}-rs-{epochs}", "bucketed": f"{paper}-brs-{epochs}"}
    return (
        pairwise,
        *(Row(detector, "rs", method, small, recipe, like=pairwise.key) for method, recipe in longer.items()),
    )


BUDGET = Study(
    "budget",
    "The time saved, spent on more epochs",
    "table 4",
    (*_budget("Cascade R-CNN", "cascade-rcnn-r50", 36), *_budget("Mask R-CNN", "mask-rcnn-r50", 27)),
)
DETR = Study(
    "detr",
    "Co-DETR with ranking losses: BRS-DETR",
    "tables 5 and 6",
    (
        Row("Co-DETR", "rs", "exact", "brs-detr-laptop", None),
        Row("Co-DETR", "rs", "pairwise", "brs-detr-laptop", None),
        Row("Co-DETR", "rs", "bucketed", "brs-detr-laptop", "brs-detr-r50"),
        Row("Co-DETR", "focal", "", "brs-detr-laptop", "co-detr-r50"),
        Row("Co-DETR Swin-T", "rs", "bucketed", None, "brs-detr-swin-t"),
        Row("Co-DETR Swin-T", "focal", "", None, "co-detr-swin-t"),
        Row("Co-DETR Swin-L", "rs", "bucketed", None, "brs-detr-swin-l"),
        Row("Co-DETR Swin-L", "focal", "", None, "co-detr-swin-l"),
    ),
    others={
        "DETR, 300 epochs": (42.0, 62.4, 44.2),
        "DN-DETR, 50 epochs": (48.6, 67.4, 52.7),
        "DINO, 12 epochs": (49.4, 66.9, 53.8),
        "H-DETR, 12 epochs": (48.7, 66.4, 52.9),
    },
)
BASELINES = Study(
    "baselines",
    "Score-based and other ranking losses",
    "tables 7 and 8",
    (
        *_counted(
            _rows("Faster R-CNN", "faster-rcnn-laptop", "faster-rcnn-r50", *RS, "ce", "alrp-exact"),
            {"rs": 3, "ce": 9, "alrp": 3},
        ),
        *_counted(
            _rows("ATSS", "atss-laptop", "atss-r50", *RS, "focal", "ap-pairwise", "dr", "alrp-exact"),
            {"rs": 1, "focal": 5, "ap": 5, "dr": 5, "alrp": 1},
        ),
        *_counted(
            _rows("RetinaNet", "retinanet-laptop", "retinanet-r50", "rs-exact", "rs-bucketed", "dr"), {"rs": 1, "dr": 5}
        ),
        *_counted(_rows("RetinaNet", "retinanet-laptop", "", "focal"), {"focal": 5}),
    ),
    counted=True,
)
STUDIES = {study.name: study for study in (DETECTORS, SEGMENTATION, BUDGET, DETR, BASELINES)}
SYNTHETIC = "synthetic"  # has losses to time, nothing to train
