"""Take the class rows of a trained detector by class name, for a detector of other classes.

Which tensors have rows for classes is found by comparing the shapes of the same detector with one more class, so this
works for every detector, with its box, mask and auxiliary heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Size, Tensor

from bucketrank.data.problems import listed
from bucketrank.errors import printable

BOX_LAYER = re.compile(r"(?:^|\.)(?:boxes|bbox_pred)\.(?:weight|bias)$")  # the rows of a class are next to each other
MAX_NAMED = 8  # class names in a message


@dataclass(frozen=True)
class ClassRows:
    """The rows of a tensor as (groups, classes + extra, per class); ``first`` is the column of the first class.

    A classifier has one group per anchor, and one row per class in it. A box layer has one group and four rows per
    class. An extra column is the background's.
    """

    groups: int
    per_class: int
    extra: int
    first: int

    @classmethod
    def of(cls, name: str, shape: Size, larger: Size, *, num_classes: int, background_first: bool) -> ClassRows | None:
        """Describe the tensor ``name``, which has ``larger`` shape with one more class; None if it has no such rows."""
        per_class = larger[0] - shape[0] if shape and larger[1:] == shape[1:] else 0
        if per_class < 1 or shape[0] % per_class:
            return None
        extra = shape[0] // per_class - num_classes
        if extra not in (0, 1):
            return None
        is_box = BOX_LAYER.search(name) is not None
        return cls(
            groups=1 if is_box else per_class,
            per_class=per_class if is_box else 1,
            extra=extra,
            first=int(extra == 1 and background_first),
        )

    def taken(self, trained: Tensor, own: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor | None:
        """Return ``own`` with the rows of ``trained``: the background's, and for each pair (from, to) a class's.

        None if the tensors have other rows, as with another loss.
        """
        unit = self.groups * self.per_class
        if own.dim() == 0 or own.shape[1:] != trained.shape[1:] or own.shape[0] % unit:
            return None
        source, result = (self._columns(each) for each in (trained, own.clone()))
        if self.extra:
            place = 0 if self.first else -1
            result[:, place] = source[:, place]
        for old, new in pairs:
            result[:, self.first + new] = source[:, self.first + old]
        return result.reshape(own.shape)

    def _columns(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.groups, -1, self.per_class, *tensor.shape[1:])


@dataclass(frozen=True)
class ClassMatch:
    """The classes that a trained detector shares with a new one."""

    trained: Sequence[str]
    new: Sequence[str]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The index of each shared class in both."""
        return [(self.trained.index(name), number) for number, name in enumerate(self.new) if name in self.trained]

    def __str__(self) -> str:
        kept = [name for name in self.new if name in self.trained]
        others = [name for name in self.new if name not in self.trained]
        kept_names, new_names = (printable(listed(names, MAX_NAMED)) or "none" for names in (kept, others))
        return f"init: classes kept by name: {kept_names}; new: {new_names}"


def renamed_rows(
    trained: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    larger: Mapping[str, Size],
    match: ClassMatch,
    *,
    background_first: bool,
) -> dict[str, Tensor | None]:
    """Return the tensors with class rows, with the rows of the shared classes; None where nothing can be taken.

    New classes keep the values in ``own``. ``larger`` are the shapes of the trained detector with one more class.
    """
    rows: dict[str, Tensor | None] = {}
    for name, tensor in trained.items():
        if name not in own or name not in larger or larger[name] == tensor.shape:
            continue
        layout = ClassRows.of(
            name, tensor.shape, larger[name], num_classes=len(match.trained), background_first=background_first
        )
        new_rows = 0 if layout is None else layout.groups * layout.per_class * (len(match.new) + layout.extra)
        fits = layout is not None and match.pairs and own[name].shape[:1] == (new_rows,)
        rows[name] = layout.taken(tensor, own[name], match.pairs) if layout is not None and fits else None
    return rows
