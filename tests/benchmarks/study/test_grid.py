"""The rows of the studies, compared with the recipes and the paper."""

import pytest

from benchmarks.study.grid import STUDIES
from benchmarks.study.tables import published
from bucketrank.settings import load_recipe, parse_flags, recipe_names

ROWS = [(study.name, row) for study in STUDIES.values() for row in study.rows]


def test_rows_have_names_of_their_own():
    for study in STUDIES.values():
        keys = [row.key for row in study.rows]
        assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("study", "row"), ROWS, ids=[f"{study}-{row.key}" for study, row in ROWS])
def test_a_row_is_what_its_recipes_train(study, row):
    recipes = []
    if row.small is not None:
        recipes.append(load_recipe(row.small, parse_flags(row.flags)))
    if row.paper is not None:
        recipes.append(load_recipe(row.paper))
    assert recipes
    names_of_detectors = {"Faster": "faster_rcnn", "Mask": "mask_rcnn", "Cascade": "cascade_rcnn", "Co-DETR": "co_detr"}
    for recipe in recipes:
        assert recipe.loss.name == row.loss
        assert not row.method or recipe.flat()["loss.method"] == row.method
        first = row.detector.split()[0]
        assert recipe.detector.name == names_of_detectors.get(first, first.lower())


def test_every_recipe_of_the_paper_belongs_to_a_study():
    used = {row.paper for _, row in ROWS}
    assert {name for name in recipe_names() if not name.endswith(("laptop", "coco"))} - used == set()


@pytest.mark.parametrize(("study", "row"), ROWS, ids=[f"{study}-{row.key}" for study, row in ROWS])
def test_which_rows_have_numbers_of_the_paper(study, row):
    numbers = published(row)
    timed_only = {"rs-detr-r50-pairwise"}  # the paper has no AP for it
    assert (row.paper in timed_only or "AP" in numbers) == (
        row.paper is not None and (row.method != "exact" or row.loss == "alrp")
    )
    assert all(0 < value < 100 for value in numbers.values())


def test_numbers_of_the_paper():
    rows = {row.key: row for row in STUDIES["detectors"].rows}
    assert published(rows["atss-rs-bucketed"]) == {"AP": 39.8, "AP50": 58.8, "AP75": 42.9, "seconds": 0.15}
    assert published(rows["atss-rs-exact"]) == {}, "the paper has no exact bucketing"
    assert published(rows["paa-focal"]) == {}
    counts = {row.key: row.hyperparameters for row in STUDIES["baselines"].rows}
    assert counts["faster-rcnn-ce"] == 9
    assert counts["faster-rcnn-rs-exact"] == 3
    assert counts["atss-dr"] == 5
    assert counts["atss-rs-bucketed"] == 1
    assert counts["retinanet-focal"] == 5, "like focal loss on ATSS"


def test_ap_by_size_of_co_detr():
    detr = STUDIES["detr"]
    rows = {row.key: row for row in detr.rows}
    assert detr.metrics == ("AP", "AP50", "AP75", "APs", "APm", "APl")
    assert [published(rows["co-detr-rs-bucketed"])[name] for name in detr.metrics] == [
        50.1,
        67.4,
        54.6,
        31.9,
        53.9,
        65.0,
    ]
    assert published(rows["co-detr-rs-pairwise"]) == {"seconds": 4.14}
    assert detr.others["DINO, 12 epochs"] == (49.4, 66.9, 53.8, 32.3, 52.5, 63.9)
