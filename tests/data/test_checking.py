"""Checks of a data set: every problem in a folder without other problems."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bucketrank.cli import main
from bucketrank.data import Problem, check, find_splits, require_sound
from bucketrank.data.checks import Content, check_pair
from bucketrank.data.problems import raise_errors
from bucketrank.errors import DataError
from tests.data.small_folders import sound_document, write_image, write_split
from tests.shared_data import shared

Document = dict[str, Any]
NAN, INFINITY = float("nan"), float("inf")


def annotation(**changes: Any) -> Callable[[Document], None]:
    return lambda document: document["annotations"][0].update(changes)


def image(**changes: Any) -> Callable[[Document], None]:
    return lambda document: document["images"][0].update(changes)


def segmentation(mask: Any) -> Callable[[Document], None]:
    return annotation(segmentation=mask)


def rle(counts: Any, size: Any = (30, 40)) -> Callable[[Document], None]:
    return segmentation({"size": list(size) if isinstance(size, tuple) else size, "counts": counts})


# Change that breaks the document, code, severity, id, message
CASES: list[tuple[Callable[[Document], Any], str, str, str | None, str]] = [
    (lambda d: d.pop("images"), "missing-field", "error", "images", "expected a list named 'images'"),
    (lambda d: d.update(annotations={}), "missing-field", "error", "annotations", "expected a list named"),
    (lambda d: d["annotations"].append(7), "wrong-type", "error", "annotations[3]", "expected an object, got 7"),
    (lambda d: d["images"][1].pop("id"), "missing-field", "error", "images[1]", "whole number as id, got None"),
    (annotation(image_id="11"), "missing-field", "error", "annotations[0]", "whole number as image_id, got '11'"),
    (
        lambda d: d["images"][1].update(id=2**53),
        "id-too-large",
        "error",
        "images[1]",
        "got 9007199254740992; renumber",
    ),
    (lambda d: d["images"][1].update(id=-(2**53)), "id-too-large", "error", "images[1]", "between -2^53 and 2^53"),
    (lambda d: d["categories"][0].update(id=2**60), "id-too-large", "error", "categories[0]", "number the categories"),
    (lambda d: d.update(images=[], annotations=[]), "no-images", "error", None, "needs at least one"),
    (lambda d: d["images"].append(dict(d["images"][1])), "duplicate-id", "error", "image 5", "used twice"),
    (annotation(id=2), "duplicate-id", "error", "annotation 2", "give every annotation its own"),
    (lambda d: d["categories"].append({"id": 2, "name": "x"}), "duplicate-id", "error", "category 2", "used twice"),
    (lambda d: d["categories"].append({"id": 3}), "missing-field", "error", "category 3", "has no name"),
    (
        lambda d: d["categories"].append({"id": 3, "name": "cat"}),
        "duplicate-name",
        "warning",
        "category 3",
        "the same name 'cat' as category 2",
    ),
    (annotation(image_id=77), "unknown-image", "error", "annotation 1", "image 77, which is not listed"),
    (annotation(category_id=3), "unknown-category", "error", "annotation 1", "category 3, which is not listed; add it"),
    (annotation(iscrowd=2), "wrong-type", "error", "annotation 1", "expected iscrowd 0 or 1, got 2"),
    (annotation(area=NAN), "not-a-number", "error", "annotation 1", "expected a finite area of at least 0, got nan"),
    (annotation(area=-1), "not-a-number", "error", "annotation 1", "expected a finite area of at least 0, got -1"),
    (annotation(bbox=[1, 2, 3]), "bad-box", "error", "annotation 1", "[x, y, width, height], got [1, 2, 3]"),
    (annotation(bbox=None), "bad-box", "error", "annotation 1", "[x, y, width, height], got None"),
    (annotation(bbox=[1, 2, "3", 4]), "bad-box", "error", "annotation 1", "got [1, 2, '3', 4]"),
    (annotation(bbox=[1, NAN, 3, 4]), "not-a-number", "error", "annotation 1", "got [1, nan, 3, 4]"),
    (annotation(bbox=[1, 2, INFINITY, 4]), "not-a-number", "error", "annotation 1", "got [1, 2, inf, 4]"),
    (annotation(bbox=[9, 9, -3, 4]), "bad-box", "error", "annotation 1", "negative width or height"),
    (annotation(bbox=[9, 9, 0, 4]), "box-without-area", "warning", "annotation 1", "training leaves it out"),
    (annotation(bbox=[40.5, 9, 5, 4]), "box-without-area", "warning", "annotation 1", "no area inside"),
    (annotation(bbox=[50, 9, 5, 4]), "box-outside", "error", "annotation 1", "in an image of 40 x 30 lies outside"),
    (annotation(bbox=[-9, -9, 5, 5]), "box-outside", "error", "annotation 1", "lies outside"),
    (annotation(bbox=[30, 9, 12, 4]), "box-sticks-out", "warning", "annotation 1", "by 2 pixels; training clips it"),
    (segmentation("mask"), "bad-mask", "error", "annotation 1", "as polygons or RLE, got 'mask'"),
    (segmentation([[1, 2, 3, 4, 5, 6, 7]]), "bad-polygon", "error", "annotation 1", "pairs of x and y, got 7 numbers"),
    (segmentation([[1, 2, 3, 4]]), "bad-polygon", "warning", "annotation 1", "has 2 corners, fewer than 3"),
    (segmentation([7]), "bad-polygon", "error", "annotation 1", "expected a list [x1, y1, x2, y2, ...], got 7"),
    (segmentation([[1, 2, 3, NAN, 5, 6]]), "not-a-number", "error", "annotation 1", "contains NaN or infinity"),
    (segmentation([[50, 2, 60, 2, 60, 9]]), "mask-outside", "error", "annotation 1", "lies outside the image of 40"),
    (rle([0, 1200], (40, 30)), "rle-size", "error", "annotation 1", "the RLE is for 30 x 40, the image is 40 x 30"),
    (rle([0, 1200], None), "bad-rle", "error", "annotation 1", "size as [height, width], got None"),
    (rle([0, 1199]), "rle-counts", "error", "annotation 1", "sum to 1199 and do not fill the 1200 pixels"),
    (rle([-1, 1201]), "bad-rle", "error", "annotation 1", "whole numbers of at least 0"),
    (rle("0"), "rle-counts", "error", "annotation 1", "compressed counts do not fill the 1200 pixels"),
    (rle("PPPP"), "rle-counts", "error", "annotation 1", "compressed counts do not fill"),
    (
        lambda d: (image(width=10**6, height=10**6)(d), rle("0", (10**6, 10**6))(d)),
        "bad-rle",
        "error",
        "annotation 1",
        "larger than any image",
    ),
    (rle(5), "bad-rle", "error", "annotation 1", "as a list or a string, got 5"),
    (image(width=0), "missing-field", "error", "image 11", "expected width and height as whole numbers above 0"),
    (image(height=None), "missing-field", "error", "image 11", "write the size of the image file"),
    (image(width=10**7), "too-many-pixels", "error", "image 11", "of at most 178,956,970 pixels, got 10000000 x 30"),
    (image(width=10**400), "too-many-pixels", "error", "image 11", "000 x 30; Pillow opens no"),
    (lambda d: d["images"][0].pop("file_name"), "missing-field", "error", "image 11", "has no file_name"),
    (image(file_name="/etc/passwd"), "path-leaves-folder", "error", "image 11", "'/etc/passwd' leaves the folder"),
    (image(file_name="x/../../a.png"), "path-leaves-folder", "error", "image 11", "without .."),
    (image(file_name="..\\a.png"), "path-leaves-folder", "error", "image 11", "leaves the folder"),
    (image(file_name="C:\\a.png"), "path-leaves-folder", "error", "image 11", "leaves the folder"),
    (image(file_name="b.png"), "duplicate-file", "warning", "image 5", "the same file as image 11: b.png"),
    (image(file_name="c.png"), "image-missing", "error", "image 11", "the image does not exist; add it or remove"),
    (image(width=41), "image-size", "error", "image 11", "the file is 40 x 30, its entry says 41 x 30"),
]


@pytest.mark.parametrize(("broken", "code", "severity", "where", "message"), CASES)
def test_a_broken_annotation(
    broken: Callable[[Document], Any], code: str, severity: str, where: str | None, message: str, tmp_path: Path
) -> None:
    document = sound_document()
    broken(document)
    split = write_split(tmp_path, document)
    problems = [problem for problem in check(split, workers=1) if problem.code == code]
    assert len(problems) == 1, check(split)
    assert problems[0].severity == severity
    assert problems[0].id == where
    assert message in problems[0].message
    if severity == "error":
        with pytest.raises(DataError) as raised:
            require_sound(split)
        assert str(problems[0]) in str(raised.value), "training raises the same"


def test_every_kind_has_a_case() -> None:
    source = (Path(__file__).parents[2] / "src/bucketrank/data/checks.py").read_text(encoding="utf-8")
    named = {word for word in source.replace('"', " ").split() if "-" in word and word.replace("-", "").isalpha()}
    codes = {word for word in named if f'"{word}"' in source}
    tested = {case[1] for case in CASES} | {"bad-json", "no-mask", "image-unreadable", "image-turned"}
    tested |= {"no-objects", "other-classes", "unseen-classes", "unused-classes", "shared-images"}
    tested |= {"bad-label"}  # in test_label_folders.py
    assert codes == tested


def test_a_sound_folder_has_no_problems(tmp_path: Path) -> None:
    split = write_split(tmp_path, sound_document())
    assert check(split) == []
    require_sound(split)


def test_a_box_may_stick_out_by_a_pixel(tmp_path: Path) -> None:
    document = sound_document()
    annotation(bbox=[-0.5, 3, 20, 28])(document)
    assert check(write_split(tmp_path, document)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"images": [,]}', "line 1, column 13: not JSON (Expecting value); the file may be truncated"),
        ('{"images": [\n{"id": 1}', "line 2, column 10: not JSON (Expecting ',' delimiter)"),
        ("", "line 1, column 1: not JSON"),
        ("[]", "expected an object with images, annotations and categories, got a list"),
        ('{"a": ' * 200_000, "nested too deeply"),
    ],
)
def test_text_that_is_not_json(text: str, message: str, tmp_path: Path) -> None:
    (problem,) = check(write_split(tmp_path, text))
    assert (problem.code, problem.severity, problem.id) == ("bad-json", "error", None)
    assert message in problem.message
    assert problem.file == str(tmp_path / "train.json")
    with pytest.raises(DataError, match="the data set has 1 error"):
        require_sound(write_split(tmp_path, text))


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    split = write_split(tmp_path, "")
    split.annotations.write_bytes(b"\x80abc")
    assert "byte 0 is not UTF-8" in check(split)[0].message
    split.annotations.unlink()
    assert "does not exist" in check(split)[0].message


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    split = write_split(tmp_path, sound_document())
    split.annotations.write_bytes(b"\xef\xbb\xbf" + split.annotations.read_bytes())
    assert check(split) == []


def test_masks_are_required_only_on_request(tmp_path: Path) -> None:
    document = sound_document()
    segmentation([])(document)
    split = write_split(tmp_path, document)
    assert check(split) == []
    (problem,) = check(split, masks=True)
    assert (problem.code, problem.id) == ("no-mask", "annotation 1")
    with pytest.raises(DataError, match="models with masks and copy-paste need polygons or RLE"):
        require_sound(split, masks=True)


@pytest.mark.parametrize(
    "mask",
    [
        [[]],
        [[1, 2, 3, 4], [5, 6]],
        [[4, 5, 9, 5, 14, 5]],
        [[4.1, 5.1, 4.2, 5.2, 4.3, 5.3]],
        {"size": [30, 40], "counts": [1200]},
        {"size": [30, 40], "counts": [600, 0, 600]},
        {"size": [30, 40], "counts": "`U1"},  # 1200, compressed
    ],
)
def test_a_mask_without_pixels_is_an_error_if_masks_are_required(mask: Any, tmp_path: Path) -> None:
    document = sound_document()
    segmentation(mask)(document)
    split = write_split(tmp_path, document)
    assert [problem for problem in check(split) if problem.severity == "error"] == []
    (problem,) = (problem for problem in check(split, masks=True) if problem.severity == "error")
    assert (problem.code, problem.id) == ("no-mask", "annotation 1")
    assert problem.message == "the mask has no pixel; draw it again or remove the annotation"
    for left_out in ({"iscrowd": 1}, {"bbox": [4, 5, 10, 0]}):
        document = sound_document()
        annotation(segmentation=mask, **left_out)(document)
        require_sound(write_split(tmp_path, document), masks=True)


def test_a_mask_smaller_than_a_pixel_is_a_warning_if_it_misses_all_pixels(tmp_path: Path) -> None:
    """COCO's polygons have fractions of pixels."""
    document = sound_document()
    segmentation([[1, 1, 1.3, 1, 1.3, 1.4]])(document)
    split = write_split(tmp_path, document)
    assert check(split) == []
    (problem,) = check(split, masks=True)
    assert (problem.code, problem.severity, problem.id) == ("no-mask", "warning", "annotation 1")
    assert problem.message.startswith("the mask of 0.06 square pixels has no pixel, so it cannot be detected")
    for sound in ([[1, 2, 3, 4], [2, 2, 3, 2, 3, 3, 2, 3]], [[4, 5, 14, 15, 14, 5, 4, 15]]):  # the last crosses itself
        segmentation(sound)(document)
        assert [each for each in check(write_split(tmp_path, document), masks=True) if each.code == "no-mask"] == []


