"""Whatever is in the image files: the commands end with a message, never with a traceback."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrank.data import DataError
from bucketrank.data.pictures import opened
from tests.data.folders import sound
from tests.data.fuzz import KINDS, damages, encoded, judged, more, write_folder


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
