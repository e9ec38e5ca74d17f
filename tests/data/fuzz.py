"""Helpers to fuzz data: folders, random ways to break them, and properties that must hold afterwards.

If check-data accepts a broken folder, it can be loaded and evaluated. If check-data refuses it, training refuses it
with the same messages.
"""

import copy
import io
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from PIL import Image

from bucketrank.cli import main
from bucketrank.data import CocoDataset, check, find_splits, require_sound
from bucketrank.data.problems import MAX_LISTED, counted
from bucketrank.errors import DataError
from bucketrank.evaluation import Evaluator
from bucketrank.settings import from_dict
from bucketrank.training.batches import RunData as DataModule
from tests.data.small_folders import sound_document, write_split

Document = dict[str, Any]
Place = tuple[Any, Any]  # a list or dict, and the position or key in it

RECIPE = from_dict({"detector": {"name": "atss"}})
DIGITS = "many digits"  # placeholder in a document for a number with more digits than Python reads

few = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
more = settings(few, max_examples=300)


# Commands


def ran(*words: str | Path) -> tuple[int, str]:
    """Run a command; return its exit status and output, which must be valid UTF-8 as on a real terminal."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    with redirect_stdout(printed), redirect_stderr(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about odd files
        status = main([str(word) for word in words])
    text = printed.buffer.getvalue().decode()
    assert status in (0, 1), text
    assert text.strip(), "a message, whatever the outcome"
    assert "Traceback" not in text
    return status, text


def judged(folder: Path, *, masks: bool = False) -> int:
    """Return the exit status of check-data, after a test that training agrees with it."""
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
    """Read everything that training and evaluation read."""
    data = DataModule(find_splits(folder), RECIPE, masks=masks)
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
    """Test that training raises the errors that check-data printed."""
    splits = find_splits(folder)
    with pytest.raises(DataError) as raised:
        DataModule(splits, RECIPE, masks=masks)
    errors = []
    for split in {each.whole: each for each in splits if each}.values():
        own = [problem for problem in check(split, masks=masks) if problem.severity == "error"]
        errors += own
        if own:
            with pytest.raises(DataError) as alone:
                require_sound(split, masks=masks)
            assert [str(each) in str(alone.value) for each in own[:MAX_LISTED]] == [True] * len(own[:MAX_LISTED])
    if errors and all(split is not None and split.part == "all" for split in splits):
        assert f"{counted(len(errors), 'error')}, " in text
        assert str(errors[0]) in str(raised.value)


# JSON


def places(inside: Any) -> Iterator[Place]:
    """Yield every place in a document."""
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


def drawn(draw: Any, values: st.SearchStrategy[Any]) -> Any:
    """Draw a value as a copy: a later change of the document must not change the lists in the strategies."""
    return copy.deepcopy(draw(values))


def set_to(values: st.SearchStrategy[Any]) -> Callable[[Any, Document], None]:
    def change(draw: Any, document: Document) -> None:
        inside, key = draw(st.sampled_from(list(places(document))))
        inside[key] = drawn(draw, values)

    return change


def drop(draw: Any, document: Document) -> None:
    inside, key = draw(st.sampled_from(list(places(document))))
    del inside[key]


def repeat(draw: Any, document: Document) -> None:
    """Repeat an entry, with the same id."""
    lists = [each for each in document.values() if isinstance(each, list) and each]
    if lists:
        entries = draw(st.sampled_from(lists))
        entries.append(json.loads(json.dumps(draw(st.sampled_from(entries)))))


def entry(name: str, key: str, values: st.SearchStrategy[Any]) -> Callable[[Any, Document], None]:
    """Return a change that sets one field of one entry, if the entry still exists."""

    def change(draw: Any, document: Document) -> None:
        entries = document.get(name)
        objects = [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
        if objects:
            draw(st.sampled_from(objects))[key] = drawn(draw, values)

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
    document = sound_document()
    for _ in range(draw(st.integers(1, 3))):
        draw(st.sampled_from(CHANGES))(draw, document)
    return document


def dumped(document: Any) -> str:
    return json.dumps(document).replace(f'"{DIGITS}"', "9" * 5000)


def write_folder(folder: Path, document: Any, *, name: str = "train.json") -> Path:
    """Write the document, a valid one for the other split, links that leave the folder or loop, and a folder."""
    write_split(folder, sound_document(), name="val.json" if name == "train.json" else "train.json")
    (folder / name).write_bytes(document if isinstance(document, bytes) else dumped(document).encode())
    (folder / "images/folder").mkdir()
    (folder / "images/out").symlink_to("/etc/passwd")
    (folder / "images/loop").symlink_to("loop")
    return folder


# Bytes


def truncated(data: bytes, at: int) -> bytes:
    return data[: at % (len(data) + 1)]


def flipped(data: bytes, at: int) -> bytes:
    broken = bytearray(data)
    broken[at % len(data)] ^= 1 << at % 8
    return bytes(broken)


def noisy(data: bytes, at: int) -> bytes:
    """Replace some bytes by others."""
    start = at % len(data)
    return data[:start] + bytes((at * step) % 256 for step in range(at % 7)) + data[start + at % 5 :]


DAMAGES = [truncated, flipped, noisy]
damages = st.tuples(st.sampled_from(DAMAGES), st.integers(0, 2**20))


def broken_at(path: Path, broken: list[tuple[Callable[[bytes, int], bytes], int]]) -> None:
    data = path.read_bytes()
    for damage, at in broken:
        data = damage(data, at) or b"\0"
    path.write_bytes(data)


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
FORMATS = [(file_format, mode) for file_format, modes in MODES.items() for mode in modes]


@cache
def encoded(file_format: str, mode: str, *, frames: int = 1) -> bytes:
    """Return an image file of 40 x 30, with several frames as an animation."""
    written = io.BytesIO()
    grey = Image.linear_gradient("L").resize((40, 30))
    through = {"I;16": "I", "LAB": "RGB", "YCbCr": "RGB", "CMYK": "RGB"}.get(mode, "L")
    first, *rest = (grey.rotate(5 * n).convert(through).convert(mode) for n in range(frames))
    first.save(written, file_format, **({"save_all": True, "append_images": rest} if rest else {}))
    return written.getvalue()
