"""Damaged and hostile folders of other formats: convert and check-data end with a message, never with a traceback."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.fuzz import FORMATS, broken_at, damages, encoded, few, judged, names, ran, words
from tests.data.other_formats import cityscapes_folder, voc_folder, voc_object, yolo_folder


def converted(command: str, source: Path, folder: Path) -> None:
    """Run convert, and check-data on its result; both must end with a message."""
    status, _ = ran("convert", command, source, folder / "new")
    if status == 0:
        for path in sorted((folder / "new").glob("*.json")):
            if path.name in ("train.json", "annotations.json"):
                judged(folder / "new")


texts = st.text(st.characters(max_codepoint=300), max_size=20) | words | names.filter(lambda name: len(name) < 200)
damaged_bytes = st.lists(damages, min_size=1, max_size=3)

XML = [
    "",
    "<annotation/>",
    "<annotation>" * 5000,
    "<annotation>" * 50_000 + "</annotation>" * 50_000,
    '<?xml version="1.0" encoding="utf-7"?><annotation/>',
    '<?xml version="1.0" encoding="shift_jis"?><annotation/>',
    '<?xml version="1.0" encoding="no-such"?><annotation/>',
    "<annotation><object/></annotation>",
    "<annotation><object><name/></object></annotation>",
    f"<annotation>{voc_object('cat', 1, 1, 9, 9)}</annotation>".replace("9", "1e400"),
    f"<annotation>{voc_object('cat', 1, 1, 9, 9)}</annotation>".replace("9", "nan"),
    f"<annotation>{voc_object('cat', 1, 1, 9, 9)}</annotation>".replace("9", "9" * 400),
    f"<annotation><filename>../a.jpg</filename>{voc_object('cat', 1, 1, 9, 9)}</annotation>",
    f"<annotation><filename>{'x' * 5000}</filename>{voc_object('cat', 1, 1, 9, 9)}</annotation>",
    "<annotation><filename>\0</filename></annotation>",
]


@pytest.mark.parametrize("text", XML)
def test_hostile_xml(text: str, tmp_path: Path) -> None:
    source = voc_folder(tmp_path / "voc", a=voc_object("cat", 1, 1, 40, 30))
    (source / "Annotations/a.xml").write_text(text, encoding="utf-8")
    converted("voc", source, tmp_path)
    ran("check-data", source, "--workers", "1")


@few
@given(st.sampled_from(["Annotations/a.xml", "JPEGImages/a.jpg", "ImageSets/Main/train.txt"]), damaged_bytes)
def test_damaged_voc(file: str, broken: list[tuple[Callable[[bytes, int], bytes], int]]) -> None:
    with TemporaryDirectory() as name:
        source = voc_folder(Path(name) / "voc", a=voc_object("cat", 1, 1, 40, 30), b=voc_object("dog", 3, 4, 9, 9))
        (source / "ImageSets/Main").mkdir(parents=True)
        (source / "ImageSets/Main/train.txt").write_text("a\nb\n", encoding="utf-8")
        broken_at(source / file, broken)
        converted("voc", source, Path(name))


@few
@given(st.lists(texts, max_size=3))
def test_voc_lists_of_anything(lines: list[str]) -> None:
    with TemporaryDirectory() as name:
        source = voc_folder(Path(name) / "voc", a=voc_object("cat", 1, 1, 40, 30))
        (source / "ImageSets/Main").mkdir(parents=True)
        (source / "ImageSets/Main/train.txt").write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        converted("voc", source, Path(name))


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)  # nine to the power of nine words, if written out
YAMLS = [
    "",
    "7",
    "[" * 2000,
    "train: 5\nval: 6\n",
    "train: {a: b}\n",
    "train: [[images/train]]\n",
    "train: images/train\nnames: {x: cat}\n",
    "train: images/train\nnames: {0: [cat], 1: null}\n",
    "train: images/train\nnames: 3\n",
    "train: images/train\nnames: {.inf: a}\n",
    "train: images/train\nnames: {-1: a, 0: b, 1: c}\n",
    'train: images/train\nnames: ["\\ud800", b]\n',
    "train: images/train\npath: 5\n",
    "train: images/train\npath: ../../..\nval: x\n",
    'train: "images/\\0train"\n',
    f"train: {'x' * 5000}\n",
    "train: 2001-99-99\n",
    "train: !!int ''\n",
    "train: !!bool x\n",
    "train: !!timestamp x\n",
    "train: !!python/object/apply:os.system ['true']\n",
    "train: &t [*t]\n",
    "? [a]\n: b\n",
    LAUGHS + "train: *i\n",
    LAUGHS + "train: images/train\nnames: *i\n",
    LAUGHS + "train: images/train\nnames: {0: *i}\n",
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("text", YAMLS)
def test_hostile_yaml(text: str, tmp_path: Path) -> None:
    converted("yolo", yolo_folder(tmp_path / "yolo", text), tmp_path)


def test_many_laughs_in_a_list(tmp_path: Path) -> None:
    text = LAUGHS.replace("a: &a", "- &a")
    for old in "bcdefghi":
        text = text.replace(f"{old}: &{old}", f"- &{old}")
    converted("yolo", yolo_folder(tmp_path / "yolo", text), tmp_path)


@few
@given(
    st.lists(
        st.lists(
            st.sampled_from(["0", "1", "0.5", "-1", "nan", "inf", "1e400", "9" * 5000, "99999999999", "", "x", "٣"]),
            min_size=1,
            max_size=9,
        ),
        max_size=3,
    ),
    st.booleans(),
)
def test_labels_of_anything(lines: list[list[str]], named: bool) -> None:
    with TemporaryDirectory() as name:
        source = yolo_folder(Path(name) / "yolo", *([] if named else [None]))
        (source / "labels/train/a.txt").write_text("\n".join(map(" ".join, lines)), encoding="utf-8")
        converted("yolo", source, Path(name))
        judged(source)


@few
@given(st.sampled_from(["data.yaml", "labels/train/a.txt", "images/train/a.jpg", "classes.txt"]), damaged_bytes)
def test_damaged_yolo(file: str, broken: list[tuple[Callable[[bytes, int], bytes], int]]) -> None:
    with TemporaryDirectory() as name:
        source = yolo_folder(Path(name) / "yolo", *([None] if file == "classes.txt" else []))
        (source / "classes.txt").write_text("cat\ndög\n", encoding="utf-8")
        broken_at(source / file, broken)
        converted("yolo", source, Path(name))


@pytest.mark.slow
@few
@given(st.sampled_from(["gtFine", "leftImg8bit"]), damaged_bytes)
def test_damaged_cityscapes(part: str, broken: list[tuple[Callable[[bytes, int], bytes], int]]) -> None:
    with TemporaryDirectory() as name:
        source = cityscapes_folder(Path(name) / "city")
        broken_at(next((source / part).glob("train/*/*.png")), broken)
        converted("cityscapes", source, Path(name))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("file_format", "mode"), FORMATS)
def test_cityscapes_of_other_modes(file_format: str, mode: str, tmp_path: Path) -> None:
    source = cityscapes_folder(tmp_path / "city")
    next((source / "gtFine").glob("train/*/*.png")).write_bytes(encoded(file_format, mode))
    converted("cityscapes", source, tmp_path)
