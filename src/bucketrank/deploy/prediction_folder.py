"""The folder that predictions are written to: which files it may replace, and the names of the drawn images."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from PIL import Image

from bucketrank.data.image_files import BROKEN, SUFFIXES
from bucketrank.data.problems import DataError
from bucketrank.model_files.atomic import MAX_NAME_BYTES, TEMPORARY, shortened, write

JSON_NAME = "predictions.json"
IMAGE_FOLDER = "pictures"
DESCRIPTION = "detections by bucketrank predict"  # in predictions.json, and as the comment of every drawn JPEG file
JPEG_QUALITY = 92
LONGEST_JPEG_SIDE = 65_500  # pixels; the encoder refuses more


def find_images(sources: Iterable[Path], *, skip: Path) -> list[tuple[Path, str]]:
    """Return the image files among ``sources`` and below its folders, each with the name to report it by.

    The name is the path relative to the folder among ``sources`` or, if there are several sources, to the folder that
    contains them all. No two files have the same name. Each file is listed once. Files in ``skip``, the folder to write
    to, are not listed. Raise DataError if a source does not exist.
    """
    skipped = skip.resolve()
    sources = list(sources)
    for source in sources:
        if not source.exists():
            raise DataError(
                f"{source}: expected an image or a folder of images, got no such file or folder; correct the path"
            )
    bases = [os.path.abspath(source if source.is_dir() else source.parent) for source in sources]  # noqa: PTH100
    base = os.path.commonpath(bases) if bases else ""
    files: dict[Path, tuple[Path, str]] = {}
    for source in sources:
        if source.is_dir():
            paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        else:
            paths = [source]
        for path in paths:
            resolved = path.resolve()
            if not resolved.is_relative_to(skipped):
                files.setdefault(resolved, (path, Path(os.path.relpath(path, base)).as_posix()))
    return list(files.values())


def drawn_names(names: Sequence[str]) -> list[str]:
    """Return the path of the drawn image of each name: below pictures/, ending in .jpg, all different.

    Names that differ only in upper and lower case count as equal: some file systems do not distinguish them. A name
    that would be too long for a file system is shortened.

    >>> drawn_names(["a/cat.png", "b/cat.png", "a/cat.JPG"])
    ['pictures/a/cat.jpg', 'pictures/b/cat.jpg', 'pictures/a/cat-2.jpg']
    """
    # A folder may be named like a file: cat.jpg/1.png next to cat.png.
    taken = {str(parent).lower() for name in names for parent in PurePosixPath(name).parents}
    drawn = []
    for name in names:
        number = 1
        while (chosen := _drawn_name(name, number)).lower() in taken:
            number += 1
        taken.add(chosen.lower())
        drawn.append(f"{IMAGE_FOLDER}/{chosen}")
    return drawn


def _drawn_name(name: str, number: int) -> str:
    path = PurePosixPath(name)
    suffix = f"{'' if number == 1 else f'-{number}'}.jpg"
    return path.with_name(shortened(path.stem, MAX_NAME_BYTES - len(suffix)) + suffix).as_posix()


def require_replaceable(out: Path, drawn: Iterable[str] = ()) -> None:
    """Raise DataError if a file in ``out`` would be overwritten that ``bucketrank predict`` did not write.

    The folder must be new, be empty, or hold earlier predictions, complete or interrupted. ``drawn`` are the images to
    write, relative to ``out``.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out}: expected a folder, got a file; choose a new folder with --out")
    document = out / JSON_NAME
    if os.path.lexists(document):
        if not _is_our_document(document):
            raise DataError(f"{document}: was not written by bucketrank predict; choose a new folder with --out")
    elif any(path.name != IMAGE_FOLDER and not _is_temporary(path) for path in out.iterdir()) or not all(
        _is_temporary(path) or _is_our_drawing(path) for path in (out / IMAGE_FOLDER).rglob("*") if not path.is_dir()
    ):
        raise DataError(f"{out}: already exists and holds no predictions; choose a new folder with --out")
    for name in drawn:
        if os.path.lexists(out / name) and not _is_our_drawing(out / name):
            raise DataError(f"{out / name}: was not written by bucketrank predict; choose a new folder with --out")


def save_drawing(image: Image.Image, path: Path) -> None:
    """Write a drawn image as JPEG, atomically, with the comment that marks it as ours."""
    if max(image.size) > LONGEST_JPEG_SIDE:
        scale = LONGEST_JPEG_SIDE / max(image.size)
        image = image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))
    # Encoded in memory: Pillow's error about a full disk says only "encoder error -2".
    content = io.BytesIO()
    image.save(content, format="JPEG", quality=JPEG_QUALITY, comment=DESCRIPTION)
    write(path, lambda temporary: temporary.write_bytes(content.getbuffer()))


def _is_our_document(path: Path) -> bool:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return False
    info = document.get("info") if isinstance(document, dict) else None
    return isinstance(info, dict) and info.get("description") == DESCRIPTION


def _is_temporary(path: Path) -> bool:
    """Return whether a file is one that another call is writing, or that a killed call left."""
    match = TEMPORARY.fullmatch(path.name)
    return match is not None and not path.is_symlink()


def _is_our_drawing(path: Path) -> bool:
    if not path.is_file():
        return False
    if not path.is_symlink() and path.stat().st_size == 0:  # what earlier versions left after a crash
        return True
    try:
        with Image.open(path, formats=["JPEG"]) as image:
            return image.info.get("comment") == DESCRIPTION.encode()
    except BROKEN:
        return False
