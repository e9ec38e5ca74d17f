"""The numbers are pycocotools'."""

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
from bucketrank.evaluation.coco import COCO_NAMES
from tests.evaluation.lvis_reference import lvis as lvis_protocol
from tests.evaluation.made_up import Detections, crowded, detections, document, lvis_document
from tests.evaluation.reference import NAMES, pycocotools
from tests.shared_data import shared

Kind = Literal["boxes", "masks"]


def evaluated(
    truth: Any, found: Detections, *, masks: bool = False, style: Literal["coco", "lvis"] = "coco"
) -> Evaluator:
    evaluator = Evaluator(truth, masks=masks, style=style)
    evaluator.add(list(found), list(found.values()))
    return evaluator


def agree(evaluator: Evaluator, truth: dict[str, Any], kind: Kind) -> dict[str, float]:
    result = evaluator.result(kind)
    expected = pycocotools(truth, evaluator.detections, kind)
    assert list(result.metrics) == list(COCO_NAMES) == NAMES
    assert_close(result.metrics | result.per_class, expected, atol=1e-6, rtol=0.0, equal_nan=True)
    return result.metrics


@pytest.mark.parametrize("seed", range(4))
def test_random_boxes(seed: int) -> None:
    truth = document(seed, images=20)
    numbers = agree(evaluated(truth, detections(truth, seed + 100, masks=False)), truth, "boxes")
    assert 0.02 < numbers["AP"] < 0.9, "a case that tells something"


@pytest.mark.parametrize("seed", range(3))
def test_random_masks(seed: int) -> None:
    truth = document(seed)
    evaluator = evaluated(truth, detections(truth, seed + 100, masks=True, noise=0.05), masks=True)
    boxes, masks = agree(evaluator, truth, "boxes"), agree(evaluator, truth, "masks")
    assert boxes != masks
    assert masks["AP50"] > 0.05
    assert evaluator.metrics() == {f"boxes/{n}": v for n, v in boxes.items()} | {
        f"masks/{n}": v for n, v in masks.items()
    }


def test_crowds_excuse() -> None:
    truth = document(3, images=30)
    assert sum(entry["iscrowd"] for entry in truth["annotations"]) > 10
    found = detections(truth, 1, masks=False)
    with_crowds = agree(evaluated(truth, found), truth, "boxes")
    truth["annotations"] = [entry for entry in truth["annotations"] if not entry["iscrowd"]]
    assert agree(evaluated(truth, found), truth, "boxes")["AP"] < with_crowds["AP"]


@pytest.mark.parametrize(("name", "masks"), [("coco_by", True), ("nuclei", True), ("bccd", False)])
def test_real_data(name: str, masks: bool) -> None:
    split = find_splits(shared(f"data/{name}")).val
    assert split is not None
    truth = split.read()
    truth["images"] = truth["images"][:25]
    kept = {image["id"] for image in truth["images"]}
    truth["annotations"] = [entry for entry in truth["annotations"] if entry["image_id"] in kept]
    evaluator = evaluated(truth, detections(truth, 5, masks=masks, noise=0.06), masks=masks)
    agree(evaluator, truth, "boxes")
    if masks:
        agree(evaluator, truth, "masks")


def test_a_perfect_detector() -> None:
    truth = document(1, crowds=False)
    truth["annotations"] = truth["annotations"][:7]
    found: Detections = {}
    for image in truth["images"]:
        own = [entry for entry in truth["annotations"] if entry["image_id"] == image["id"]]
        corners = torch.tensor([entry["bbox"] for entry in own]).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        labels = torch.tensor([[2, 5, 7, 11].index(entry["category_id"]) + 1 for entry in own], dtype=torch.int64)
        found[image["id"]] = {"boxes": corners, "labels": labels, "scores": torch.full((len(own),), 0.01)}
    evaluator = evaluated(truth, found)
    assert evaluator.result().metrics["AP"] == pytest.approx(1.0)
    assert evaluator.best_threshold() == pytest.approx(0.01), "a threshold of 0.05 would show nothing"
    assert math.isnan(evaluator.result().per_class["class 7"]), "which never occurs"


