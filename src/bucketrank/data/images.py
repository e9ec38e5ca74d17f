"""Read image files as 8-bit RGB arrays, and turn every Pillow failure into a DataError that names the file."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from bucketrank.errors import DataError

SUFFIXES = frozenset({".bmp", ".jfif", ".jpe", ".jpeg", ".jpg", ".mpo", ".png", ".tif", ".tiff", ".webp"})

# Exceptions that Pillow's decoders raise for broken files, depending on format and version.
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


def read_image(path: Path, *, upright: bool = False) -> Pixels:
    """Read the pixels (H, W, 3) of a file.

    Grey values are repeated, palette colours looked up, 16-bit values divided by 257, and an alpha channel is dropped.
    The EXIF orientation is applied only if ``upright`` is true, because COCO annotations refer to the stored pixels.
    Raises DataError if the file cannot be read.
    """
    return _decode(path, lambda image: rgb8(ImageOps.exif_transpose(image) if upright else image))


def read_stored_values(path: Path) -> NDArray[Any]:
    """Read the values of a file without conversion, (H, W) or (H, W, channels)."""
    return _decode(path, np.asarray)


def _decode(path: Path, read: Callable[[Image.Image], NDArray[Any]]) -> NDArray[Any]:
    with open_image(path) as image:
        try:
            return read(image)
        except BROKEN as error:
            raise DataError(
                f"{path}: the image cannot be decoded ({error}); download or save it again, or remove its entry from "
                "the annotations"
            ) from error


def open_image(path: Path) -> Image.Image:
    """Open an image file and read its header."""
    try:
        special = path.exists() and not path.is_file()  # a folder, or a pipe, on which reading would block
        image = None if special else Image.open(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: the image does not exist; add it or remove its entry from the annotations") from error
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: not an image that Pillow can read; save it as JPEG or PNG") from error
    except BROKEN as error:
        raise DataError(f"{path}: the image cannot be opened ({error}); save it again as JPEG or PNG") from error
    if image is None:
        raise DataError(f"{path}: is not a file; replace it with an image or remove its entry from the annotations")
    if image.format == "EPS":  # a program; Pillow would run it with Ghostscript
        image.close()
        raise DataError(f"{path}: PostScript is not supported; save it as JPEG or PNG")
    return image


def is_turned(image: Image.Image) -> bool:
    """Return whether the EXIF orientation asks to rotate or mirror an image; False for TIFF, which Pillow turns."""
    # Other formats than JPEG may store EXIF after the pixels, which getexif would decode.
    if image.format == "TIFF" or (image.format not in ("JPEG", "MPO") and "exif" not in image.info):
        return False
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
    except BROKEN:
        return False


def rgb8(image: Image.Image) -> Pixels:
    """Convert an image to pixels (H, W, 3) as in ``read_image``; raise ValueError if that is not possible."""
    if image.mode.startswith("I"):  # I;16, I;16B, and I for 16-bit greys in older files
        deep: NDArray[Any] = np.asarray(image).astype(np.int64)
        if deep.min(initial=0) < 0 or deep.max(initial=0) > 65535:
            raise ValueError("more than 16 bits per pixel; convert it to 8 bits")
        grey = ((deep + 128) // 257).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    if image.mode == "F":
        raise ValueError("pixels are floating-point numbers of unknown range; convert it to 8 bits")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns about a direct conversion to RGB
    return np.asarray(image.convert("RGB"))
