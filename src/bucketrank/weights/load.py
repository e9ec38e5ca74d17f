"""Build a detector from a weights file, or start one from the weights of an earlier run or of torchvision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from bucketrank.detectors import Detector, build
from bucketrank.errors import OutOfMemoryError, RecipeError, WeightsError, first_line, is_out_of_memory
from bucketrank.evaluation.calibration.mapping import fold, fold_softmax
from bucketrank.settings import Recipe, detector_spec, from_dict
from bucketrank.settings.library_specs import TransformersSettings
from bucketrank.weights.class_rows import ClassMatch, renamed_rows
from bucketrank.weights.files import Meta, find_weights, read_weights
from bucketrank.weights.torchvision import load_from_torchvision

SPARE_ELEMENTS = 2**26  # parameters that building may allocate beyond the file's, such as a dropped classifier
TORCHVISION, PUBLISHED = "torchvision:", "mmdet:"
# Exceptions that detector parts, timm and transformers raise for invalid settings, and those of short memory.
UNBUILDABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


def load_model(path: Path | str) -> tuple[Detector, Meta]:
    """Load the detector of a weights file, in evaluation mode on the CPU, and the description in the file.

    ``path`` is a weights file, a run folder, a ``save_pretrained`` folder, or a hub repository like ``"owner/name"``.
    An existing file or folder of that name takes precedence.
    """
    path = find_weights(path)
    state, meta = read_weights(path)
    broken = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise WeightsError(f"{path}: {broken[0]} holds NaN or infinity; the training diverged, or the file is damaged")
    model = _build_stored(path, state, meta, num_classes=len(meta.classes))
    _require_same_dtypes(path, state, model.state_dict())
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = " ".join(str(error).split())
        raise WeightsError(f"{path}: the tensors do not fit the recipe inside: {lines:.400}") from error
    model.stored_threshold, model.stored_classes = meta.threshold, meta.classes
    return model.eval(), meta


def _build_stored(path: Path, state: Mapping[str, Tensor], meta: Meta, *, num_classes: int) -> Detector:
    """Build the detector that a weights file describes; raise WeightsError if that is not possible."""
    try:
        recipe = from_dict(meta.recipe, source=str(path))
    except RecipeError as error:
        raise WeightsError(str(error)) from error
    _require_stored_config(path, recipe)
    try:
        with parameters_limited_by(state):
            return build_detector(without_weights(recipe), num_classes=num_classes)
    except UNBUILDABLE as error:
        reason = f"{first_line(error):.200}"
        if not is_out_of_memory(error):
            raise WeightsError(f"{path}: the recipe inside does not build a detector: {reason}") from error
        raise OutOfMemoryError(
            f"{path}: expected enough memory for the detector, got too little ({reason}); close other programs or use "
            "a machine with more memory"
        ) from error


def _require_stored_config(path: Path, recipe: Recipe) -> None:
    """Raise WeightsError for a transformers model without its configuration.

    Otherwise its name, which the file's author chose, would be looked up as a folder or on the hub.
    """
    if isinstance(recipe.detector, TransformersSettings) and recipe.detector.config is None:
        raise WeightsError(
            f"{path}: detector.config: expected the configuration of {recipe.detector.name} in the recipe inside, got "
            "none; use the weights.safetensors that bucketrank train wrote"
        )


def _require_same_dtypes(path: Path | str, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise WeightsError if a tensor is floating-point and should not be, or the other way round.

    Torch would convert it: complex numbers with a warning, floats to whole numbers without one.
    """
    for name, tensor in state.items():
        if name in expected and tensor.is_floating_point() != expected[name].is_floating_point():
            dtypes = f"expected {expected[name].dtype}, got {tensor.dtype}"
            raise WeightsError(f"{path}: {name}: {dtypes}; the file is damaged or was changed by another program")


@contextmanager
def parameters_limited_by(state: Mapping[str, Tensor]) -> Iterator[None]:
    """Cap the parameters allocated, so that a tiny file with the tensors ``state`` cannot request a huge model."""
    left = 4 * sum(tensor.numel() for tensor in state.values()) + SPARE_ELEMENTS

    def count(_module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter | None) -> None:
        nonlocal left
        left -= 0 if parameter is None else parameter.numel()
        if left < 0:
            raise ValueError("it has many more parameters than the file")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def build_detector(recipe: Recipe, *, num_classes: int) -> Detector:
    """Build the detector of ``recipe`` for ``num_classes`` classes of objects."""
    backbone = recipe.backbone if detector_spec(recipe.detector.name).backbone else None
    return build(recipe.detector, num_classes=num_classes, backbone=backbone, loss=recipe.loss, inputs=recipe.inputs)


