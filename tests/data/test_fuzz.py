"""Whatever is in the files: the commands end with a message, never with a traceback.

A sound folder is broken at random. What check-data then calls sound can be loaded and evaluated; what it refuses,
training refuses in the same words.
"""

from __future__ import annotations

import io
import json
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from bucketrank.cli import main
from bucketrank.data import CocoDataset, DataError, check, find_splits, require_sound
from bucketrank.data.pictures import opened
from bucketrank.data.problems import SHOWN, counted
from bucketrank.evaluation import Evaluator
from bucketrank.training.data import Data
from bucketrank.training.recipe import Recipe
from tests.data.folders import sound, write
from tests.data.test_convert import cityscapes, thing, voc, yolo

Document = dict[str, Any]
Place = tuple[Any, Any]  # a list or dict, and the position or key in it

RECIPE = Recipe(detector={"name": "atss"})
DIGITS = "many digits"  # in a document, where the file gets a number of more digits than Python reads

few = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
more = settings(few, max_examples=300)


# What is said


def ran(*words: str | Path) -> tuple[int, str]:
    """The exit status and all that is printed, to a terminal as strict about its encoding as a real one."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    with redirect_stdout(printed), redirect_stderr(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about odd files, which are printed and stop nothing
        status = main([str(word) for word in words])
    text = printed.buffer.getvalue().decode()
    assert status in (0, 1), text
    assert text.strip(), "it says something, whatever the outcome"
    assert "Traceback" not in text
    return status, text


def judged(folder: Path, *, masks: bool = False) -> int:
    """The exit status of check-data, once training was seen to agree with it."""
    status, text = ran("check-data", folder, "--workers", "1", *(["--masks"] if masks else []))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if status == 0:
            assert "0 errors" in text
            load(folder, masks=masks)
        else:
            refuse(folder, text, masks=masks)
    return status


def load(folder: Path, *, masks: bool) -> None:
    """Everything that training and evaluation read of sound data."""
    data = Data(find_splits(folder), RECIPE, masks=masks)
    for images in (data.train, data.val):
        for image, target in (images[index] for index in range(len(images))):
            assert image.dtype == torch.float32
            assert image.shape[0] == 3
            assert torch.isfinite(target["boxes"]).all()
            assert len(target["boxes"]) == len(target["labels"])
    for split in find_splits(folder):
        assert split is not None
        assert len(CocoDataset(split, masks=masks)) > 0
        evaluator = Evaluator(split, masks=masks)
        evaluator.result("masks" if masks else "boxes")


def refuse(folder: Path, text: str, *, masks: bool) -> None:
    """Training says what check-data said."""
    splits = find_splits(folder)
    with pytest.raises(DataError) as raised:
        Data(splits, RECIPE, masks=masks)
    errors = []
    for split in {each.annotations: each for each in splits if each}.values():
        own = [problem for problem in check(split, masks=masks) if problem.severity == "error"]
        errors += own
        if own:
            with pytest.raises(DataError) as alone:
                require_sound(split, masks=masks)
            assert [str(each) in str(alone.value) for each in own[:SHOWN]] == [True] * len(own[:SHOWN])
    if errors and all(split is not None and split.part == "all" for split in splits):
        assert f"{counted(len(errors), 'error')}, " in text
        assert str(errors[0]) in str(raised.value)


# JSON


def places(inside: Any) -> Iterator[Place]:
    """Every place in a document."""
    pairs = inside.items() if isinstance(inside, dict) else enumerate(inside) if isinstance(inside, list) else ()
    for key, value in pairs:
        yield inside, key
        yield from places(value)


numbers = st.sampled_from(
    [0, -1, 1, 2.5, 41, -(2**31), 2**63 - 1, 2**63, 2**70, 10**400, 1e5, 1e20, 1e308, -1e308, 5e-324, True, False]
) | st.sampled_from([float("nan"), float("inf"), -float("inf"), -0.0, DIGITS])
WORDS = ["", "a.png", "\0", "\ud800", "\udc80.png", "x" * 5000, "ä\u202e[/red]", "%s{0}", "1", "." * 9]
NAMES = [
    "../a.png",
    "/etc/passwd",
    "images/../a.png",
    "C:\\a.png",
    "a.png/",
    "b/" * 3000,
    "a.png\0",
    "folder",
    "out",
    "loop",
]
words, names = st.sampled_from(WORDS), st.sampled_from(NAMES)
rles = st.fixed_dictionaries(
    {
        "size": st.sampled_from([[30, 40], [40, 30], [10**5, 10**5], [0, 0], [-30, -40], [30], None, [2**40, 2**40]]),
        "counts": st.sampled_from(
            [[0, 1200], [1200], [-1, 1201], [10**18], [0] * 50 + [1200], [0.5, 1199.5], ["0"], []]
        )
        | st.text(st.characters(min_codepoint=48, max_codepoint=111), max_size=12)
        | st.sampled_from(["PPYo0", "o" * 40, "\0", "é", "\ud800", "ooooooo0", None, 3, {}]),
    }
)
anything = st.recursive(
    st.none() | numbers | words | names | rles,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(words, inner, max_size=2),
    max_leaves=6,
)
corners = st.lists(st.floats(-50, 90) | numbers, min_size=4, max_size=9)
KEYS = ["id", "image_id", "category_id", "bbox", "segmentation", "area", "iscrowd", "file_name", "width", "height"]
KEYS += ["name", "coco_url", "frequency"]


def set_to(values: st.SearchStrategy[Any]) -> Callable[[Any, Document], None]:
    def change(draw: Any, document: Document) -> None:
        inside, key = draw(st.sampled_from(list(places(document))))
        inside[key] = draw(values)

    return change


def drop(draw: Any, document: Document) -> None:
    inside, key = draw(st.sampled_from(list(places(document))))
    del inside[key]


def repeat(draw: Any, document: Document) -> None:
    """An entry once more, with the same id."""
    lists = [each for each in document.values() if isinstance(each, list) and each]
    if lists:
        entries = draw(st.sampled_from(lists))
        entries.append(json.loads(json.dumps(draw(st.sampled_from(entries)))))


def entry(name: str, key: str, values: st.SearchStrategy[Any]) -> Callable[[Any, Document], None]:
    """One field of one entry, where the entry is still there."""

    def change(draw: Any, document: Document) -> None:
        entries = document.get(name)
        found = [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
        if found:
            draw(st.sampled_from(found))[key] = draw(values)

    return change


CHANGES = [
    set_to(anything),
    set_to(numbers),
    drop,
    repeat,
    entry("annotations", "bbox", st.lists(st.floats(-60, 60) | numbers, min_size=4, max_size=4)),
    entry("annotations", "segmentation", st.lists(corners, max_size=3)),
    entry("annotations", "segmentation", rles),
    entry("annotations", "area", numbers),
    entry("annotations", "id", numbers),
    entry("images", "file_name", names | words),
    entry("images", "coco_url", names | words),
    entry("images", "width", numbers),
    entry("categories", "name", words),
    entry("categories", "frequency", words),
]


@st.composite
def broken_documents(draw: st.DrawFn) -> Document:
    document = sound()
    for _ in range(draw(st.integers(1, 3))):
        draw(st.sampled_from(CHANGES))(draw, document)
    return document


def dumped(document: Any) -> str:
    return json.dumps(document).replace(f'"{DIGITS}"', "9" * 5000)


def write_folder(folder: Path, document: Any, *, name: str = "train.json") -> Path:
    """The document, and a sound one for the other split; links that lead out and in circles, and a folder."""
    write(folder, sound(), name="val.json" if name == "train.json" else "train.json")
    (folder / name).write_bytes(document if isinstance(document, bytes) else dumped(document).encode())
    (folder / "images/folder").mkdir()
    (folder / "images/out").symlink_to("/etc/passwd")
    (folder / "images/loop").symlink_to("loop")
    return folder


def test_a_sound_folder_stays_sound(tmp_path: Path) -> None:
    write_folder(tmp_path, sound())
    assert judged(tmp_path) == judged(tmp_path, masks=True) == 0


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
        write(Path(folder), dumped(document), name="labels.json")
        judged(Path(folder))


def truncated(data: bytes, at: int) -> bytes:
    return data[: at % (len(data) + 1)]


def flipped(data: bytes, at: int) -> bytes:
    broken = bytearray(data)
    broken[at % len(data)] ^= 1 << at % 8
    return bytes(broken)


def noisy(data: bytes, at: int) -> bytes:
    """Some bytes in the middle are lost, others come in."""
    start = at % len(data)
    return data[:start] + bytes((at * step) % 256 for step in range(at % 7)) + data[start + at % 5 :]


DAMAGES = [truncated, flipped, noisy]
damages = st.tuples(st.sampled_from(DAMAGES), st.integers(0, 2**20))
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp037"]


@few
@given(st.lists(damages, max_size=3), st.sampled_from(ENCODINGS), st.booleans())
def test_damaged_json(broken: list[tuple[Callable[[bytes, int], bytes], int]], encoding: str, plain: bool) -> None:
    document = sound()
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
    document = sound()
    del document["images"][0]["file_name"]
    document["images"][0][key] = name
    assert judged(write_folder(tmp_path, document)) == int(name not in ("a.png", "a.png/"))


def test_a_polygon_far_outside_asks_for_no_memory(tmp_path: Path) -> None:
    """The decoder takes memory for every pixel of a polygon's border: of 1e9 pixels, tens of gigabytes."""
    document = sound()
    document["annotations"][0]["segmentation"] = [[0, 0, 1e9, 0, 1e9, 1e9]]
    assert judged(write_folder(tmp_path, document), masks=True) == 1
    _, text = ran("check-data", tmp_path)
    assert "bad-polygon" in text


