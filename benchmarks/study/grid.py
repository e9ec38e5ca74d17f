"""The studies: rows of the paper's tables, and detectors in which losses are compared.

A row has up to two recipes: the paper's, for its hardware and data, and a small one for a laptop. Nothing here needs
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from bucketrank.settings.paper import SIZES, paper_row, paper_rows

LAPTOP = ("--inputs.min_size", "256", "--inputs.max_size", "256", "--trainer.pictures", "0")
EPOCHS = {  # laptop recipe: epochs in a study
    "atss-laptop": 2,
    "brs-detr-laptop": 1,
    "cascade-rcnn-laptop": 2,
    "faster-rcnn-laptop": 2,
    "mask-rcnn-laptop": 2,
    "paa-laptop": 2,
    "retinanet-laptop": 2,
}
ROW_TITLES = {
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
    """Convert a detector title to its form in recipe names.

    >>> _name("Faster R-CNN")
    'faster-rcnn'
    """
    return detector.lower().replace("r-cnn", "rcnn").replace(" ", "-")


@dataclass(frozen=True)
class Row:
    """A detector trained with a loss by a method.

    ``small`` and ``paper`` are the recipes for the two budgets; without a recipe the row is not part of that budget.
    The rows of one loss share a learning rate: the best of those tried with the first of these rows. ``like`` is the
    key of another row, whose training time this row spends on more epochs. ``hyperparameters`` is the paper's count
    for the loss.
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
        """The name of the row in files and in --only."""
        parts = [_name(self.detector), self.loss, self.method, "longer" if self.like else ""]
        return "-".join(part for part in parts if part)

    @property
    def of_boxes(self) -> bool:
        """Whether the paper's AP for the row is that of boxes, also if the detector has masks."""
        published = paper_row(self.paper or "")
        return published is not None and published.metric == "box"

    @property
    def title(self) -> str:
        """The name of the loss in the paper's tables."""
        return ROW_TITLES[self.loss, self.method] + (" for longer" if self.like else "")

    @property
    def family(self) -> tuple[str, str]:
        """The detector and the loss; rows of the same family share a learning rate."""
        return self.detector, self.loss

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that turn the laptop recipe into this row."""
        loss = ("--loss", self.loss, *(("--loss.method", self.method) if self.method else ()))
        return (*LAPTOP, "--schedule.epochs", str(EPOCHS[str(self.small)]), *loss)


@dataclass(frozen=True)
class Study:
    """The rows of a study and the tables of the paper they belong to.

    ``metrics`` are the AP columns. ``counted``: show the numbers of hyper-parameters. ``others``: the metrics of
    detectors that the paper cites, by title.
    """

    name: str
    title: str
    tables: str
    rows: tuple[Row, ...]
    metrics: tuple[str, ...] = ("AP", "AP50", "AP75")
    counted: bool = False
    others: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def _rows(detector: str, small: str | None, paper: str, *losses: str, **own: object) -> tuple[Row, ...]:
    """Return one row per loss, named like ``rs-exact``; ``paper`` is the prefix of the paper's recipe names."""
    endings = {"rs-bucketed": "brs", "ap-bucketed": "bap", "rs-exact": "rs", "ap-exact": "ap", "alrp-exact": "alrp"}
    rows = []
    for name in losses:
        loss, _, method = name.partition("-")
        recipe = f"{paper}-{endings.get(name, name)}" if paper else None
        rows.append(Row(detector, loss, method, small, recipe, **own))  # type: ignore[arg-type]
    return tuple(rows)


RS = ("rs-exact", "rs-pairwise", "rs-bucketed")
AP = ("ap-exact", "ap-pairwise", "ap-bucketed")


def _dense(detector: str, *, focal: bool) -> tuple[Row, ...]:
    name = detector.lower()
    scored = _rows(detector, f"{name}-laptop", f"{name}-r50" if focal else "", "focal")
    return (*_rows(detector, f"{name}-laptop", f"{name}-r50", *RS, *AP), *scored)


def _counted(*rows: Row) -> tuple[Row, ...]:
    """Return the rows with the paper's numbers of hyper-parameters."""
    return tuple(replace(row, hyperparameters=_hyperparameters(str(row.paper))) for row in rows)


