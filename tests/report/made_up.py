"""A page about runs that never were: shapes, and detections that are the true boxes a little moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bucketrank.data import Split, write_shapes
from bucketrank.evaluation import Evaluator
from bucketrank.report.candidates import Candidates
from bucketrank.report.folder import Columns, RunFolder
from bucketrank.report.matching import best_and_worst, match_all
from bucketrank.report.measure import Measured
from bucketrank.report.page import Subject
from bucketrank.training.recipe import load
from bucketrank.training.weights import Meta

NASTY = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'> & \"é\""


def data(folder: Path, *, images: int = 6) -> Path:
    """Shapes, of which the first class has the nastiest of names."""
    write_shapes(folder, train=2, val=images, size=96, seed=3)
    for name in ("train.json", "val.json"):
        document = json.loads((folder / name).read_text())
        document["categories"][0]["name"] = NASTY
        (folder / name).write_text(json.dumps(document))
    return folder


def detections(document: dict[str, Any], *, seed: int, noise: float = 2.0) -> dict[int, list[dict[str, Any]]]:
    """Most objects found, some twice, some boxes where nothing is; in COCO's format, by image."""
    rng = np.random.default_rng(seed)
    categories = [category["id"] for category in document["categories"]]
    found: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in document["images"]}
    for entry in document["annotations"]:
        for _ in range(int(rng.integers(0, 3))):
            box = np.asarray(entry["bbox"]) + rng.normal(0, noise, 4)
            box[2:] = np.maximum(box[2:], 2)
            record = {"bbox": box.tolist(), "category_id": entry["category_id"], "score": float(rng.beta(5, 2))}
            found[entry["image_id"]].append(
                record | {"image_id": entry["image_id"], "segmentation": entry["segmentation"]}
            )
    for number, records in found.items():
        for _ in range(4):
            place = [*rng.uniform(0, 60, 2).tolist(), *rng.uniform(5, 30, 2).tolist()]
            kind = categories[int(rng.integers(len(categories)))]
            about = {"image_id": number, "category_id": kind, "score": float(rng.beta(2, 5))}
            records.append({"bbox": place, **about, "segmentation": []})
    return found


def tensors(records: list[dict[str, Any]], categories: list[int]) -> dict[str, torch.Tensor]:
    """As a detector gives them, without masks."""
    boxes = torch.tensor([record["bbox"] for record in records], dtype=torch.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    labels = torch.tensor([categories.index(record["category_id"]) + 1 for record in records], dtype=torch.int64)
    return {"boxes": boxes, "labels": labels, "scores": torch.tensor([record["score"] for record in records])}


def candidates(seed: int, *, count: int = 60) -> Candidates:
    """Some positives among negatives."""
    torch.manual_seed(seed)
    positives = torch.rand(count) < 0.2
    positives[0], positives[-1] = True, False
    return Candidates(
        logits=torch.randn(count).sort(descending=True).values,
        gradients=torch.where(positives, -torch.rand(count), torch.rand(count)) / count,
        positives=positives,
        ious=torch.where(positives, torch.rand(count), 0.0),
        classes=torch.zeros(count, dtype=torch.int64),
        loss=0.25,
    )


def subject(folder: Path, name: str, flags: str = "", *, seed: int = 0, masks: bool = False) -> Subject:
    """A run called ``name`` on the data in ``folder``."""
    split = Split(folder / "val.json", folder / "images")
    document = split.read()
    classes = {category["id"]: category["name"] for category in document["categories"]}
    found = detections(document, seed=seed)
    evaluator = Evaluator(document)
    evaluator.add(list(found), [tensors(records, list(classes)) for records in found.values()])
    records = [record for each in found.values() for record in each]
    matched = match_all(document, records, images=list(found))
    threshold = 0.5
    best, worst = best_and_worst(matched, threshold=threshold, most=3)
    recipe = load("atss-laptop", flags.split())
    results = {kind: evaluator.result() for kind in (("boxes", "masks") if masks else ("boxes",))}
    measured = Measured(
        meta=Meta(list(classes.values()), list(classes), threshold, recipe.to_dict()),
        weights=Path("weights.safetensors"),
        data=folder,
        split=split,
        total=len(found),
        results=results,
        precision_recall={kind: {iou: evaluator.precision_recall(iou=iou) for iou in (0.5, 0.75)} for kind in results},
        images=len(found),
        best=best,
        worst=worst,
        candidates={each.image["id"]: candidates(seed + number) for number, each in enumerate([*worst, *best])},
    )
    steps = list(range(1, 101))
    falling = [3 / step**0.5 + seed / 10 for step in steps]
    loss = {"epoch": [1.0] * 100, "loss": falling, "rank": falling, "lr": [0.01] * 100, "seconds": [0.5] * 100}
    metrics = {f"boxes/{key}": [0.1 + seed / 50, 0.3 + seed / 50] for key in ("AP", "AP50", "AP75")}
    run = RunFolder(
        name=name,
        path=folder,
        recipe=recipe,
        environment={"data": str(folder), "commit": "0123456789abcdef", "cores": 2, "processor": "abacus"},
        train=Columns(steps, loss),
        validation=Columns([50, 100], metrics),
        weights=Path("weights.safetensors"),
        gaps=[],
    )
    return Subject(run, measured, [])
