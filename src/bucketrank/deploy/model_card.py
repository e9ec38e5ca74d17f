"""The model card of a detector: YAML for the hub, then text about use, data, results, scores and licence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from bucketrank.data.problems import counted
from bucketrank.deploy.scores_in_words import scores_in_words
from bucketrank.model_files.weights import Meta
from bucketrank.model_files.weights_source import is_repository
from bucketrank.recipes import Recipe, from_dict, recipe_to_yaml
from bucketrank.suggestions import printable

SHOWN_CLASSES = 100
LOCAL_NAME = "path/to/this/folder"
TASK = "object-detection"
SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$])")
PERCENT = re.compile(r"(?:AP|AR|oLRP)\w*")  # metrics from 0 to 1 that are usually given in percent


def model_card(
    meta: Meta,
    *,
    license: str | None = None,  # noqa: A002 (the hub's name for it)
    dataset: str | None = None,
    repository: str | None = None,
) -> ModelCard:
    """Return the card of the detector that ``meta`` describes.

    ``license`` and ``dataset`` are what its owner says; without them the card says that they are not stated.
    ``repository`` is its name on the hub.
    """
    recipe = from_dict(meta.recipe, source="model card")
    name = repository.rpartition("/")[2] if repository else f"{_short(recipe.detector.name)} detector"
    sections = (
        _introduction(recipe, name),
        _use(repository or LOCAL_NAME),
        _data(meta, dataset),
        _results(meta),
        _scores(meta),
        _training(meta, recipe),
        _licence(license),
    )
    # An AP means little without its data set.
    results = [] if dataset is None else list(_eval_results(meta, dataset))
    front_matter = ModelCardData(
        library_name="bucketrank",
        pipeline_tag=TASK,
        tags=[TASK, "bucketrank", _short(recipe.detector.name), recipe.loss.name],
        license=license,
        datasets=[dataset] if dataset is not None and is_repository(dataset) else None,
        model_name=name if results else None,
        eval_results=results or None,
    )
    text = "\n".join(line for section in sections for line in section)
    return ModelCard(f"---\n{front_matter.to_yaml()}\n---\n\n{text}")


def _eval_results(meta: Meta, dataset: str) -> Iterator[EvalResult]:
    for group, noun in (("boxes", "box"), ("masks", "mask")):
        value = meta.metrics.get(f"{group}/AP", math.nan)
        if math.isfinite(value):
            yield EvalResult(
                task_type=TASK,
                dataset_type=dataset if is_repository(dataset) else re.sub(r"\W+", "-", dataset.lower()).strip("-"),
                dataset_name=dataset,
                dataset_split="validation",
                metric_type=f"{noun}_ap",
                metric_name=f"{noun} AP, in percent",
                metric_value=round(100 * value, 1),
            )


def _introduction(recipe: Recipe, name: str) -> Iterator[str]:
    backbone = f" with backbone {_escaped(recipe.backbone_name)}" if recipe.backbone_name else ""
    detector, loss = _escaped(_short(recipe.detector.name)), _escaped(recipe.loss.name)
    yield f"# {_escaped(name)}"
    yield ""
    yield f"An object detector of the type {detector}{backbone}, trained with the loss {loss} by bucketrank."
    yield ""


def _use(name: str) -> Iterator[str]:
    yield "## Use"
    yield ""
    yield '```bash\npip install "bucketrank[detect]"\n```'
    yield ""
    yield "```python"
    yield "import bucketrank"
    yield ""
    yield f"detector = bucketrank.from_pretrained({json.dumps(name)})"
    yield '(detections,) = detector.predict(["image.jpg"])  # boxes, labels and scores'
    yield "```"
    yield ""
    yield "Boxes are x1, y1, x2, y2 in pixels. `detector.classes[label - 1]` is the name of a label."
    yield ""


def _data(meta: Meta, dataset: str | None) -> Iterator[str]:
    names = [_escaped(name) for name in meta.classes[:SHOWN_CLASSES]]
    more = len(meta.classes) - len(names)
    listed = ", ".join(names) + (f" and {more:,} more, listed in config.json" if more else "")
    rows = {
        "data set": "not stated" if dataset is None else _escaped(dataset),
        "training images": _number(meta.images.get("train")),
        "validation images": _number(meta.images.get("val")),
        counted(len(meta.classes), "class", plural="classes"): listed,
    }
    yield from _table("Data", rows)


def _results(meta: Meta) -> Iterator[str]:
    yield "## Results"
    yield ""
    metrics = {name: value for name, value in meta.metrics.items() if not name.startswith("calibration/")}
    if not any(map(math.isfinite, metrics.values())):
        yield "The weights file holds no metrics."
        yield ""
        return
    groups = list(dict.fromkeys(name.rpartition("/")[0] for name in metrics))
    yield "On the validation images; AP, AR and optimal LRP error (oLRP, less is better) in percent."
    yield ""
    yield f"| metric | {' | '.join(_escaped(group) for group in groups)} |"
    yield f"|---|{'---:|' * len(groups)}"
    for name in dict.fromkeys(name.rpartition("/")[2] for name in metrics):
        values = (metrics.get(f"{group}/{name}" if group else name, math.nan) for group in groups)
        yield f"| {_escaped(name)} | {' | '.join(_value(name, value) for value in values)} |"
    yield ""


def _scores(meta: Meta) -> Iterator[str]:
    yield "## Scores"
    yield ""
    if meta.threshold:
        yield f"Score threshold: {meta.threshold:.4g}, chosen for the best F1. Detections below it are not reported."
    else:
        yield "Score threshold: none; every detection is reported."
    yield ""
    yield scores_in_words(meta)
    yield ""


def _training(meta: Meta, recipe: Recipe) -> Iterator[str]:
    versions = ", ".join(f"{_escaped(name)} {_escaped(version)}" for name, version in meta.versions.items())
    yield "## Training"
    yield ""
    yield f"Versions: {versions or 'not recorded'}."
    yield ""
    yield "<details><summary>The recipe, with every setting</summary>"
    yield ""
    text = recipe_to_yaml(recipe)
    fence = _fence(text)
    yield f"{fence}yaml\n{text}{fence}"
    yield ""
    yield "</details>"
    yield ""


def _licence(licence: str | None) -> Iterator[str]:
    yield "## Licence"
    yield ""
    if licence is None:
        yield "Not stated. Ask whoever published these weights before you use them."
    else:
        yield f"{_escaped(licence)}, as stated by whoever published these weights."
    yield ""


def _table(heading: str, rows: dict[str, str]) -> Iterator[str]:
    yield f"## {heading}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in rows.items():
        yield f"| {name} | {value} |"
    yield ""


def _short(name: str) -> str:
    """Return the last part of a detector's name: a model of transformers may be named by a folder."""
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2]


def _number(number: int | None) -> str:
    return "not recorded" if number is None else f"{number:,}"


def _value(name: str, value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{100 * value:.1f}" if PERCENT.fullmatch(name) else f"{value:.4g}"


def _fence(text: str) -> str:
    """Return a code fence longer than any run of backticks in the text, which could close a shorter one."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))


def _escaped(text: object) -> str:
    """Return the text in one line, with the characters escaped that mean something in Markdown or in a terminal."""
    return SPECIAL.sub(r"\\\1", printable(" ".join(str(text).split())))
