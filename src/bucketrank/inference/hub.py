"""Share a detector: save it to and load it from folders and hub repositories, and write its model card."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, ModelHubMixin
from PIL import Image

from bucketrank.data.problems import counted
from bucketrank.detectors import Detector
from bucketrank.drawing import draw, grid
from bucketrank.errors import WeightsError, printable
from bucketrank.inference.detections import Detections
from bucketrank.inference.prediction import (
    ImageInput,
    as_several,
    as_tensor,
    predict,
    require_our_drawing,
    save_drawing,
)
from bucketrank.settings import from_dict, recipe_to_yaml
from bucketrank.weights.atomic import write_text
from bucketrank.weights.files import (
    CONFIG_FILE,
    HUB_FILE,
    RUN_FILE,
    Meta,
    describe_scores,
    find_weights,
    is_repository,
    save_weights,
)
from bucketrank.weights.load import load_model
from bucketrank.weights.sources import hub_access

CARD_FILE = "README.md"
PICTURE_FILE = "detections.jpg"
MAX_PICTURED = 4  # example images in the picture
MAX_PICTURE_SIDE = 1600  # pixels
MAX_LISTED_CLASSES = 100
LOCAL_NAME = "path/to/this/folder"
TASK = "object-detection"
SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$])")
PERCENT = re.compile(r"(?:AP|AR|oLRP)\w*")  # metrics from 0 to 1 that are usually given in percent
CARD = """\
---
$front_matter
---

# $name

An object detector of the type $detector, trained with the loss $loss by bucketrank.

$picture## Use

```bash
pip install "bucketrank[detect]"
```

```python
import bucketrank

detector = bucketrank.from_pretrained($source)
(detections,) = detector.predict(["image.jpg"])  # boxes, labels and scores
```

Boxes are x1, y1, x2, y2 in pixels. `detections.names` are the class names.

## Data

| | |
|---|---|
| data set | $dataset |
| training images | $train |
| validation images | $val |
| $num_classes | $classes |

## Results

$results

## Scores

Score threshold: $threshold

$scores

## Training

Versions: $versions.

<details><summary>The recipe, with every setting</summary>

${fence}yaml
$settings$fence

</details>

## Licence

