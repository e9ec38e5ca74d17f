"""Image files as arrays of RGB, 8 bits."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from bucketrank.data.problems import DataError

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
ORIENTATION = 0x0112  # EXIF's tag

# What Pillow's decoders raise for broken files, according to format and version.
BROKEN = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)

Pixels = NDArray[np.uint8]


def read_picture(path: Path, *, upright: bool = False) -> Pixels:
    """The pixels (H, W, 3) of a file, as stored.

    Grey is repeated, a palette is looked up, 16 bits are divided by 257, an alpha channel is dropped. The orientation
    in EXIF is *not* applied unless asked for by ``upright``: COCO's annotations lie on the pixels as they are stored.
    DataError says what to do about a file that cannot be read.
    """
    return _decoded(path, lambda picture: _rgb8(ImageOps.exif_transpose(picture) if upright else picture))


def read_numbers(path: Path) -> NDArray[Any]:
    """The values in a file as they are stored, (H, W) or (H, W, channels)."""
    return _decoded(path, np.asarray)


def _decoded(path: Path, read: Callable[[Image.Image], NDArray[Any]]) -> NDArray[Any]:
    with opened(path) as picture:
        try:
            return read(picture)
        except BROKEN as error:
            raise DataError(
                f"{path}: the image cannot be decoded ({error}); it may be cut off: download or save it again, or "
                "remove its entry from the annotations"
            ) from error


def opened(path: Path) -> Image.Image:
    """The file with its header read."""
    try:
        special = path.exists() and not path.is_file()  # a folder; or a pipe, which would be waited for
        picture = None if special else Image.open(path)
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: there is no such image; put it there or remove its entry from the annotations"
        ) from error
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: not an image that Pillow can read; save it as JPEG or PNG") from error
    except BROKEN as error:
        raise DataError(f"{path}: the image cannot be opened ({error}); save it again as JPEG or PNG") from error
    if picture is None:
        raise DataError(f"{path}: is no file; put an image there or remove its entry from the annotations")
    if picture.format == "EPS":  # a program, which Pillow would have Ghostscript run
        picture.close()
        raise DataError(f"{path}: PostScript is not read; save it as JPEG or PNG")
    return picture


def stored_turned(picture: Image.Image) -> bool:
    """Whether viewers that respect EXIF show it with width and height exchanged; JPEG alone is looked at."""
    if picture.format not in ("JPEG", "MPO"):  # in others it may lie behind the pixels
        return False
    try:
        return picture.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
    except BROKEN:
        return False


def _rgb8(picture: Image.Image) -> Pixels:
    if picture.mode.startswith("I"):  # I;16, I;16B, and I for 16-bit greys in older files
        deep: NDArray[Any] = np.asarray(picture).astype(np.int64)
        if deep.min(initial=0) < 0 or deep.max(initial=0) > 65535:
            raise ValueError("more than 16 bits a pixel; convert it to 8 bits")
        grey = ((deep + 128) // 257).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    if picture.mode == "F":
        raise ValueError("pixels are floating-point numbers of unknown range; convert it to 8 bits")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # Pillow warns about the direct way
    return np.asarray(picture.convert("RGB"))