# Images

MODES = {
    "PNG": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"],
    "JPEG": ["L", "RGB", "CMYK"],
    "GIF": ["P", "L"],
    "TIFF": ["1", "L", "RGB", "CMYK", "I;16", "F", "LAB", "YCbCr"],
    "WEBP": ["RGB", "RGBA"],
    "BMP": ["1", "L", "P", "RGB"],
    "PPM": ["1", "L", "RGB", "I;16"],
}
KINDS = [(kind, mode) for kind, modes in MODES.items() for mode in modes]


@cache
def encoded(kind: str, mode: str, *, frames: int = 1) -> bytes:
    """An image file of 40 x 30; of several frames, an animation."""
    written = io.BytesIO()
    grey = Image.linear_gradient("L").resize((40, 30))
    through = {"I;16": "I", "LAB": "RGB", "YCbCr": "RGB", "CMYK": "RGB"}.get(mode, "L")
    first, *rest = (grey.rotate(5 * n).convert(through).convert(mode) for n in range(frames))
    first.save(written, kind, **({"save_all": True, "append_images": rest} if rest else {}))
    return written.getvalue()


def judged_with(image: bytes, **entry: int) -> int:
    """check-data and training, where these bytes are an image's."""
    document = sound()
    document["images"][0].update(entry)
    with TemporaryDirectory() as name:
        folder = write_folder(Path(name), document)
        (folder / "images/a.png").write_bytes(image)
        return judged(folder)


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_every_mode(kind: str, mode: str) -> None:
    assert judged_with(encoded(kind, mode)) == int(mode == "F"), "of floats nobody knows the range"


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF", "WEBP"])
def test_the_first_picture_of_an_animation_is_read(kind: str) -> None:
    assert judged_with(encoded(kind, "RGB", frames=3)) == 0


