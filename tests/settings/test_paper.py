"""The paper's numbers: values copied from its tables, and the tables of the documentation that repeat them."""

import re
from pathlib import Path

import pytest

from bucketrank.settings.paper import paper_row, paper_rows

PAGES = Path(__file__).parents[2] / "docs" / "detectors"
SIZES = {"AP small": "APs", "AP medium": "APm", "AP large": "APl"}
DETECTORS = {
    "atss": "atss",
    "brs-detr": "co_detr",
    "cascade-rcnn": "cascade_rcnn",
    "faster-rcnn": "faster_rcnn",
    "mask-rcnn": "mask_rcnn",
    "paa": "paa",
    "retinanet": "retinanet",
}


def test_rows_copied_from_the_paper():
    cascade, lvis, focal = map(paper_row, ("cascade-rcnn-r50-brs", "mask-rcnn-r50-lvis-rs-pairwise", "atss-r50-focal"))
    assert cascade is not None
    assert cascade.numbers == {"AP": 41.1, "AP50": 58.8, "AP75": 44.2, "seconds": 0.24}
    assert lvis is not None
    assert (lvis.table, lvis.metric, lvis.dataset) == (3, "mask", "LVIS")
    assert lvis.numbers == {"AP": 25.6, "AP50": 39.2, "AP75": 27.3, "seconds": 0.87}
    assert focal is not None
    assert focal.numbers == {"AP": 39.3, "seconds": 0.14}
    assert (focal.table, focal.hyperparameters) == (7, 5)
    by_size, from_text = map(paper_row, ("brs-detr-swin-l", "rs-detr-r50-pairwise"))
    assert by_size is not None
    assert [by_size.numbers[name] for name in ("APs", "APm", "APl")] == [39.4, 61.7, 74.1]
    assert from_text is not None
    assert (from_text.place, from_text.numbers) == ("text", {"seconds": 4.14})


def test_no_row_for_a_recipe_that_is_not_from_the_paper():
    assert paper_row("atss-laptop") is None
    assert paper_row("") is None


def test_a_row_is_named_once():
    names = [row.row for row in paper_rows()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("page", DETECTORS)
def test_tables_of_the_documentation_repeat_the_data_file(page):
    rows = [row for row in paper_rows() if row.detector == DETECTORS[page]]
    accuracies = [{key: text for key, text in row.texts().items() if key != "seconds"} for row in rows]
    seconds = [row.texts()["seconds"] for row in rows if "seconds" in row.numbers]
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## The paper's numbers\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    head, _, *body = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*$", section, re.M)
    )
    for cells in body:
        columns = dict(zip(head, cells, strict=True))
        # A line may hold several losses: "36.3 / 36.2".
        for number in range(len(columns["AP"].split(" / "))):
            names = {**{name: name for name in ("AP", "AP50", "AP75", "T")}, **SIZES}
            values = {key: columns[name].split(" / ") for name, key in names.items() if columns.get(name)}
            line = {name: parts[number] for name, parts in values.items()}
            assert {name: value for name, value in line.items() if name != "T"} in accuracies, cells
            assert line.get("T", seconds[0]) in seconds, cells
