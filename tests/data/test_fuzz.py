"""Wrong and hostile annotations: the commands end with a message, never with a traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.fuzz import (
    DIGITS,
    NAMES,
    WORDS,
    Document,
    broken_documents,
    damages,
    dumped,
    few,
    judged,
    more,
    ran,
    set_to,
    write_folder,
)
from tests.data.small_folders import sound_document, write_split


def test_a_sound_folder_stays_sound(tmp_path: Path) -> None:
    write_folder(tmp_path, sound_document())
    assert judged(tmp_path) == judged(tmp_path, masks=True) == 0


def test_changes_do_not_change_the_strategies() -> None:
    values = st.sampled_from([[30, 40]])

    @few
    @given(st.data())
    def spoil(data: st.DataObject) -> None:
        document: Document = {"images": []}
        set_to(values)(data.draw, document)
        assert document["images"] == [30, 40]
        document["images"].clear()

    spoil()


@pytest.mark.slow
@more
@given(broken_documents(), st.sampled_from(["train.json", "val.json"]), st.booleans())
def test_wrong_values(document: Document, name: str, masks: bool) -> None:
    with TemporaryDirectory() as folder:
        judged(write_folder(Path(folder), document, name=name), masks=masks)


@few
@given(broken_documents(), st.integers(1, 3))
def test_wrong_values_in_a_single_file(document: Document, images: int) -> None:
    if isinstance(document.get("images"), list):
        document["images"] = document["images"][:images]
    with TemporaryDirectory() as folder:
        write_split(Path(folder), dumped(document), name="labels.json")
        judged(Path(folder))


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp037"]


@few
@given(st.lists(damages, max_size=3), st.sampled_from(ENCODINGS), st.booleans())
def test_damaged_json(broken: list[tuple[Callable[[bytes, int], bytes], int]], encoding: str, plain: bool) -> None:
    document = sound_document()
    document["categories"][0]["name"] = "Dächer"
    data = json.dumps(document, ensure_ascii=plain).encode(encoding)
    for damage, at in broken:
        data = damage(data, at) or b" "
    with TemporaryDirectory() as folder:
        judged(write_folder(Path(folder), data))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"images": ' + "[" * 100_000 + "]" * 100_000 + ', "annotations": [], "categories": []}',
        '{"images": [], "annotations": [], "categories": [], "info": ' + '{"a": ' * 900 + "1" + "}" * 901,
        '{"images": ' + "9" * 5000 + "}",
        '{"images": 1e999999999, "annotations": null, "categories": NaN}',
        "null",
        '"\\ud800"',
        "{}",
        '{"images": [{}], "annotations": [{}], "categories": [{}]}',
        '{"images": {"id": 1}, "annotations": "none", "categories": [[]]}',
        "\ufeff\ufeff{}",
        "\0",
        "",
    ],
)
def test_hostile_json(text: str, tmp_path: Path) -> None:
    assert judged(write_folder(tmp_path, text.encode())) == 1


@pytest.mark.parametrize("name", [*NAMES, *WORDS, "x" * 300, "x/" * 400 + "a.png", 5, None, ["a.png"], DIGITS])
@pytest.mark.parametrize("key", ["file_name", "coco_url"])
def test_hostile_file_names(key: str, name: Any, tmp_path: Path) -> None:
    document = sound_document()
    del document["images"][0]["file_name"]
    document["images"][0][key] = name
    assert judged(write_folder(tmp_path, document)) == int(name not in ("a.png", "a.png/"))


def test_a_polygon_far_outside_allocates_no_memory(tmp_path: Path) -> None:
    """The decoder allocates memory for every pixel of a polygon's border: tens of gigabytes for 1e9 pixels."""
    document = sound_document()
    document["annotations"][0]["segmentation"] = [[0, 0, 1e9, 0, 1e9, 1e9]]
    assert judged(write_folder(tmp_path, document), masks=True) == 1
    _, text = ran("check-data", tmp_path)
    assert "bad-polygon" in text