def test_no_detections_is_zero_and_no_objects_is_nan() -> None:
    truth = document(0)
    evaluator = Evaluator(truth, masks=True)
    for kind in ("boxes", "masks"):
        numbers = evaluator.result(kind).metrics
        assert numbers["AP"] == numbers["AR100"] == 0
    assert math.isnan(evaluator.best_threshold())
    assert len(evaluator.precision_recall().scores) == 0
    assert evaluator.detections == []

    empty = truth | {"annotations": []}
    for found in ({}, detections(truth, 1, masks=False)):
        numbers = evaluated(empty, found).result().metrics
        assert all(math.isnan(value) for value in numbers.values())
    assert math.isnan(evaluated(empty, detections(truth, 1, masks=False)).best_threshold())


def test_the_annotations_are_left_as_they_are() -> None:
    truth = document(2)
    truth["annotations"][0]["id"] = 0  # an id that faster-coco-eval warns of
    before = json.dumps(truth)
    evaluator = evaluated(truth, detections(truth, 1, masks=False))
    first = evaluator.result()
    evaluator.best_threshold()
    assert_close(evaluator.result().metrics, first.metrics, equal_nan=True)
    assert json.dumps(truth) == before


def test_annotations_without_area_or_crowd() -> None:
    truth = document(2, crowds=False)
    found = detections(truth, 1, masks=False)
    for entry in truth["annotations"]:
        entry["area"] = entry["bbox"][2] * entry["bbox"][3]
    expected = evaluated(truth, found).result().metrics
    for entry in truth["annotations"]:
        del entry["area"], entry["iscrowd"], entry["segmentation"]
    assert_close(evaluated(truth, found).result().metrics, expected, equal_nan=True)


def test_only_what_was_seen() -> None:
    truth = document(4, images=20)
    found = detections(truth, 1, masks=False)
    some = {image: found[image] for image in list(found)[:8]}
    evaluator = evaluated(truth, some)
    assert evaluator.result().metrics["AP"] < evaluator.result(seen_only=True).metrics["AP"]
    part = truth | {
        "images": truth["images"][:8],
        "annotations": [entry for entry in truth["annotations"] if entry["image_id"] < 80],
    }
    assert_close(
        evaluator.result(seen_only=True).metrics, pycocotools_12(part, evaluator), atol=1e-6, rtol=0.0, equal_nan=True
    )
    evaluator.reset()
    assert math.isnan(evaluator.result(seen_only=True).metrics["AP"])
    assert math.isnan(evaluator.best_threshold(seen_only=True))


def pycocotools_12(truth: dict[str, Any], evaluator: Evaluator) -> dict[str, float]:
    return {name: value for name, value in pycocotools(truth, evaluator.detections, "boxes").items() if name in NAMES}


def test_ranks_are_merged_without_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = document(5)
    found = detections(truth, 1, masks=True)
    whole = evaluated(truth, found, masks=True)
    ids = list(found)
    shares = [ids[::2], [*ids[1::2], ids[0]]]  # the sampler gives the second rank the first image again
    ranks = [evaluated(truth, {image: found[image] for image in share}, masks=True) for share in shares]

    def all_gather(parts: list[Any], own: Any) -> None:
        parts[:] = [rank._found for rank in ranks]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather)
    gathered = evaluated(truth, {}, masks=True)
    gathered.gather()
    ranks[0].merge(ranks[1])
    for joined in (gathered, ranks[0]):
        assert joined.detections == whole.detections
        assert_close(joined.result("masks").metrics, whole.result("masks").metrics, equal_nan=True)


def test_gather_alone_changes_nothing(tmp_path: Path) -> None:
    truth = document(5)
    evaluator = evaluated(truth, detections(truth, 1, masks=False))
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
    truth = document(6)
    mask = torch.zeros(1, 200, 200)
    mask[0, 3:5, 2:4] = 0.6
    mask[0, 9, 9] = 0.4
    found = {
        "boxes": torch.tensor([[1.0, 2, 4, 6]]),
        "labels": torch.tensor([4]),
        "scores": torch.tensor([0.25]),
        "masks": mask[None],
    }
    evaluator = evaluated(truth, {10: found}, masks=True)
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
    evaluator = Evaluator(document(0))
    with pytest.raises(ValueError, match=message):
        evaluator.add([10], [good | change])
    with pytest.raises(ValueError, match="got no masks"):
        Evaluator(document(0), masks=True).add([10], [good])
    with pytest.raises(ValueError, match="image 3 is not in the annotations"):
        evaluator.add(torch.tensor([3]), [good])
    with pytest.raises(ValueError, match="expected masks=True"):
        evaluator.result("masks")


