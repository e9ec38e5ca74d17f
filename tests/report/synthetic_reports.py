"""Synthetic runs for report pages: drawn shapes, and detections that are ground-truth boxes with noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bucketrank.data import Split, write_shapes
from bucketrank.evaluation import Evaluator
from bucketrank.report.confusion import confusion
from bucketrank.report.matching import best_and_worst, match_all
from bucketrank.report.measurements import Measurement, TrainingCandidates
from bucketrank.report.page import ReportedRun
from bucketrank.report.run_folder import Columns, RunFolder
from bucketrank.settings import load_recipe, parse_flags
from bucketrank.weights.files import Meta

HOSTILE_NAME = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'> & \"é\""

BUILT = {"trained parameters": "1,234", "anchors per location": "3 (sides of 4, 5.04, 6.35 strides)"}


def write_data(folder: Path, *, images: int = 6) -> Path:
    """Write drawn shapes whose first class is called HOSTILE_NAME."""
    write_shapes(folder, train=2, val=images, size=96, seed=3)
    for name in ("train.json", "val.json"):
        document = json.loads((folder / name).read_text())
        document["categories"][0]["name"] = HOSTILE_NAME
        (folder / name).write_text(json.dumps(document))
    return folder


def noisy_detections(document: dict[str, Any], *, seed: int, noise: float = 2.0) -> dict[int, list[dict[str, Any]]]:
    """Return detections in COCO's format by image id: up to two per object, and four at random positions per image."""
    rng = np.random.default_rng(seed)
    categories = [category["id"] for category in document["categories"]]
    by_image: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in document["images"]}
    for entry in document["annotations"]:
        for _ in range(int(rng.integers(0, 3))):
            box = np.asarray(entry["bbox"]) + rng.normal(0, noise, 4)
            box[2:] = np.maximum(box[2:], 2)
            record = {"bbox": box.tolist(), "category_id": entry["category_id"], "score": float(rng.beta(5, 2))}
            by_image[entry["image_id"]].append(
                record | {"image_id": entry["image_id"], "segmentation": entry["segmentation"]}
            )
    for image_id, records in by_image.items():
        for _ in range(4):
            box_at_random = [*rng.uniform(0, 60, 2).tolist(), *rng.uniform(5, 30, 2).tolist()]
            category = categories[int(rng.integers(len(categories)))]
            record = {"bbox": box_at_random, "category_id": category, "score": float(rng.beta(2, 5))}
            records.append(record | {"image_id": image_id, "segmentation": []})
    return by_image


def as_tensors(records: list[dict[str, Any]], categories: list[int]) -> dict[str, torch.Tensor]:
    """Return detections as a detector does, without masks."""
    boxes = torch.tensor([record["bbox"] for record in records], dtype=torch.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    labels = torch.tensor([categories.index(record["category_id"]) + 1 for record in records], dtype=torch.int64)
    return {"boxes": boxes, "labels": labels, "scores": torch.tensor([record["score"] for record in records])}


def random_candidates(seed: int, *, count: int = 60) -> TrainingCandidates:
    """Return random candidates, about a fifth of them positive."""
    torch.manual_seed(seed)
    positives = torch.rand(count) < 0.2
    positives[0], positives[-1] = True, False
    return TrainingCandidates(
        logits=torch.randn(count).sort(descending=True).values,
        gradients=torch.where(positives, -torch.rand(count), torch.rand(count)) / count,
        positives=positives,
        ious=torch.where(positives, torch.rand(count), 0.0),
        classes=torch.zeros(count, dtype=torch.int64),
        loss=0.25,
    )


def synthetic_run(folder: Path, name: str, flags: str = "", *, seed: int = 0, masks: bool = False) -> ReportedRun:
    """Return a run called ``name`` on the data in ``folder``."""
    split = Split(folder / "val.json", folder / "images")
    document = split.read()
    classes = {category["id"]: category["name"] for category in document["categories"]}
    by_image = noisy_detections(document, seed=seed)
    evaluator = Evaluator(document)
    evaluator.add(list(by_image), [as_tensors(records, list(classes)) for records in by_image.values()])
    records = [record for each in by_image.values() for record in each]
    matched = match_all(document, records, images=list(by_image))
    threshold = 0.5
    best, worst = best_and_worst(matched, threshold=threshold, count=3)
    recipe = load_recipe("atss-laptop", parse_flags(flags.split()))
    results = {iou_type: evaluator.result() for iou_type in (("boxes", "masks") if masks else ("boxes",))}
    measurement = Measurement(
        meta=Meta(list(classes.values()), list(classes), threshold, recipe.to_dict()),
        weights=Path("weights.safetensors"),
        data=folder,
        split=split,
        total=len(by_image),
        results=results,
        precision_recall={
            iou_type: {iou: evaluator.precision_recall(iou=iou) for iou in (0.5, 0.75)} for iou_type in results
        },
        errors=evaluator.calibration_errors(),
        images=len(by_image),
        best=best,
        worst=worst,
        candidates={each.image["id"]: random_candidates(seed + number) for number, each in enumerate([*worst, *best])},
        confusion=confusion(matched, list(classes), threshold=threshold),
        built=BUILT | {"loss": recipe.loss.name, "quality branch": "yes" if seed else "no"},
    )
    steps = list(range(1, 101))
    falling = [3 / step**0.5 + seed / 10 for step in steps]
    loss = {"epoch": [1.0] * 100, "loss": falling, "rank": falling, "lr": [0.01] * 100, "seconds": [0.5] * 100}
    metrics = {f"boxes/{key}": [0.1 + seed / 50, 0.3 + seed / 50] for key in ("AP", "AP50", "AP75")}
    run_folder = RunFolder(
        name=name,
        path=folder,
        recipe=recipe,
        environment={"data": str(folder), "commit": "0123456789abcdef", "cores": 2, "processor": "abacus"},
        train=Columns(steps, loss),
        validation=Columns([50, 100], metrics),
        weights=Path("weights.safetensors"),
        gaps=[],
    )
    return ReportedRun(run_folder, measurement, [])
