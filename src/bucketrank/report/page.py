"""The page: its sections put together in one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import resources
from string import Template
from typing import Any

from bucketrank import __version__
from bucketrank.report.chart import COLOURS
from bucketrank.report.curves import curves
from bucketrank.report.folder import RunFolder
from bucketrank.report.gradients import in_words
from bucketrank.report.markup import Html, join, tag
from bucketrank.report.measure import Measured
from bucketrank.report.pictures import Pictures, figure
from bucketrank.report.precision import precision_recall
from bucketrank.report.ranking import legend, ranked_lists
from bucketrank.report.tables import classes, metrics, settings

GENERATOR = "bucketrank report"
FEW = 4  # runs that the heading names
SCRIPTS = ("tip.js", "chart.js", "pictures.js", "ranking.js", "tabs.js")


@dataclass(frozen=True)
class Subject:
    """A run and what was measured of it, or why nothing was."""

    run: RunFolder
    measured: Measured | None
    gaps: list[str]


def page(subjects: Sequence[Subject]) -> str:
    """The whole page as text."""
    runs = [subject.run for subject in subjects]
    pictures = Pictures()
    panels = [_panel(number, subject, pictures) for number, subject in enumerate(subjects)]
    content = join(
        _section("runs", "Runs", _runs(subjects)),
        _section("curves", "Curves", join(_legend(runs), curves(runs))),
        _section("numbers", "Average precision", _numbers(subjects)),
        _section("images", "On the validation images", tag("div", *panels, class_="panels")),
    )
    names = ", ".join(run.name for run in runs) if len(runs) <= FEW else f"{len(runs)} runs"
    script = "".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_asset("page.html")).substitute(
        title=join(f"{names}: report"),
        heading=join(names),
        generator=GENERATOR,
        digest=digest,
        style=_asset("page.css"),
        content=content,
        pictures=pictures.html(),
        version=__version__,
        date=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        script=script,
    )


def _asset(name: str) -> str:
    return resources.files("bucketrank.report").joinpath("assets", name).read_text(encoding="utf-8")


def _section(name: str, title: str, content: Html) -> Html:
    return tag("section", tag("h2", title, id=f"{name}-title"), content, id=name, aria_labelledby=f"{name}-title")


def _runs(subjects: Sequence[Subject]) -> Html:
    cards = [_card(number, subject) for number, subject in enumerate(subjects)]
    return join(tag("div", *cards, class_="cards"), settings([subject.run for subject in subjects]))


def _card(number: int, subject: Subject) -> Html:
    run, about = subject.run, subject.run.environment
    recipe = run.recipe
    commit = about.get("commit")
    changed = " with local changes" if about.get("modified") else ""
    facts = {
        "detector": f"{recipe.detector['name']} on {recipe.backbone.name}",
        "loss": in_words(recipe.loss),
        "data": str(subject.measured.data if subject.measured else run.data or "not known"),
        "weights": subject.measured.weights.name if subject.measured else "not measured",
        "commit": f"{str(commit)[:12]}{changed}" if commit else "not known",
        "machine": _machine(about),
        "began": str(about.get("date", "not known")).replace("T", " ").replace("+00:00", " UTC"),
    }
    rows = [join(tag("dt", key), tag("dd", value)) for key, value in facts.items()]
    gaps = [*run.gaps, *subject.gaps]
    missing = tag("ul", *(tag("li", gap) for gap in gaps), class_="gaps") if gaps else Html("")
    return tag("article", tag("h3", _swatch(number), run.name), tag("dl", *rows), missing, class_="card")


def _machine(about: dict[str, Any]) -> str:
    words = [str(about[key]) for key in ("gpu", "processor") if about.get(key)]
    cores = about.get("cores")
    if isinstance(cores, int):
        words.append(f"{cores} core{'s' * (cores != 1)}")
    versions = about.get("versions")
    if isinstance(versions, dict) and versions.get("torch"):
        words.append(f"torch {versions['torch']}")
    return ", ".join(words) or "not known"


def _legend(runs: Sequence[RunFolder]) -> Html:
    buttons = [
        tag("button", _swatch(number), run.name, type="button", data_run=number, aria_pressed="true")
        for number, run in enumerate(runs)
    ]
    return tag("div", *buttons, class_="legend", role="group", aria_label="Runs in the charts", hidden=len(runs) < 2)


def _swatch(number: int) -> Html:
    return tag("span", class_=f"swatch c{number % COLOURS}", aria_hidden="true")


def _numbers(subjects: Sequence[Subject]) -> Html:
    names = [subject.run.name for subject in subjects]
    parts: list[Html] = []
    for kind in ("boxes", "masks"):
        rows = [_metrics(subject, kind) for subject in subjects]
        kept = [(name, row) for name, row in zip(names, rows, strict=True) if row]
        if kept:
            caption = f"AP and AR of {kind} in per cent. {_source(subjects)}"
            compare = _comparable(subjects)
            table = metrics([name for name, _ in kept], [row for _, row in kept], compare=compare, caption=caption)
            parts += [tag("h3", kind.capitalize()), table]
    measured = [(subject.run.name, subject.measured) for subject in subjects if subject.measured is not None]
    for kind in ("boxes", "masks"):
        kept_classes = [(name, each.results[kind].per_class) for name, each in measured if kind in each.results]
        if kept_classes:
            table = classes(
                [name for name, _ in kept_classes],
                [each for _, each in kept_classes],
                compare=_comparable(subjects),
                caption=f"AP of {kind} by class, in per cent; - where the images have no object of it.",
            )
            parts += [tag("h3", f"{kind.capitalize()}, by class"), table]
    return join(*parts) if parts else tag("p", "There are no numbers yet: no evaluation has been written.")


def _metrics(subject: Subject, kind: str) -> dict[str, float]:
    """As measured now or, without the data, as the last row of validation.csv has them."""
    if subject.measured is not None:
        found = subject.measured.results.get(kind)
        return {} if found is None else found.metrics
    last = subject.run.validation.last()
    numbers = {key.removeprefix(f"{kind}/"): value for key, value in last.items() if key.startswith(f"{kind}/")}
    return numbers if any(math.isfinite(value) for value in numbers.values()) else {}


def _source(subjects: Sequence[Subject]) -> str:
    """Where the numbers come from, said once for the runs that share it."""
    told: dict[str, list[str]] = {}
    for subject in subjects:
        if subject.measured is not None:
            words = (
                f"{subject.measured.weights.name} on {subject.measured.images:,} of {subject.measured.total:,} images"
            )
        elif subject.run.validation.steps:
            words = f"step {subject.run.validation.steps[-1]:,} in validation.csv, not measured anew"
        else:
            continue
        told.setdefault(words, []).append(subject.run.name)
    if len(told) == 1:
        text = f"Measured: {next(iter(told))}."
    else:
        text = " ".join(f"{', '.join(names)}: {words}." for words, names in told.items())
    return text + (" In bold the best." if len(subjects) > 1 and _comparable(subjects) else "")


def _comparable(subjects: Sequence[Subject]) -> bool:
    """Whether the numbers are of the same images, as far as can be known; runs without numbers do not matter."""
    measured = {
        (each.split.annotations.resolve(), each.images)
        for subject in subjects
        if (each := subject.measured) is not None
    }
    told = {subject.run.data for subject in subjects if subject.measured is None and subject.run.validation.steps}
    return (len(measured) == 1 and not told) or (not measured and len(told) == 1 and None not in told)


def _panel(number: int, subject: Subject, pictures: Pictures) -> Html:
    run, measured = subject.run, subject.measured
    title = tag("h3", _swatch(number), run.name, class_="name")
    if measured is None:
        needed = "Precision and recall, images and the ranked list need the weights and the data."
        content = tag("p", " ".join([needed, *run.gaps, *subject.gaps]))
    else:
        content = _measured(measured, run, pictures, colour=number % COLOURS)
    return tag("div", title, content, class_="panel", id=f"run-{number}", data_name=run.name)


def _measured(measured: Measured, run: RunFolder, pictures: Pictures, *, colour: int) -> Html:
    threshold = measured.meta.threshold
    best, worst = measured.best, measured.worst
    masks = "masks" in measured.results
    groups = []
    for title, chosen in (("Best", best), ("Worst", worst)):
        if chosen:
            figures = [
                figure(pictures, measured.split, each, measured.names, threshold=threshold, masks=masks)
                for each in chosen
            ]
            groups.append(join(tag("h5", title), tag("div", *figures, class_="gallery")))
    shown = [*best, *worst]
    present = {each.category for image in shown for each in image.detections}
    present |= {each.category for image in shown for each in image.objects}
    options = [tag("option", "all classes", value="")]
    options += [tag("option", name, value=key) for key, name in measured.names.items() if key in present]
    controls = tag(
        "div",
        tag("label", "Class ", tag("select", *options, class_="class"), class_="control"),
        tag(
            "label",
            "Score from ",
            tag("input", type="range", min=0, max=1000, step=1, class_="score"),
            tag("output", f"{threshold:.3g}"),
            class_="control",
        ),
        tag("label", tag("input", type="checkbox", checked=True, class_="truth"), " true objects", class_="control"),
        tag("button", "stored threshold", type="button", class_="reset"),
        class_="controls scripted",
    )
    keys = [
        tag("span", tag("span", class_=f"key {name}"), text, class_="entry")
        for name, text in (
            ("right", "right"),
            ("wrong", "false alarm"),
            ("met", "true object"),
            ("missed", "missed object"),
        )
    ]
    about = (
        f"By F1 of the image at the stored threshold ({threshold:.3g}), boxes matched at an IoU of 0.5; of equal ones "
        "those with more right, or more mistakes, come first. Point at a box to see its class, score and IoU."
    )
    gallery = tag("div", controls, *groups, class_="images", data_threshold=f"{threshold:.8g}")
    return join(
        tag("h4", "Precision and recall"),
        precision_recall(measured, colour=colour),
        tag("h4", "Best and worst images"),
        tag("p", about),
        tag("p", *keys, class_="keys"),
        gallery if groups else tag("p", "None of the images has objects or detections."),
        tag("h4", "The ranked list and its gradients"),
        legend(run.recipe.loss, candidates=bool(measured.candidates)),
        ranked_lists(measured, run.recipe.loss),
    )