# LVIS: classes were looked for only in some images; rare, common and frequent ones are averaged apart.


def lvis() -> dict[str, Any]:
    """Three classes; in image 1 an object of each, of class 3 not all; in image 2 it is known that there is no 1."""
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
    found = {
        1: of(
            (right[0], 1, 0.5),
            (right[1], 2, 0.5),
            (right[2], 3, 0.5),
            (nowhere, 3, 0.9),  # not wrong: not all of class 3 were marked
        ),
        2: of(
            (nowhere, 1, 0.9),  # wrong: it is known that there is none
            (nowhere, 2, 0.9),  # not counted: nobody looked for 2 here
        ),
    }
    numbers = evaluated(lvis(), found, style="lvis").result().metrics
    assert numbers["APr"] == pytest.approx(0.5), "one wrong above the right one: precision 1/2 at every recall"
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
    found = {1: of(([0.0, 0, 40, 40], 1, 0.3), *many)}
    evaluator = evaluated(lvis(), found, style="lvis")
    assert len(evaluator.detections) == 300
    assert evaluator.result().metrics["APr"] == 0, "the 301st is not looked at, of whatever class"


def agree_with_lvis(truth: dict[str, Any], found: Detections, kind: Kind) -> dict[str, float]:
    """The protocol is told all detections; that 300 of an image count is its own rule."""
    evaluator = evaluated(truth, found, masks=kind == "masks", style="lvis")
    result = evaluator.result(kind)
    every = evaluated(truth, found, masks=kind == "masks").detections
    expected = lvis_protocol(truth, every, kind)
    assert_close(result.metrics | result.per_class, expected, atol=1e-6, rtol=0.0, equal_nan=True)
    return result.metrics


@pytest.mark.parametrize("seed", range(6))
def test_lvis_boxes_by_the_protocol(seed: int) -> None:
    truth = lvis_document(seed, images=14)
    found = detections(truth, seed + 100, masks=False)
    found = crowded(found, seed, images=[10, 40], count=380, masks=False)
    assert max(len(each["boxes"]) for each in found.values()) > 300
    numbers = agree_with_lvis(truth, found, "boxes")
    assert 0.01 < numbers["AP"] < 0.9, "a case that tells something"
    assert numbers["AP"] != evaluated(truth, found).result().metrics["AP"], "COCO's rules are others"


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools' decoder
@pytest.mark.parametrize("seed", range(3))
def test_lvis_masks_by_the_protocol(seed: int) -> None:
    truth = lvis_document(seed, images=6)
    found = detections(truth, seed + 100, masks=True, noise=0.05)
    found = crowded(found, seed, images=[10], count=310, masks=True)
    assert agree_with_lvis(truth, found, "masks")["AP"] > 0.01


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools' decoder
@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_lvis_leaves_out_what_has_no_area(kind: Kind) -> None:
    truth = lvis_document(1, images=8)
    found = detections(truth, 7, masks=True, noise=0.05)
    before = evaluated(truth, found, masks=True, style="lvis").result(kind).metrics["AP"]
    for each in found.values():
        each["boxes"] = torch.cat([each["boxes"], torch.tensor([[9.0, 9, 9, 30]] * 4)])
        each["labels"] = torch.cat([each["labels"], torch.arange(1, 5)])
        each["scores"] = torch.cat([each["scores"], torch.ones(4)])
        each["masks"] = torch.cat([each["masks"], torch.zeros(4, 1, 200, 200)])
    assert agree_with_lvis(truth, found, kind)["AP"] == pytest.approx(before)
    assert evaluated(truth, found, masks=True).result(kind).metrics["AP"] < before, "by COCO's rules they are wrong"


def test_lvis_of_nothing() -> None:
    truth = lvis_document(2)
    assert agree_with_lvis(truth, {}, "boxes")["AP"] == 0
    nothing = truth | {"annotations": []}
    assert math.isnan(agree_with_lvis(nothing, detections(truth, 1, masks=False), "boxes")["AP"])


def test_lvis_needs_frequencies() -> None:
    with pytest.raises(ValueError, match="frequency of every category"):
        Evaluator(document(0), style="lvis")