@more
@given(st.sampled_from(KINDS), st.lists(damages, min_size=1, max_size=3))
def test_damaged_images(kind: tuple[str, str], broken: list[tuple[Callable[[bytes, int], bytes], int]]) -> None:
    data = encoded(*kind)
    for damage, at in broken:
        data = damage(data, at) or b"\0"
    judged_with(data)


def png(width: int, height: int) -> bytes:
    """A file that claims this size, and has a row of pixels."""
    chunks = [
        b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0),
        b"IDAT" + zlib.compress(bytes(100)),
        b"IEND",
    ]
    framed = (struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


@pytest.mark.parametrize("size", [(0, 0), (60_000, 60_000), (2**31 - 1, 2**31 - 1), (2**32 - 1, 1), (10_000, 9_000)])
def test_the_size_in_the_header_is_no_reason_to_take_memory(size: tuple[int, int]) -> None:
    assert judged_with(png(*size)) == 1
    assert judged_with(png(*size), width=size[0], height=size[1]) == 1


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\nshowpage\n", b"\xff\xd8"]
)
def test_what_is_no_image(data: bytes) -> None:
    assert judged_with(data) == 1


def test_postscript_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\nshowpage\n")
    with pytest.raises(DataError, match="PostScript is not read"):
        opened(tmp_path / "a.png")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, sound())
    (folder / "images/a.png").unlink()
    os.mkfifo(folder / "images/a.png")
    assert judged(folder) == 1


# Other formats


