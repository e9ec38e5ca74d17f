"""Checks of the image files against their entries in the annotations."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from bucketrank.data.annotations import Split
from bucketrank.data.image_files import is_turned, open_image, read_image
from bucketrank.data.problems import DataError, Problem

Entry = dict[str, Any]


def check_files(
    split: Split,
    images: list[Entry],
    *,
    pixels: bool,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Return the problems of the image files, checked on ``workers`` threads (default: one per CPU core)."""
    problems: list[Problem] = []
    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1)
    try:
        checked = pool.map(lambda image: check_file(split, image, pixels=pixels), images)
        for done, own in enumerate(checked, start=1):
            problems += own
            if progress is not None:
                progress(done, len(images))
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        raise DataError("check-data: too little memory for another thread; lower --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)  # so that Ctrl-C does not wait for the remaining images
    return problems


def check_file(split: Split, image: Entry, *, pixels: bool) -> list[Problem]:
    """Return the problems of one image file, compared with its entry."""
    try:
        path = split.image_path(image)
    except DataError:
        return []  # check_images has reported it
    where = f"image {image['id']}"

    def problem(name: str, message: str, severity: Literal["error", "warning"] = "error") -> list[Problem]:
        return [Problem(str(path), name, where, message.removeprefix(f"{path}: "), severity)]

    try:
        with open_image(path) as opened:
            size, turned = opened.size, is_turned(opened)
        if pixels:
            read_image(path)
    except DataError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        return problem("image-missing" if missing else "image-unreadable", str(error))
    expected = image.get("width"), image.get("height")
    if size == expected:
        if turned:
            text = "EXIF asks to rotate or mirror the image, which is not applied: make sure that the boxes fit the "
            text += "stored pixels, or store the pixels upright and remove the EXIF orientation"
            return problem("image-turned", text, "warning")
        return []
    text = f"the file is {size[0]} x {size[1]}, its entry says {expected[0]} x {expected[1]}"
    if turned and size == expected[::-1]:
        text += "; EXIF asks to rotate it, which is not applied: store the pixels upright"
        return problem("image-size", f"{text} and remove the EXIF orientation")
    return problem("image-size", f"{text}; correct the entry and check that the boxes fit")
