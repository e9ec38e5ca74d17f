"""Re-split a data set into training and validation images, stratified by class."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bucketrank.data.annotations import Split, by_image, classes, shuffled
from bucketrank.data.checks import Content, check_pair, require_sound
from bucketrank.data.convert.writer import Writer, Written
from bucketrank.data.layouts import find_splits
from bucketrank.data.problems import raise_errors
from bucketrank.errors import DataError

PARTS = ("train", "val")


def resplit(
    source: Path, folder: Path, *, val: float = 0.2, seed: int = 0, layout: str | None = None, copy: bool = False
) -> list[Written]:
    """Re-split all images of ``source``, stratified by class; write train.json, val.json and images/ to ``folder``.

    Training and validation images of ``source`` are joined first; an image that is in both counts once, and must have
    the same objects. ``stratified_holdout`` then chooses the share ``val`` of them for validation. Images and objects
    get new ids.
    """
    if not 0 < val < 1:
        raise DataError(f"val: expected a share above 0 and below 1, got {val:g}")
    splits = _whole(source, layout=layout)
    documents = [split.read() for split in splits]
    if any("frequency" in category for document in documents for category in document["categories"]):
        raise DataError(f"{source}: LVIS has its own splits, which mark absent classes; keep them")
    owners = {split: by_image(document["annotations"]) for split, document in zip(splits, documents, strict=True)}
    by_path: dict[Path, tuple[Split, dict[str, Any]]] = {}
    for split, document in zip(splits, documents, strict=True):
        for image in document["images"]:
            first, same = by_path.setdefault(split.image_path(image).resolve(), (split, image))
            if _objects(owners[first][same["id"]]) != _objects(owners[split][image["id"]]):
                raise DataError(
                    f"{split.image_path(image)}: expected the same objects in {first.name} and {split.name}, got "
                    "others; remove the image from one of them"
                )
    images = list(by_path.values())
    labels = {
        number: [entry["category_id"] for entry in owners[split][image["id"]] if not entry.get("iscrowd")]
        for number, (split, image) in enumerate(images)
    }
    if len(images) < len(PARTS):
        raise DataError(f"{source}: expected at least two images to split, got {len(images)}; add images")
    held_out = stratified_holdout(labels, share=val, seed=seed)
    categories = dict(classes(documents[0]))
    root = source if splits[0].labels is None else splits[0].images  # all images lie below it
    with Writer(root, folder, categories=categories, copy=copy, follow_links=True) as writer:
        written = []
        for part in PARTS:
            for number, (split, image) in enumerate(images):
                if (number in held_out) == (part == "val"):
                    writer.copy_image(split.image_path(image), owners[split][image["id"]])
            written.append(writer.write(part))
    return written


def stratified_holdout(labels: Mapping[int, Sequence[Hashable]], *, share: float, seed: int) -> set[int]:
    """Choose validation images, stratified by class: about ``share`` of all images and of each class's images.

    ``labels`` maps two or more images to the classes of their objects. The class with the fewest remaining images comes
    first. Each of its images goes to the part that lacks more images of this class, so a rare class is in both parts if
    it has at least two images and ``share`` allows it. If that leaves a part short by an image or more, images with the
    classes it lacks most move there. Within a class, the image order depends only on the keys and ``seed``.

    >>> sorted(stratified_holdout({1: ["cat"], 2: ["cat", "dog"], 3: ["dog"], 4: []}, share=0.5, seed=0))
    [1, 3]
    """
    order = shuffled(labels, seed)
    shares = {"train": 1 - share, "val": share}
    counts = Counter(label for own in labels.values() for label in set(own))
    lacking = {part: {label: count * shares[part] for label, count in counts.items()} for part in PARTS}
    places = {part: max(1.0, len(order) * shares[part]) for part in PARTS}
    left: dict[Hashable, list[int]] = defaultdict(list)
    for image in order:
        for label in dict.fromkeys(labels[image]):
            left[label].append(image)
    assigned: dict[int, str] = {}

    def assign(image: int, needs: Mapping[str, float]) -> None:
        part = max(PARTS, key=lambda each: (needs[each], places[each]))
        assigned[image] = part
        places[part] -= 1
        for label in set(labels[image]):
            lacking[part][label] -= 1

    while left:
        rarest = min(left, key=lambda label: (len(left[label]), str(label)))
        for image in left.pop(rarest):
            assign(image, {part: lacking[part][rarest] for part in PARTS})
            for label in set(labels[image]) - {rarest}:
                left[label].remove(image)
                if not left[label]:
                    del left[label]
    for image in order:
        if image not in assigned:  # an image without objects
            assign(image, places)
    # Rounding each class separately may leave a part too small or empty: move images until it lacks less than one.
    while places[part := max(PARTS, key=lambda each: places[each])] >= 1:
        others = [image for image in order if assigned[image] != part]
        image = max(others, key=lambda each: min((lacking[part][label] for label in labels[each]), default=0.0))
        other = assigned[image]
        places[other] += 1
        for label in set(labels[image]):
            lacking[other][label] += 1
        assign(image, {each: float(each == part) for each in PARTS})
    return {image for image, part in assigned.items() if part == "val"}


def _objects(entries: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted((entry["category_id"], *entry["bbox"], bool(entry.get("iscrowd"))) for entry in entries)


def _whole(source: Path, *, layout: str | None) -> list[Split]:
    """Find and check the splits to join: both files of a folder, or its single file as a whole."""
    splits = [split for split in find_splits(source, layout=layout) if split is not None]
    # A single set gives two splits, each of which would read a part of it.
    joined = list(dict.fromkeys(split.whole for split in splits))
    for split in joined:
        require_sound(split, depth="headers")
    if len(joined) == 2:
        raise_errors(check_pair(*map(Content.of, joined)))
    return joined