def converted(command: str, source: Path, folder: Path) -> None:
    """The outcome is a message, and of what was written check-data has an opinion."""
    status, _ = ran("convert", command, source, folder / "new")
    if status == 0:
        for found in sorted((folder / "new").glob("*.json")):
            if found.name in ("train.json", "annotations.json"):
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
    f"<annotation>{thing('cat', 1, 1, 9, 9)}</annotation>".replace("9", "1e400"),
    f"<annotation>{thing('cat', 1, 1, 9, 9)}</annotation>".replace("9", "nan"),
    f"<annotation>{thing('cat', 1, 1, 9, 9)}</annotation>".replace("9", "9" * 400),
    f"<annotation><filename>../a.jpg</filename>{thing('cat', 1, 1, 9, 9)}</annotation>",
    f"<annotation><filename>{'x' * 5000}</filename>{thing('cat', 1, 1, 9, 9)}</annotation>",
    "<annotation><filename>\0</filename></annotation>",
]


@pytest.mark.parametrize("text", XML)
def test_hostile_xml(text: str, tmp_path: Path) -> None:
    source = voc(tmp_path / "voc", a=thing("cat", 1, 1, 40, 30))
    (source / "Annotations/a.xml").write_text(text, encoding="utf-8")
    converted("voc", source, tmp_path)


@few
@given(st.sampled_from(["Annotations/a.xml", "JPEGImages/a.jpg", "ImageSets/Main/train.txt"]), damaged_bytes)
def test_damaged_voc(file: str, broken: list[tuple[Callable[[bytes, int], bytes], int]]) -> None:
    with TemporaryDirectory() as name:
        source = voc(Path(name) / "voc", a=thing("cat", 1, 1, 40, 30), b=thing("dog", 3, 4, 9, 9))
        (source / "ImageSets/Main").mkdir(parents=True)
        (source / "ImageSets/Main/train.txt").write_text("a\nb\n", encoding="utf-8")
        broken_at(source / file, broken)
        converted("voc", source, Path(name))


@few
@given(st.lists(texts, max_size=3))
def test_voc_lists_of_anything(lines: list[str]) -> None:
    with TemporaryDirectory() as name:
        source = voc(Path(name) / "voc", a=thing("cat", 1, 1, 40, 30))
        (source / "ImageSets/Main").mkdir(parents=True)
        (source / "ImageSets/Main/train.txt").write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        converted("voc", source, Path(name))


def broken_at(path: Path, broken: list[tuple[Callable[[bytes, int], bytes], int]]) -> None:
    data = path.read_bytes()
    for damage, at in broken:
        data = damage(data, at) or b"\0"
    path.write_bytes(data)


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


@pytest.mark.parametrize("text", YAMLS)
def test_hostile_yaml(text: str, tmp_path: Path) -> None:
    converted("yolo", yolo(tmp_path / "yolo", text), tmp_path)


def test_many_laughs_in_a_list(tmp_path: Path) -> None:
    text = LAUGHS.replace("a: &a", "- &a")
    for old in "bcdefghi":
        text = text.replace(f"{old}: &{old}", f"- &{old}")
    converted("yolo", yolo(tmp_path / "yolo", text), tmp_path)


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
        source = yolo(Path(name) / "yolo", *([] if named else [None]))
        (source / "labels/train/a.txt").write_text("\n".join(map(" ".join, lines)), encoding="utf-8")
        converted("yolo", source, Path(name))


@few
@given(st.sampled_from(["data.yaml", "labels/train/a.txt", "images/train/a.jpg", "classes.txt"]), damaged_bytes)
def test_damaged_yolo(file: str, broken: list[tuple[Callable[[bytes, int], bytes], int]]) -> None:
    with TemporaryDirectory() as name:
        source = yolo(Path(name) / "yolo", *([None] if file == "classes.txt" else []))
        (source / "classes.txt").write_text("cat\ndög\n", encoding="utf-8")
        broken_at(source / file, broken)
        converted("yolo", source, Path(name))


@few
@given(st.sampled_from(["gtFine", "leftImg8bit"]), damaged_bytes)
def test_damaged_cityscapes(part: str, broken: list[tuple[Callable[[bytes, int], bytes], int]]) -> None:
    with TemporaryDirectory() as name:
        source = cityscapes(Path(name) / "city")
        broken_at(next((source / part).glob("train/*/*.png")), broken)
        converted("cityscapes", source, Path(name))


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_cityscapes_of_other_modes(kind: str, mode: str, tmp_path: Path) -> None:
    source = cityscapes(tmp_path / "city")
    next((source / "gtFine").glob("train/*/*.png")).write_bytes(encoded(kind, mode))
    converted("cityscapes", source, tmp_path)
