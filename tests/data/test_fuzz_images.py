"""Damaged and hostile image files: the commands end with a message, never with a traceback."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrank.data.images import open_image
from bucketrank.errors import DataError
from tests.data.fuzz import FORMATS, damages, encoded, judged, more, write_folder
from tests.data.small_folders import sound_document


def judged_with(image: bytes, **entry: int) -> int:
    """Return the exit status of check-data for a folder in which an image file has these bytes."""
    document = sound_document()
    document["images"][0].update(entry)
    with TemporaryDirectory() as name:
        folder = write_folder(Path(name), document)
        (folder / "images/a.png").write_bytes(image)
        return judged(folder)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("file_format", "mode"), FORMATS)
def test_every_mode(file_format: str, mode: str) -> None:
    assert judged_with(encoded(file_format, mode)) == int(mode == "F"), "floats have no known range"


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "TIFF", "WEBP"])
def test_the_first_frame_of_an_animation_is_read(file_format: str) -> None:
    assert judged_with(encoded(file_format, "RGB", frames=3)) == 0


@pytest.mark.slow
@more
@given(st.sampled_from(FORMATS), st.lists(damages, min_size=1, max_size=3))
def test_damaged_images(file: tuple[str, str], broken: list[tuple[Callable[[bytes, int], bytes], int]]) -> None:
    data = encoded(*file)
    for damage, at in broken:
        data = damage(data, at) or b"\0"
    judged_with(data)


def png(width: int, height: int) -> bytes:
    """Return a PNG whose header claims this size, with one row of pixels."""
    chunks = [
        b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0),
        b"IDAT" + zlib.compress(bytes(100)),
        b"IEND",
    ]
    framed = (struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", [(0, 0), (60_000, 60_000), (2**31 - 1, 2**31 - 1), (2**32 - 1, 1), (10_000, 9_000)])
def test_no_memory_is_allocated_for_the_size_in_the_header(size: tuple[int, int]) -> None:
    assert judged_with(png(*size)) == 1
    assert judged_with(png(*size), width=size[0], height=size[1]) == 1


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\nshowpage\n", b"\xff\xd8"]
)
def test_bytes_that_are_not_an_image(data: bytes) -> None:
    assert judged_with(data) == 1


def test_postscript_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\nshowpage\n")
    with pytest.raises(DataError, match="PostScript is not supported"):
        open_image(tmp_path / "a.png")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, sound_document())
    (folder / "images/a.png").unlink()
    os.mkfifo(folder / "images/a.png")
    assert judged(folder) == 1