$licence
"""


class TrainedDetector(ModelHubMixin):
    """A detector with its classes, threshold, calibration and recipe, which can be shared.

    ``model`` is the detector, in evaluation mode after loading: ours, or a torchvision or transformers model behind its
    interface. ``meta`` is the description in its weights file. Weights are written as safetensors. Pickles are neither
    written nor read.
    """

    def __init__(self, model: Detector, meta: Meta) -> None:
        if model.num_classes != len(meta.classes):
            got = f"{model.num_classes} of the model and {len(meta.classes)} of the description"
            raise ValueError(f"TrainedDetector: expected as many classes in both, got {got}")
        from_dict(meta.recipe, source="TrainedDetector")  # raises RecipeError now, not only when the file is loaded
        self.model = model
        self.meta = meta
        model.stored_threshold, model.stored_classes = meta.threshold, meta.classes

    @property
    def classes(self) -> list[str]:
        """The names of label 1, 2, ..."""
        return self.meta.classes

    def __repr__(self) -> str:
        meta = self.meta
        detector, scores = meta.recipe["detector"]["name"], "calibrated" if meta.calibration else "not calibrated"
        classes = counted(len(meta.classes), "class", plural="classes")
        return f"TrainedDetector({detector}, {classes}, threshold {meta.threshold:.4g}, {scores})"

    def predict(
        self,
        images: ImageInput | Iterable[ImageInput],
        *,
        threshold: float | None = None,
        batch_size: int = 1,
        device: str = "auto",
    ) -> list[Detections]:
        """Detect objects in each image; the detections are sorted by score and are tensors on the CPU.

        The result is a list, also for one image: ``(detections,) = trained.predict("a.jpg")``. ``detections.names`` are
        the class names. ``images``, ``threshold``, ``batch_size`` and ``device`` are those of
        :func:`bucketrank.inference.predict`.
        """
        return predict(self.model, images, threshold=threshold, batch_size=batch_size, device=device)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
    ) -> TrainedDetector:
        """Load a detector from a folder, a weights file or a model repository on the hub.

        Raises WeightsError if the name does not lead to bucketrank weights, and ConnectionError if the hub cannot be
        reached and its cache does not hold the file.

        Args:
            pretrained_model_name_or_path: a :meth:`save_pretrained` folder, a run folder, a weights file, or a
                repository like ``"owner/name"``. An existing file or folder of that name takes precedence.
            force_download: download again even if the hub cache holds the file.
            token: token for a private repository; by default the one stored by ``hf auth login``.
            cache_dir: cache folder; by default that of ``huggingface_hub``.
            local_files_only: read only the cache.
            revision: branch, tag or commit of the repository; by default its main branch.
        """
        path = find_weights(
            pretrained_model_name_or_path,
            force_download=force_download,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            revision=revision,
        )
        return cls(*load_model(path))

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        license: str | None = None,  # noqa: A002 (the hub's name for it)
        dataset: str | None = None,
        images: ImageInput | Iterable[ImageInput] | None = None,
        **options: Any,
    ) -> str | None:
        """Write the detector into a folder: ``model.safetensors``, ``config.json`` and the model card ``README.md``.

        With ``images``, the card shows the detections in them, as ``detections.jpg``.

        The weights file holds everything that :meth:`from_pretrained` reads. ``config.json`` and the card repeat its
        description for readers. A card that differs from the new one is not replaced; WeightsError is raised instead.

        Args:
            save_directory: output folder; it is created if it does not exist. A run folder is refused.
            license: licence of the weights, by its hub name, like ``"apache-2.0"``. Without it the card says that none
                is stated.
            dataset: data set name or hub repository, for the card.
            images: one to four example images that you may publish, in any form that :meth:`predict` takes.
            options: further arguments of ``huggingface_hub.ModelHubMixin.save_pretrained``.
        """
        folder = Path(save_directory)
        if (folder / RUN_FILE).exists():
            raise WeightsError(f"{folder}: expected a folder for the detector, got a run folder; choose another")
        facts: dict[str, Any] = {"license": license, "dataset": dataset, "images": images}
        facts |= options.pop("model_card_kwargs", None) or {}
        examples = facts.pop("images")
        picture = None if examples is None else self._picture(examples)
        facts["picture"] = picture is not None
        card = folder / CARD_FILE
        if card.exists() and card.read_text(encoding="utf-8") != str(self.generate_model_card(**facts)):
            raise WeightsError(
                f"{card}: expected no model card, or the one for this detector, got another; delete it to have a new "
                "one written, or choose another folder"
            )
        if picture is not None:
            folder.mkdir(parents=True, exist_ok=True)
            require_our_drawing(folder / PICTURE_FILE)
            save_drawing(picture, folder / PICTURE_FILE)
        return super().save_pretrained(folder, model_card_kwargs=facts, **options)

    def _picture(self, images: ImageInput | Iterable[ImageInput]) -> Image.Image:
        examples = [as_tensor(image) for image in as_several(images)]
        if not 1 <= len(examples) <= MAX_PICTURED:
            raise ValueError(f"save_pretrained: images: expected 1 to {MAX_PICTURED} images, got {len(examples)}")
        detections = self.predict(examples)
        drawn = [draw(image, each, classes=self.classes) for image, each in zip(examples, detections, strict=True)]
        picture = grid(drawn, columns=2 if len(drawn) == MAX_PICTURED else len(drawn)) if len(drawn) > 1 else drawn[0]
        picture.thumbnail((MAX_PICTURE_SIDE, MAX_PICTURE_SIDE))
        return picture

    def push_to_hub(
        self,
        repo_id: str,
        *,
        license: str | None = None,  # noqa: A002 (the hub's name for it)
        dataset: str | None = None,
        images: ImageInput | Iterable[ImageInput] | None = None,
        **options: Any,
    ) -> str:
        """Upload the files of :meth:`save_pretrained` to a hub repository; return the commit's address.

        ``repo_id`` names the repository, like ``"owner/name"``; it is created if it does not exist. ``license``,
        ``dataset`` and ``images`` are those of :meth:`save_pretrained`, ``options`` further arguments of
        ``huggingface_hub.ModelHubMixin.push_to_hub``: ``private``, ``token``, ``branch``, ``create_pr``,
        ``commit_message``, ``ignore_patterns`` and others. Raises ConnectionError if the hub cannot be reached or
        refuses.
        """
        facts = {"license": license, "dataset": dataset, "images": images, "repository": repo_id}
        facts |= options.pop("model_card_kwargs", None) or {}  # from save_pretrained(..., push_to_hub=True)
        remedy = "check the name and the connection, and log in with: hf auth login"
        with hub_access(f"{repo_id}: the detector", remedy, action="uploaded"):
            return str(super().push_to_hub(repo_id, model_card_kwargs=facts, **options))

    def generate_model_card(self, *_: Any, **facts: Any) -> ModelCard:
        """Write the model card; ``facts`` are ``license``, ``dataset``, ``repository`` and ``picture``."""
        return model_card(self.meta, **facts)

    def _save_pretrained(self, save_directory: Path) -> None:
        save_weights(save_directory / HUB_FILE, self.model, self.meta)
        meta = self.meta
        config = {
            "library_name": "bucketrank",
            "id2label": {str(label): name for label, name in enumerate(meta.classes, start=1)},
            "category_ids": meta.category_ids,
            "threshold": meta.threshold,
            "calibration": None if meta.calibration is None else meta.calibration.to_dict(),
            "metrics": {name: value for name, value in meta.metrics.items() if math.isfinite(value)},
            "images": meta.images,
            "versions": meta.versions,
            "recipe": meta.recipe,
        }
        write_text(save_directory / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


from_pretrained = TrainedDetector.from_pretrained


def model_card(
    meta: Meta,
    *,
    license: str | None = None,  # noqa: A002 (the hub's name for it)
    dataset: str | None = None,
    repository: str | None = None,
    picture: bool = False,
) -> ModelCard:
    """Write the card of the detector that ``meta`` describes: YAML for the hub, then text for readers.

    ``license`` and ``dataset`` come from its owner; without them the card says that they are not stated.
    ``repository`` is its name on the hub, and ``picture`` says whether ``detections.jpg`` is beside the card.
    """
    recipe = from_dict(meta.recipe, source="model card")
    detector, loss = _short(recipe.detector.name), recipe.loss.name
    name = repository.rpartition("/")[2] if repository else f"{detector} detector"
    # An AP means little without its data set.
    results = [] if dataset is None else list(_eval_results(meta, dataset))
    front_matter = ModelCardData(
        library_name="bucketrank",
        pipeline_tag=TASK,
        tags=[TASK, "bucketrank", detector, loss],
        license=license,
        datasets=[dataset] if dataset is not None and is_repository(dataset) else None,
        model_name=name if results else None,
        eval_results=results or None,
    )
    listed = ", ".join(_escaped(each) for each in meta.classes[:MAX_LISTED_CLASSES])
    more = len(meta.classes) - MAX_LISTED_CLASSES
    chosen = f"{meta.threshold:.4g}, chosen for the best F1. Detections below it are not reported."
    settings = recipe_to_yaml(recipe)
    text = Template(CARD).substitute(
        front_matter=front_matter.to_yaml(),
        name=_escaped(name),
        detector=_escaped(detector)
        + (f" with backbone {_escaped(recipe.backbone_name)}" if recipe.backbone_name else ""),
        loss=_escaped(loss),
        picture=_picture(meta) if picture else "",
        source=json.dumps(repository or LOCAL_NAME),
        dataset="not stated" if dataset is None else _escaped(dataset),
        train=_number(meta.images.get("train")),
        val=_number(meta.images.get("val")),
        num_classes=counted(len(meta.classes), "class", plural="classes"),
        classes=listed + (f" and {more:,} more, listed in config.json" if more > 0 else ""),
        results=_results(meta),
        threshold=chosen if meta.threshold else "none; every detection is reported.",
        scores=describe_scores(meta),
        versions=", ".join(f"{_escaped(each)} {_escaped(number)}" for each, number in meta.versions.items())
        or "not recorded",
        # A fence longer than any run of backticks in the settings, which could close a shorter one.
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", settings)), default=0)),
        settings=settings,
        licence="Not stated. Ask whoever published these weights before you use them."
        if license is None
        else f"{_escaped(license)}, as stated by whoever published these weights.",
    )
    return ModelCard(text)


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


def _picture(meta: Meta) -> str:
    shown = f"with a score of at least {meta.threshold:.2g}" if meta.threshold else "of every score"
    about = f"Detections {shown} in example images; each class has its colour."
    return f"![Detections in example images]({PICTURE_FILE})\n\n{about}\n\n"


def _results(meta: Meta) -> str:
    metrics = {name: value for name, value in meta.metrics.items() if not name.startswith("calibration/")}
    if not any(map(math.isfinite, metrics.values())):
        return "The weights file holds no metrics."
    groups = list(dict.fromkeys(name.rpartition("/")[0] for name in metrics))
    lines = [
        "On the validation images; AP, AR and optimal LRP error (oLRP, less is better) in percent.",
        "",
        f"| metric | {' | '.join(_escaped(group) for group in groups)} |",
        f"|---|{'---:|' * len(groups)}",
    ]
    for name in dict.fromkeys(name.rpartition("/")[2] for name in metrics):
        values = (metrics.get(f"{group}/{name}" if group else name, math.nan) for group in groups)
        lines.append(f"| {_escaped(name)} | {' | '.join(_value(name, value) for value in values)} |")
    return "\n".join(lines)


def _short(name: str) -> str:
    """Return the last part of a detector's name: a transformers model may be named by a folder."""
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2]


def _number(number: int | None) -> str:
    return "not recorded" if number is None else f"{number:,}"


def _value(name: str, value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{100 * value:.1f}" if PERCENT.fullmatch(name) else f"{value:.4g}"


def _escaped(text: object) -> str:
    """Put the text on one line and escape characters that are special in Markdown or in a terminal."""
    return SPECIAL.sub(r"\\\1", printable(" ".join(str(text).split())))