def _hyperparameters(recipe: str) -> int | None:
    published = paper_row(recipe)
    return None if published is None else published.hyperparameters


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
        Row("Co-DETR", "rs", "exact", "brs-detr-laptop", "rs-detr-r50"),
        Row("Co-DETR", "rs", "pairwise", "brs-detr-laptop", "rs-detr-r50-pairwise"),
        Row("Co-DETR", "rs", "bucketed", "brs-detr-laptop", "brs-detr-r50"),
        Row("Co-DETR", "focal", "", "brs-detr-laptop", "co-detr-r50"),
        Row("Co-DETR Swin-T", "rs", "bucketed", None, "brs-detr-swin-t"),
        Row("Co-DETR Swin-T", "focal", "", None, "co-detr-swin-t"),
        Row("Co-DETR Swin-L", "rs", "bucketed", None, "brs-detr-swin-l"),
        Row("Co-DETR Swin-L", "focal", "", None, "co-detr-swin-l"),
    ),
    metrics=("AP", "AP50", "AP75", *SIZES),
    others={row.row: tuple(row.numbers.values()) for row in paper_rows() if row.table == 6},
)
BASELINES = Study(
    "baselines",
    "Score-based and other ranking losses",
    "tables 7 and 8",
    (
        *_counted(
            *_rows("Faster R-CNN", "faster-rcnn-laptop", "faster-rcnn-r50", *RS, "ce", "alrp-exact"),
            *_rows("ATSS", "atss-laptop", "atss-r50", *RS, "focal", "ap-pairwise", "dr", "alrp-exact"),
            *_rows("RetinaNet", "retinanet-laptop", "retinanet-r50", "rs-exact", "rs-bucketed", "dr"),
        ),
        # The paper has no focal loss on RetinaNet; its count is that of focal loss on ATSS.
        Row("RetinaNet", "focal", "", "retinanet-laptop", hyperparameters=_hyperparameters("atss-r50-focal")),
    ),
    counted=True,
)
STUDIES = {study.name: study for study in (DETECTORS, SEGMENTATION, BUDGET, DETR, BASELINES)}
LOSSES = "losses"  # compares losses in one of the COMPARED detectors
SYNTHETIC = "synthetic"  # a study that times the losses and trains nothing
REGRET = "regret"  # summarises the files of several LOSSES studies and trains nothing


LOSS_TITLES = {
    "rs": "RS",
    "focal": "focal",
    "ce": "cross-entropy",
    "qfl": "QFL",
    "vfl": "VFL",
    "bce": "soft BCE",
    "mal": "MAL",
    "iabce": "IoU-aware BCE",
    "rsq": "RS + QFL",
    "ap": "AP",
    "dr": "DR",
    "alrp": "aLRP",
}
OURS = "rs"  # the loss under test
RIVALS = ("qfl", "vfl", "bce", "mal", "iabce")  # score-based losses that see the IoU, as RS does
Head = Literal["same", "published"]
ONE_HEAD = ("rs", "focal", "qfl", "vfl", "bce", "rsq", "ap")  # compared in one head
SAME_BOXES = ("--loss.box_loss", "giou", "--loss.box_confidence", "true")


@dataclass(frozen=True)
class ComparedDetector:
    """A detector of the comparison.

    ``usual`` is the loss that it is usually trained with. ``same_head`` are the flags that give every loss the same
    head and box loss; a detector without them is only compared as published. ``losses`` are compared by default.
    """

    title: str
    recipe: str
    usual: str
    same_head: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()

    def default_losses(self, head: Head) -> tuple[str, ...]:
        """Return the losses that are compared by default."""
        return self.losses or (ONE_HEAD if head == "same" else (OURS, self.usual))


COMPARED = {
    detector.recipe: detector
    for detector in (
        ComparedDetector(
            "ATSS",
            "atss-laptop",
            "focal",
            ("--detector.anchors", "3", "--detector.quality_branch", "false", *SAME_BOXES),
        ),
        ComparedDetector("RetinaNet", "retinanet-laptop", "focal", ("--detector.scales", "3", *SAME_BOXES)),
        ComparedDetector("PAA", "paa-laptop", "focal"),
        ComparedDetector("Faster R-CNN", "faster-rcnn-laptop", "ce"),
        ComparedDetector("Cascade R-CNN", "cascade-rcnn-laptop", "ce"),
        ComparedDetector("Mask R-CNN", "mask-rcnn-laptop", "ce"),
        ComparedDetector("Co-DETR", "brs-detr-laptop", "focal", losses=("rs", "focal", "vfl", "mal")),
    )
}
