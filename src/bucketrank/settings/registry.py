"""The known losses and detectors: built in, from installed packages, or registered at run time.

Another package adds its own by entry points that name a specification::

    [project.entry-points."bucketrank.losses"]
    ranknet = "my_package.ranknet:SPEC"
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Generic, TypeVar

from bucketrank.errors import require_choice, short_repr
from bucketrank.settings.detector_specs import BUILT_IN_DETECTORS, DetectorSettings, DetectorSpec
from bucketrank.settings.fields import describe
from bucketrank.settings.library_specs import LIBRARIES, LibrarySpec
from bucketrank.settings.loss_specs import BUILT_IN_LOSSES, LossSettings, LossSpec

AnySpec = TypeVar("AnySpec", LossSpec, DetectorSpec)


class Registry(Generic[AnySpec]):
    """Specifications by name. Entry points are read at the first look-up, not at import."""

    def __init__(
        self, noun: str, group: str, spec: type[AnySpec], settings: type, built_in: tuple[AnySpec, ...]
    ) -> None:
        self.noun, self.group, self._settings = noun, group, settings
        self._spec: type[AnySpec] = spec
        self._specs: dict[str, AnySpec] = {each.name: each for each in built_in}
        self._entry_points_read = False

    def register(self, spec: AnySpec, *, replace: bool = False) -> None:
        """Add a specification."""
        self._read_entry_points()
        self._add(spec, replace=replace)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Undo every registration made inside the ``with``, for tests."""
        before = dict(self.all())
        try:
            yield
        finally:
            self._specs = before

    def get(self, name: str, *, setting: str) -> AnySpec:
        """Look up a specification by its name. ValueError names ``setting`` and suggests the nearest name."""
        try:
            require_choice(setting, name, self.all())
        except ValueError as error:
            raise ValueError(f"{error}; register_{self.noun} adds others") from None
        return self._specs[name]

    def all(self) -> Mapping[str, AnySpec]:
        """Return all specifications by name."""
        self._read_entry_points()
        return MappingProxyType(self._specs)

    def _add(self, spec: AnySpec, *, replace: bool) -> None:
        if not isinstance(spec, self._spec):
            raise TypeError(f"register_{self.noun}: expected a {self._spec.__name__}, got {type(spec).__name__}")
        if not issubclass(spec.settings, self._settings):
            raise TypeError(
                f"register_{self.noun}: expected settings that subclass {self._settings.__name__}, got {spec.settings}"
            )
        describe(spec.settings)  # every field must have a type and a help text
        if spec.name in self._specs and not replace:
            raise ValueError(
                f"register_{self.noun}: a {self.noun} named {spec.name!r} already exists; choose another name, or pass "
                "replace=True"
            )
        self._specs[spec.name] = spec

    def _read_entry_points(self) -> None:
        if self._entry_points_read:
            return
        self._entry_points_read = True
        for entry_point in entry_points(group=self.group):
            self._add_entry_point(entry_point)

    def _add_entry_point(self, entry_point: EntryPoint) -> None:
        try:
            self._add(entry_point.load(), replace=False)
        except Exception as error:  # noqa: BLE001 (a fault of another package must not stop ours)
            logging.getLogger(__name__).warning(
                "bucketrank leaves out the entry point %s of the group %s: %s: %s",
                entry_point.value,
                self.group,
                type(error).__name__,
                error,
            )


LOSSES = Registry("loss", "bucketrank.losses", LossSpec, LossSettings, BUILT_IN_LOSSES)
DETECTORS = Registry("detector", "bucketrank.detectors", DetectorSpec, DetectorSettings, BUILT_IN_DETECTORS)


def register_loss(spec: LossSpec, *, replace: bool = False) -> None:
    """Register the loss ``spec``, so that ``build``, recipes, flags, training, weights files and reports know it.

    With ``replace``, it replaces a loss of the same name.
    """
    LOSSES.register(spec, replace=replace)


def register_detector(spec: DetectorSpec, *, replace: bool = False) -> None:
    """Register the detector ``spec``, so that ``build``, recipes, flags, training, weights files and reports know it.

    With ``replace``, it replaces a detector of the same name.
    """
    DETECTORS.register(spec, replace=replace)


def losses() -> Mapping[str, LossSpec]:
    """Return the known losses by name.

    >>> list(losses())[:6]
    ['rs', 'ap', 'alrp', 'dr', 'focal', 'ce']
    """
    return LOSSES.all()


def detectors() -> Mapping[str, DetectorSpec]:
    """Return the known detectors by name.

    >>> detectors()["atss"].title
    'ATSS'
    """
    return DETECTORS.all()


def libraries() -> Mapping[str, LibrarySpec]:
    """Return the libraries with detectors, by name.

    >>> list(libraries())
    ['torchvision', 'transformers']
    """
    return MappingProxyType(LIBRARIES)


def loss_spec(name: str) -> LossSpec:
    """Look up the loss ``name``. ValueError suggests the nearest name."""
    return LOSSES.get(name, setting="loss.name")


def detector_spec(name: str) -> DetectorSpec:
    """Look up the detector ``name``, or its library. ValueError suggests the nearest name.

    >>> detector_spec("torchvision/fcos_resnet50_fpn").name
    'torchvision'
    """
    library, slash, _ = name.partition("/")
    if slash:
        require_choice("detector.name before the slash", library, LIBRARIES)
    elif library not in LIBRARIES:
        return DETECTORS.get(name, setting="detector.name")
    spec = LIBRARIES[library]
    if not slash:
        raise ValueError(
            f"detector.name: expected {library}/MODEL, like {library}/{spec.example}, got {short_repr(name)}"
        )
    return spec


def loss_names(detector: str) -> tuple[str, ...]:
    """Return the losses that ``detector`` can be trained with.

    >>> loss_names("torchvision/fcos_resnet50_fpn")
    ('own', 'rs', 'ap')
    """
    spec = detector_spec(detector)
    if spec.losses is not None:
        return spec.losses
    trainable = (name for name, loss in losses().items() if loss.criterion is not None)
    return tuple(name for name in trainable if name not in spec.excluded_losses)


def loss_settings(name: str = "rs", **settings: object) -> LossSettings:
    """Build the settings of the loss ``name``; ``settings`` are those that differ from the defaults.

    >>> loss_settings("ap", delta=0.25).delta
    0.25
    """
    return loss_spec(name).settings(name=name, **settings)  # type: ignore[arg-type]


def detector_settings(name: str, **settings: object) -> DetectorSettings:
    """Build the settings of the detector ``name``; ``settings`` are those that differ from the defaults.

    >>> detector_settings("atss", channels=64).topk
    9
    """
    return detector_spec(name).settings(name=name, **settings)
