"""AP and AR agree with pycocotools and with a reference of the LVIS protocol."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pycocotools import mask as codec
from torch.testing import assert_close

from bucketrank.data import find_splits
from bucketrank.evaluation import Evaluator
from bucketrank.evaluation.evaluator import COCO_NAMES
from tests.evaluation.lvis_reference import lvis as lvis_protocol
from tests.evaluation.pycocotools_reference import NAMES, pycocotools
from tests.evaluation.random_detections import (
    Detections,
    add_detections,
    random_detections,
    random_document,
    random_lvis_document,
)
from tests.shared_data import shared

IouType = Literal["boxes", "masks"]


def evaluated(
    ground_truth: Any, detections: Detections, *, masks: bool = False, style: Literal["coco", "lvis"] = "coco"
) -> Evaluator:
    evaluator = Evaluator(ground_truth, masks=masks, style=style)
    evaluator.add(list(detections), list(detections.values()))
    return evaluator


def agree(evaluator: Evaluator, ground_truth: dict[str, Any], iou_type: IouType) -> dict[str, float]:
    result = evaluator.result(iou_type)
    expected = pycocotools(ground_truth, evaluator.detections, iou_type)
    assert list(result.metrics) == list(COCO_NAMES) == NAMES
    assert_close(result.metrics | result.per_class, expected, atol=1e-6, rtol=0.0, equal_nan=True)
    return result.metrics


@pytest.mark.parametrize("seed", range(4))
def test_random_boxes(seed: int) -> None:
    ground_truth = random_document(seed, images=20)
    numbers = agree(
        evaluated(ground_truth, random_detections(ground_truth, seed + 100, masks=False)), ground_truth, "boxes"
    )
    assert 0.02 < numbers["AP"] < 0.9, "a case that is neither trivial nor hopeless"


@pytest.mark.parametrize("seed", range(3))
def test_random_masks(seed: int) -> None:
    ground_truth = random_document(seed)
    evaluator = evaluated(ground_truth, random_detections(ground_truth, seed + 100, masks=True, noise=0.05), masks=True)
    boxes, masks = agree(evaluator, ground_truth, "boxes"), agree(evaluator, ground_truth, "masks")
    assert boxes != masks
    assert masks["AP50"] > 0.05
    logged = {f"boxes/{n}": v for n, v in boxes.items()} | {f"masks/{n}": v for n, v in masks.items()}
    for iou_type in ("boxes", "masks"):
        logged |= {f"{iou_type}/{n}": v for n, v in evaluator.result(iou_type).lrp.metrics().items()}
    assert evaluator.metrics() == logged


def test_detections_on_crowds_do_not_count() -> None:
    ground_truth = random_document(3, images=30)
    assert sum(entry["iscrowd"] for entry in ground_truth["annotations"]) > 10
    detections = random_detections(ground_truth, 1, masks=False)
    with_crowds = agree(evaluated(ground_truth, detections), ground_truth, "boxes")
    ground_truth["annotations"] = [entry for entry in ground_truth["annotations"] if not entry["iscrowd"]]
    assert agree(evaluated(ground_truth, detections), ground_truth, "boxes")["AP"] < with_crowds["AP"]


@pytest.mark.parametrize(("name", "masks"), [("coco_by", True), ("nuclei", True), ("bccd", False)])
def test_real_data(name: str, masks: bool) -> None:
    split = find_splits(shared(f"data/{name}")).val
    assert split is not None
    ground_truth = split.read()
    ground_truth["images"] = ground_truth["images"][:25]
    kept = {image["id"] for image in ground_truth["images"]}
    ground_truth["annotations"] = [entry for entry in ground_truth["annotations"] if entry["image_id"] in kept]
    evaluator = evaluated(ground_truth, random_detections(ground_truth, 5, masks=masks, noise=0.06), masks=masks)
    agree(evaluator, ground_truth, "boxes")
    if masks:
        agree(evaluator, ground_truth, "masks")


def test_a_perfect_detector() -> None:
    ground_truth = random_document(1, crowds=False)
    ground_truth["annotations"] = ground_truth["annotations"][:7]
    detections: Detections = {}
    for image in ground_truth["images"]:
        own = [entry for entry in ground_truth["annotations"] if entry["image_id"] == image["id"]]
        corners = torch.tensor([entry["bbox"] for entry in own]).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        labels = torch.tensor([[2, 5, 7, 11].index(entry["category_id"]) + 1 for entry in own], dtype=torch.int64)
        detections[image["id"]] = {"boxes": corners, "labels": labels, "scores": torch.full((len(own),), 0.01)}
    evaluator = evaluated(ground_truth, detections)
    assert evaluator.result().metrics["AP"] == pytest.approx(1.0)
    assert evaluator.best_threshold() == pytest.approx(0.01), "a threshold of 0.05 would show nothing"
    assert math.isnan(evaluator.result().per_class["class 7"]), "a class that never occurs"


def test_no_detections_is_zero_and_no_objects_is_nan() -> None:
    ground_truth = random_document(0)
    evaluator = Evaluator(ground_truth, masks=True)
    for iou_type in ("boxes", "masks"):
        numbers = evaluator.result(iou_type).metrics
        assert numbers["AP"] == numbers["AR100"] == 0
    assert math.isnan(evaluator.best_threshold())
    assert len(evaluator.precision_recall().scores) == 0
    assert evaluator.detections == []

    empty = ground_truth | {"annotations": []}
    for detections in ({}, random_detections(ground_truth, 1, masks=False)):
        numbers = evaluated(empty, detections).result().metrics
        assert all(math.isnan(value) for value in numbers.values())
    assert math.isnan(evaluated(empty, random_detections(ground_truth, 1, masks=False)).best_threshold())


def test_the_annotations_are_left_as_they_are() -> None:
    ground_truth = random_document(2)
    ground_truth["annotations"][0]["id"] = 0  # an id that faster-coco-eval warns of
    before = json.dumps(ground_truth)
    evaluator = evaluated(ground_truth, random_detections(ground_truth, 1, masks=False))
    first = evaluator.result()
    evaluator.best_threshold()
    assert_close(evaluator.result().metrics, first.metrics, equal_nan=True)
    assert json.dumps(ground_truth) == before


def test_annotations_without_area_or_crowd() -> None:
    ground_truth = random_document(2, crowds=False)
    detections = random_detections(ground_truth, 1, masks=False)
    for entry in ground_truth["annotations"]:
        entry["area"] = entry["bbox"][2] * entry["bbox"][3]
    expected = evaluated(ground_truth, detections).result().metrics
    for entry in ground_truth["annotations"]:
        del entry["area"], entry["iscrowd"], entry["segmentation"]
    assert_close(evaluated(ground_truth, detections).result().metrics, expected, equal_nan=True)


def test_only_the_images_that_were_added() -> None:
    ground_truth = random_document(4, images=20)
    detections = random_detections(ground_truth, 1, masks=False)
    some = {image: detections[image] for image in list(detections)[:8]}
    evaluator = evaluated(ground_truth, some)
    assert evaluator.result().metrics["AP"] < evaluator.result(seen_only=True).metrics["AP"]
    part = ground_truth | {
        "images": ground_truth["images"][:8],
        "annotations": [entry for entry in ground_truth["annotations"] if entry["image_id"] < 80],
    }
    assert_close(
        evaluator.result(seen_only=True).metrics, pycocotools_12(part, evaluator), atol=1e-6, rtol=0.0, equal_nan=True
    )
    evaluator.reset()
    assert math.isnan(evaluator.result(seen_only=True).metrics["AP"])
    assert math.isnan(evaluator.best_threshold(seen_only=True))


def pycocotools_12(ground_truth: dict[str, Any], evaluator: Evaluator) -> dict[str, float]:
    return {
        name: value for name, value in pycocotools(ground_truth, evaluator.detections, "boxes").items() if name in NAMES
    }


def test_detections_of_all_processes_are_gathered_without_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    ground_truth = random_document(5)
    detections = random_detections(ground_truth, 1, masks=True)
    whole = evaluated(ground_truth, detections, masks=True)
    ids = list(detections)
    shares = [ids[::2], [*ids[1::2], ids[0]]]  # the sampler repeats the first image on the second rank
    ranks = [evaluated(ground_truth, {image: detections[image] for image in share}, masks=True) for share in shares]

    def all_gather(parts: list[Any], own: Any) -> None:
        parts[:] = [rank._records for rank in ranks]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather)
    gathered = evaluated(ground_truth, {}, masks=True)
    gathered.gather()
    assert gathered.detections == whole.detections
    assert_close(gathered.result("masks").metrics, whole.result("masks").metrics, equal_nan=True)


def test_gather_alone_changes_nothing(tmp_path: Path) -> None:
    ground_truth = random_document(5)
    evaluator = evaluated(ground_truth, random_detections(ground_truth, 1, masks=False))
    before = evaluator.detections
    evaluator.gather()
    assert evaluator.detections == before
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        evaluator.gather()
    finally:
        torch.distributed.destroy_process_group()
    assert evaluator.detections == before


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools' decoder
def test_detections_as_json() -> None:
    ground_truth = random_document(6)
    mask = torch.zeros(1, 200, 200)
    mask[0, 3:5, 2:4] = 0.6
    mask[0, 9, 9] = 0.4
    detections = {
        "boxes": torch.tensor([[1.0, 2, 4, 6]]),
        "labels": torch.tensor([4]),
        "scores": torch.tensor([0.25]),
        "masks": mask[None],
    }
    evaluator = evaluated(ground_truth, {10: detections}, masks=True)
    (record,) = json.loads(json.dumps(evaluator.detections))
    counts = record.pop("segmentation")
    assert record == {"image_id": 10, "category_id": 11, "bbox": [1, 2, 3, 4], "score": 0.25}
    np.testing.assert_array_equal(codec.decode(counts), (mask[0] > 0.5).numpy())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([0])}, r"labels from 1 to 4, the number of categories, got 0 to 0 in image 10"),
        ({"labels": torch.tensor([5])}, "got 5 to 5"),
        ({"scores": torch.tensor([math.nan])}, "NaN or infinity in image 10"),
        ({"scores": torch.tensor([])}, "as many boxes as labels"),
        ({"boxes": torch.full((1, 4), math.inf)}, "NaN or infinity"),
    ],
)
def test_wrong_detections_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    good = {"boxes": torch.ones(1, 4), "labels": torch.tensor([1]), "scores": torch.tensor([0.5])}
    evaluator = Evaluator(random_document(0))
    with pytest.raises(ValueError, match=message):
        evaluator.add([10], [good | change])


def test_missing_masks_and_unknown_images_are_named() -> None:
    good = {"boxes": torch.ones(1, 4), "labels": torch.tensor([1]), "scores": torch.tensor([0.5])}
    evaluator = Evaluator(random_document(0))
    with pytest.raises(ValueError, match="got no masks"):
        Evaluator(random_document(0), masks=True).add([10], [good])
    with pytest.raises(ValueError, match="expected ids of images in the annotations, got 3"):
        evaluator.add(torch.tensor([3]), [good])
    with pytest.raises(ValueError, match="expected masks=True"):
        evaluator.result("masks")


# LVIS: each class is annotated in some images only; rare, common and frequent classes have their own AP.


def lvis() -> dict[str, Any]:
    """Return 3 classes: image 1 has one object each, class 3 not exhaustively; image 2 is known to have no class 1."""
    boxes = [[0, 0, 40, 40], [50, 0, 40, 40], [0, 50, 40, 40]]
    return {
        "images": [
            {"id": 1, "width": 100, "height": 100, "neg_category_ids": [], "not_exhaustive_category_ids": [3]},
            {"id": 2, "width": 100, "height": 100, "neg_category_ids": [1], "not_exhaustive_category_ids": []},
        ],
        "categories": [{"id": n, "name": f"c{n}", "frequency": f} for n, f in ((1, "r"), (2, "c"), (3, "f"))],
        "annotations": [
            {"id": n, "image_id": 1, "category_id": n, "bbox": box, "area": 1600} for n, box in enumerate(boxes, 1)
        ],
    }


def of(*rows: tuple[list[float], int, float]) -> dict[str, torch.Tensor]:
    boxes, labels, scores = zip(*rows, strict=True)
    return {"boxes": torch.tensor(boxes), "labels": torch.tensor(labels), "scores": torch.tensor(scores)}


def test_lvis_by_hand() -> None:
    right = [[0.0, 0, 40, 40], [50.0, 0, 90, 40], [0.0, 50, 40, 90]]
    nowhere = [60.0, 60, 99, 99]
    detections = {
        1: of(
            (right[0], 1, 0.5),
            (right[1], 2, 0.5),
            (right[2], 3, 0.5),
            (nowhere, 3, 0.9),  # does not count: class 3 is not annotated exhaustively
        ),
        2: of(
            (nowhere, 1, 0.9),  # wrong: the image is known to have none
            (nowhere, 2, 0.9),  # does not count: class 2 is not annotated in this image
        ),
    }
    numbers = evaluated(lvis(), detections, style="lvis").result().metrics
    assert numbers["APr"] == pytest.approx(0.5), "the wrong one ranks first: precision 1/2 at every recall"
    assert numbers["APc"] == numbers["APf"] == pytest.approx(1.0)
    assert numbers["AP"] == pytest.approx(2.5 / 3)
    assert numbers["AR300"] == pytest.approx(1.0)
    assert list(numbers) == [
        "AP",
        "AP50",
        "AP75",
        "APs",
        "APm",
        "APl",
        "APr",
        "APc",
        "APf",
        "AR300",
        "ARs",
        "ARm",
        "ARl",
    ]


def test_lvis_keeps_the_best_300_of_an_image() -> None:
    many = [([50.0, 0, 90, 40], 2, 0.4 + 0.001 * n) for n in range(300)]
    detections = {1: of(([0.0, 0, 40, 40], 1, 0.3), *many)}
    evaluator = evaluated(lvis(), detections, style="lvis")
    assert len(evaluator.detections) == 300
    assert evaluator.result().metrics["APr"] == 0, "the 301st is dropped, whatever its class"


def agree_with_lvis(ground_truth: dict[str, Any], detections: Detections, iou_type: IouType) -> dict[str, float]:
    """Compare with the reference, which gets all detections and applies the limit of 300 per image itself."""
    evaluator = evaluated(ground_truth, detections, masks=iou_type == "masks", style="lvis")
    result = evaluator.result(iou_type)
    every = evaluated(ground_truth, detections, masks=iou_type == "masks").detections
    expected = lvis_protocol(ground_truth, every, iou_type)
    assert_close(result.metrics | result.per_class, expected, atol=1e-6, rtol=0.0, equal_nan=True)
    return result.metrics


@pytest.mark.parametrize("seed", range(6))
def test_lvis_boxes_by_the_protocol(seed: int) -> None:
    ground_truth = random_lvis_document(seed, images=14)
    detections = random_detections(ground_truth, seed + 100, masks=False)
    detections = add_detections(detections, seed, images=[10, 40], count=380, masks=False)
    assert max(len(each["boxes"]) for each in detections.values()) > 300
    numbers = agree_with_lvis(ground_truth, detections, "boxes")
    assert 0.01 < numbers["AP"] < 0.9, "a case that is neither trivial nor hopeless"
    assert numbers["AP"] != evaluated(ground_truth, detections).result().metrics["AP"], "COCO's rules differ"


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools' decoder
@pytest.mark.parametrize("seed", range(3))
def test_lvis_masks_by_the_protocol(seed: int) -> None:
    ground_truth = random_lvis_document(seed, images=6)
    detections = random_detections(ground_truth, seed + 100, masks=True, noise=0.05)
    detections = add_detections(detections, seed, images=[10], count=310, masks=True)
    assert agree_with_lvis(ground_truth, detections, "masks")["AP"] > 0.01


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools' decoder
@pytest.mark.parametrize("iou_type", ["boxes", "masks"])
def test_lvis_leaves_out_detections_without_area(iou_type: IouType) -> None:
    ground_truth = random_lvis_document(1, images=8)
    detections = random_detections(ground_truth, 7, masks=True, noise=0.05)
    before = evaluated(ground_truth, detections, masks=True, style="lvis").result(iou_type).metrics["AP"]
    for each in detections.values():
        each["boxes"] = torch.cat([each["boxes"], torch.tensor([[9.0, 9, 9, 30]] * 4)])
        each["labels"] = torch.cat([each["labels"], torch.arange(1, 5)])
        each["scores"] = torch.cat([each["scores"], torch.ones(4)])
        each["masks"] = torch.cat([each["masks"], torch.zeros(4, 1, 200, 200)])
    assert agree_with_lvis(ground_truth, detections, iou_type)["AP"] == pytest.approx(before)
    assert evaluated(ground_truth, detections, masks=True).result(iou_type).metrics["AP"] < before, (
        "by COCO's rules they are wrong"
    )


def test_lvis_of_nothing() -> None:
    ground_truth = random_lvis_document(2)
    assert agree_with_lvis(ground_truth, {}, "boxes")["AP"] == 0
    nothing = ground_truth | {"annotations": []}
    assert math.isnan(agree_with_lvis(nothing, random_detections(ground_truth, 1, masks=False), "boxes")["AP"])


def test_lvis_needs_frequencies() -> None:
    with pytest.raises(ValueError, match="frequency of every category"):
        Evaluator(random_document(0), style="lvis")
