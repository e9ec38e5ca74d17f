"""Write a converted data set: the folder images/ and one annotation file per split."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucketrank.data.annotations import Document
from bucketrank.data.labels import DocumentBuilder
from bucketrank.errors import DataError

UNFINISHED = ".converting-"  # prefix of the hidden folder name; the process id follows


@dataclass(frozen=True)
class Written:
    """A written annotation file with its counts of images, objects and crowds."""

    annotations: Path
    images: int
    objects: int
    crowds: int


class Writer(DocumentBuilder):
    """Collects the images and objects of one split after another; ``write`` ends a split.

    Use it in a ``with`` block. Files are written to a hidden folder inside ``folder`` and moved to their places at the
    end of the block. If the block raises, nothing is left. If the process is killed, only the hidden folder is left;
    the next conversion removes it. Images must lie in ``source``; with ``follow_links`` they may be links to other
    places, as in a converted data set.
    """

    def __init__(
        self, source: Path, folder: Path, *, categories: dict[int, str], copy: bool, follow_links: bool = False
    ) -> None:
        if not source.is_dir():
            raise DataError(f"{source}: the folder does not exist; give the folder to convert")
        if folder.exists() and not (folder.is_dir() and all(map(_is_abandoned, folder.iterdir()))):
            raise DataError(f"{folder}: already exists and is not empty; give a new folder to write to")
        super().__init__(source, categories=categories, follow_links=follow_links)
        self.folder = folder
        self.unfinished = folder / f"{UNFINISHED}{os.getpid()}"
        self.copy = copy

    def __enter__(self) -> Writer:
        self._created = [each for each in (self.folder, *self.folder.parents) if not each.exists()]
        if not self._created:
            for leftover in self.folder.iterdir():
                shutil.rmtree(leftover)
        self.unfinished.mkdir(parents=True)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            # Annotation files come last: the folder is a data set only once they exist.
            for path in sorted(self.unfinished.iterdir(), key=Path.is_file):
                path.rename(self.folder / path.name)
            self.unfinished.rmdir()
        else:
            shutil.rmtree(self.unfinished, ignore_errors=True)
            with suppress(OSError):  # another process may use a folder by now
                for folder in self._created:
                    folder.rmdir()

    def add_image(self, path: Path, *, upright: bool = False) -> tuple[int, int, int]:
        """Add an image, and link or copy it to the same relative path."""
        added = super().add_image(path, upright=upright)
        self._place(self.images[-1]["file_name"])
        return added

    def copy_image(self, path: Path, objects: Sequence[Mapping[str, Any]]) -> None:
        """Add an image with its annotations in COCO format, which get new ids."""
        image_id, _, _ = self.add_image(path)
        for entry in objects:
            self.add_object(
                image_id,
                entry["category_id"],
                box=entry["bbox"],
                area=entry.get("area"),
                crowd=bool(entry.get("iscrowd")),
                segmentation=entry.get("segmentation"),
            )

    def write_document(self, split: str, document: Document) -> Written:
        """Write a split that is read already, with its images."""
        self.images, self.annotations = document["images"], document["annotations"]
        for image in self.images:
            self._place(image["file_name"])
        return self.write(split)

    def write(self, split: str) -> Written:
        """Write the collected annotations to ``split``.json and start the next split."""
        (self.unfinished / f"{split}.json").write_text(json.dumps(self.document()), encoding="utf-8")
        crowds = sum(entry["iscrowd"] for entry in self.annotations)
        written = Written(self.folder / f"{split}.json", len(self.images), len(self.annotations) - crowds, crowds)
        self.images, self.annotations = [], []
        return written

    def _place(self, name: str) -> None:
        places = self.unfinished / "images" / name, self.folder / "images" / name
        link_or_copy(self.source / name, places[0], final=places[1], copy=self.copy)


def link_or_copy(source: Path, destination: Path, *, final: Path, copy: bool) -> None:
    """Link to the file; copy it if ``copy`` is true or the system does not support links.

    A relative link is written for its ``final`` path, to which the destination is moved later.
    """
    if destination.is_symlink() or destination.exists():
        return  # the image is in two splits
    destination.parent.mkdir(parents=True, exist_ok=True)
    if not copy:
        try:
            destination.symlink_to(os.path.relpath(source.resolve(), final.parent.resolve()))
        except OSError:
            pass
        else:
            return
    shutil.copyfile(source, destination)


def _is_abandoned(path: Path) -> bool:
    """Return whether the path is the hidden folder of a process that no longer runs."""
    number = path.name.removeprefix(UNFINISHED)
    if number == path.name or not number.isdecimal() or path.is_symlink() or not path.is_dir():
        return False
    if int(number) == os.getpid():
        return True
    if os.name != "posix":
        return False
    try:
        os.kill(int(number), 0)  # sends no signal
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False