def without_weights(recipe: Recipe) -> Recipe:
    """Remove the weights that a recipe names, for a detector whose weights come from elsewhere.

    The frozen layers depend on whether the recipe names weights, so they are set explicitly.
    """
    backbone = recipe.backbone
    if backbone.weights is not None:
        backbone = replace(
            backbone,
            weights=None,
            frozen_stages=1 if backbone.frozen_stages is None else backbone.frozen_stages,
            batch_norm="frozen" if backbone.batch_norm == "auto" else backbone.batch_norm,
        )
    return replace(recipe, backbone=backbone, detector=recipe.detector.without_weights())


def load_matching_weights(
    model: Detector,
    path: str,
    *,
    classes: Sequence[str] | None = None,
    tell: Callable[[str], object] = lambda text: None,
) -> list[str]:
    """Load every tensor of a weights file whose name and shape match; return the names of the unchanged tensors.

    The calibration in the file is undone, so that training starts from the logits of the earlier run. ``classes`` are
    the model's class names. If the file has others, or another order, class layers take the rows of the shared names,
    the other classes keep their values, and ``tell`` gets one line with the names of both.
    """
    file = find_weights(path)
    state, meta = _trained_state(file)
    own = model.state_dict()
    _require_same_dtypes(path, state, own)
    matching = {name: tensor for name, tensor in state.items() if name in own and own[name].shape == tensor.shape}
    if classes is not None and list(classes) != meta.classes:
        match = ClassMatch(meta.classes, classes)
        larger = _shapes_with_one_more_class(file, state, meta)
        background_first = bool(getattr(model, "first_label", 0))
        rows = renamed_rows(state, own, larger, match, background_first=background_first)
        matching = {name: tensor for name, tensor in matching.items() if name not in rows}
        matching |= {name: tensor for name, tensor in rows.items() if tensor is not None}
        tell(str(match))
    missing = [name for name in own if name.startswith(model.backbone_prefix) and name not in matching]
    if missing:
        raise WeightsError(
            f"{path}: {len(missing)} backbone tensors are missing or have another shape, like {missing[0]}; "
            "init needs a run with the same backbone"
        )
    model.load_state_dict(matching, strict=False)
    return [name for name in own if name not in matching]


def _shapes_with_one_more_class(path: Path, state: Mapping[str, Tensor], meta: Meta) -> dict[str, torch.Size]:
    """Return the tensor shapes of a file's detector with one more class, which show where the class rows are."""
    with torch.random.fork_rng(devices=[]):  # building draws random numbers, which must not change the run
        larger = _build_stored(path, state, meta, num_classes=len(meta.classes) + 1)
    return {name: tensor.shape for name, tensor in larger.state_dict().items()}


def _trained_state(path: Path) -> tuple[Mapping[str, Tensor], Meta]:
    """Read the tensors of a weights file as they were before its calibration, and the description in the file.

    The file's own detector says which layers were calibrated; a detector with another loss may score differently.
    """
    state, meta = read_weights(path)
    if meta.calibration is None:
        return state, meta
    with torch.random.fork_rng(devices=[]):  # building draws random numbers, which must not change the run
        model, _ = load_model(path)
    try:
        inverse = meta.calibration.score_map.inverse
        if meta.calibration.method == "platt":
            fold(model.score_head(), inverse)
        else:
            fold_softmax(model.score_head(), inverse.a[0], inverse.b[0])
    except ValueError as error:
        raise WeightsError(f"{path}: the calibration inside does not fit the detector: {error}") from error
    return model.state_dict(), meta


def load_initial_weights(
    model: Detector,
    init: str,
    *,
    classes: Sequence[str] | None = None,
    tell: Callable[[str], object] = lambda text: None,
) -> list[str]:
    """Load the weights that ``init`` names; return the names of the unchanged tensors.

    ``init`` is a weights file of an earlier run, ``torchvision:MODEL`` for torchvision's COCO weights,
    ``torchvision:FILE.safetensors`` for a torchvision state dict, or ``mmdet:FILE.pth`` for an MMDetection checkpoint.
    ``classes`` are the model's class names. ``tell`` gets a line about the classes kept from an earlier run.
    """
    if init.startswith(TORCHVISION):
        return load_from_torchvision(model, init.removeprefix(TORCHVISION), classes=classes)
    if init.startswith(PUBLISHED):
        from bucketrank.weights.published import load_published  # imports this package

        return load_published(model, init.removeprefix(PUBLISHED), classes=classes)
    return load_matching_weights(model, init, classes=classes, tell=tell)