def test_ids_below_two_to_the_53_and_any_annotation_ids_are_sound(tmp_path: Path) -> None:
    document = sound_document()
    document["images"][1]["id"] = 2**53 - 1
    document["categories"][1]["id"] = 1 - 2**53
    document["annotations"][0]["id"] = 2**60
    for entry in document["annotations"][1:]:
        entry["category_id"] = 1 - 2**53
    assert check(write_split(tmp_path, document)) == []


def test_splits_that_do_not_fit_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(tmp_path, sound_document(), name="val.json")
    document = sound_document()
    document["categories"][0]["name"] = "wolf"
    write_split(tmp_path, document)
    assert main(["check-data", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "other-classes" in out
    assert "1 error, 1 warning" in out
    assert "(9, 'wolf')" in out

    document = sound_document()
    del document["annotations"][:2]
    write_split(tmp_path, document)
    assert main(["check-data", str(tmp_path)]) == 1
    assert "no image has an object to learn" in capsys.readouterr().out

    document = sound_document()
    document["annotations"] = [entry for entry in document["annotations"] if entry["category_id"] != 9]
    write_split(tmp_path, document)
    assert main(["check-data", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "unseen-classes" in out
    assert "shared-images" in out
    assert "0 errors, 2 warnings" in out


def test_classes_without_objects_and_shared_images(tmp_path: Path) -> None:
    document = sound_document()
    document["categories"].append({"id": 10, "name": "fox"})
    train = write_split(tmp_path, document)
    val = write_split(tmp_path, document, name="val.json")
    unused, shared = check_pair(Content.of(train), Content.of(val))
    assert (unused.file, unused.code, unused.severity) == (train.name, "unused-classes", "warning")
    assert unused.message.startswith("1 class without any object: fox; check the class numbers")
    assert (shared.file, shared.code, shared.severity) == (val.name, "shared-images", "warning")
    assert shared.message.startswith(f"2 images are also in {train.name}, so AP will be too high")


def test_a_single_image_cannot_be_divided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = sound_document()
    del document["images"][1]
    write_split(tmp_path, document)
    assert main(["check-data", str(tmp_path)]) == 1
    explained = "the folder has no validation file, and this file has fewer than two images; add images"
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert explained in words
    val = find_splits(tmp_path).val
    assert val is not None
    with pytest.raises(DataError, match=explained):
        require_sound(val)


def test_unreadable_images(tmp_path: Path) -> None:
    split = write_split(tmp_path, sound_document())
    (tmp_path / "images/a.png").write_text("no image", encoding="utf-8")
    whole = write_image(tmp_path / "images/b.png").read_bytes()
    (tmp_path / "images/b.png").write_bytes(whole[: len(whole) // 2])
    problems = {problem.id: problem for problem in check(split)}
    assert [problem.code for problem in problems.values()] == ["image-unreadable"] * 2
    assert problems["image 11"].file == str(tmp_path / "images/a.png")
    assert "not an image that Pillow can read" in problems["image 11"].message
    assert "cannot be decoded" in problems["image 5"].message
    assert [problem.id for problem in check(split, depth="headers")] == ["image 11"], (
        "the header of the other is complete"
    )
    assert check(split, depth="annotations") == []


def test_a_turned_image_is_read_as_stored(tmp_path: Path) -> None:
    split = write_split(tmp_path, sound_document())
    exif = Image.Exif()
    for orientation in (3, 6):
        exif[0x0112] = orientation
        write_image(tmp_path / "images/a.png", format="JPEG", exif=exif)
        (problem,) = check(split)
        assert (problem.code, problem.severity) == ("image-turned", "warning")
        assert "which is not applied: make sure that the boxes fit the stored pixels" in problem.message

    for other in ("PNG", "WEBP"):
        write_image(tmp_path / "images/a.png", format=other, exif=exif)
        assert [problem.code for problem in check(split)] == ["image-turned"]
    write_image(tmp_path / "images/a.png", format="TIFF", exif=exif)  # Pillow turns it while reading
    assert "image-turned" not in [problem.code for problem in check(split)]

    document = sound_document()
    image(width=30, height=40)(document)
    split = write_split(tmp_path, document)
    write_image(tmp_path / "images/a.png", format="JPEG", exif=exif)
    messages = [problem.message for problem in check(split) if problem.code == "image-size"]
    assert messages == [
        "the file is 40 x 30, its entry says 30 x 40; EXIF asks to rotate it, which is not applied: "
        "store the pixels upright and remove the EXIF orientation"
    ]


def test_an_error_shows_the_first_twenty(tmp_path: Path) -> None:
    problems = [Problem("f.json", "bad-box", f"annotation {n}", "wrong") for n in range(25)]
    problems.append(Problem("f.json", "box-sticks-out", "annotation 99", "clipped", "warning"))
    with pytest.raises(DataError) as raised:
        raise_errors(problems)
    lines = str(raised.value).splitlines()
    assert lines[0] == "the data set has 25 errors (25 bad-box):"
    assert len(lines) == 1 + 20 + 1
    assert lines[-1] == "  ... and 5 more"
    raise_errors(problems[-1:])


def test_progress_counts_the_images(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    check(write_split(tmp_path, sound_document()), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 50) | st.floats() | st.sampled_from(["", "a.png", "../x", "\0"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(["size", "counts", "id"]), inner),
    max_leaves=8,
)


@given(
    where=st.sampled_from(["images", "annotations", "categories"]),
    field=st.sampled_from(
        [
            "id",
            "image_id",
            "category_id",
            "bbox",
            "segmentation",
            "area",
            "iscrowd",
            "file_name",
            "width",
            "height",
            "name",
            "coco_url",
        ]
    ),
    value=anything,
)
def test_no_value_makes_the_check_raise(
    where: str, field: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    document = sound_document()
    document[where][0][field] = value
    check(write_split(tmp_path_factory.mktemp("any"), document), depth="headers")


# The small splits of coco_by share only some of their classes.
@pytest.mark.parametrize(
    ("name", "masks", "warnings"),
    [("bccd", False, "0 warnings"), ("nuclei", True, "0 warnings"), ("coco_by", True, "2 warnings")],
)
def test_real_data_is_sound(name: str, masks: bool, warnings: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-data", str(shared(f"data/{name}")), *(["--masks"] if masks else []), "--no-decode"]) == 0
    out = capsys.readouterr().out
    assert f"0 errors, {warnings}: the data can be trained on." in out
    assert ("unseen-classes" in out) == (warnings != "0 warnings")


def test_the_command_lists_the_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = sound_document()
    annotation(bbox=[30, 9, 12, 4])(document)
    write_split(tmp_path, sound_document())
    write_split(tmp_path, document, name="val.json")
    assert main(["check-data", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "train.json: 2 images, 2 objects, 1 crowd, 2 classes, 1 without objects" in out
    assert "0 errors, 2 warnings: the data can be trained on." in out
    assert "box-sticks-out" in out
    assert "shared-images" in out

    (tmp_path / "images/a.png").unlink()
    assert main(["check-data", str(tmp_path), "--show", "1"]) == 1
    out = capsys.readouterr().out
    assert "image-missing" in out
    assert "images/a.png" in out
    assert "and 1 more of image-missing" in out
    assert "2 errors, 1 warning: training refuses this data." in out


def test_the_command_checks_a_single_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = sound_document()
    annotation(bbox=[1, 2])(document)
    write_split(tmp_path, document, name="labels.json")
    assert main(["check-data", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "1 error, 0 warnings" in out
    assert "training keeps a tenth of the images for validation" in out
    assert f"bucketrank split {tmp_path} NEW-FOLDER" in out


def test_the_command_reports_text_that_is_not_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(tmp_path, "{")
    assert main(["check-data", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "train.json: not counted, because of errors" in out
    assert "bad-json" in out
    assert main(["check-data", str(tmp_path / "images")]) == 1
    assert "annotations/instances_train2017.json" in capsys.readouterr().err


def test_control_characters_in_names_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = sound_document()
    document["images"][0]["file_name"] = "a\x1b[2J\n\u202e.png"
    document["categories"][0]["name"] = document["categories"][1]["name"] = "cat\x1b]0;title\x07"
    split = write_split(tmp_path, document)
    assert main(["check-data", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e"} & {*printed}
    assert r"\x1b]0;title" in printed
    with pytest.raises(DataError) as caught:
        require_sound(split)
    assert str(caught.value).count("\n") == 1, "one line for the count, one for the missing file"
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("depth", [*range(900, 1000), 100_000])
def test_deep_nesting_is_a_problem_like_others(depth: int, tmp_path: Path) -> None:
    """Python reads some depths that it cannot print."""
    document = sound_document()
    document["annotations"][0]["bbox"] = "DEEP"
    text = json.dumps(document).replace('"DEEP"', "[" * depth + "]" * depth)
    assert {problem.code for problem in check(write_split(tmp_path, text))} & {"bad-json", "bad-box"}


@pytest.mark.parametrize("place", ["json.loads", "bucketrank.data.summary.check"])
def test_lack_of_memory_is_a_message(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    write_split(tmp_path, sound_document())
    monkeypatch.setattr(place, fail)
    assert main(["check-data", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "too large for the free memory" in printed.out or "not enough memory" in printed.err
    assert printed.err.count("\n") <= 1


def test_lack_of_memory_for_threads_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    split = write_split(tmp_path, sound_document())
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(DataError, match="too little memory for another thread; lower --workers"):
        check(split)


def test_a_folder_is_not_a_split(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="check: expected a Split, as find_splits returns for a folder, got str"):
        check(str(tmp_path))  # type: ignore[arg-type]
