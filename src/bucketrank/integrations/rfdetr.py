"""Train the models of the package rfdetr with a ranking loss: one call before ``model.train``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from bucketrank.integrations import set_criterion
from bucketrank.integrations.ranking_loss import LossName, RankingLoss
from bucketrank.settings.choices import Method

Model = TypeVar("Model")
MODULE = "RFDETRModelModule"  # the Lightning module that ``model.train`` builds, with the criterion


def use_ranking_loss(
    model: Model,
    *,
    loss: LossName = "rs",
    method: Method = "exact",
    delta: float | None = None,
    box_weight: float | None = None,
) -> Model:
    """Let ``model.train`` use a ranking loss; change the model in place and return it.

    ``model`` is a detector of rfdetr, like ``RFDETRNano()``. Everything else about ``train`` stays: its arguments,
    checkpoints and callbacks, and ``predict`` afterwards. Call this again before you resume a run. The other arguments
    are those of :func:`~bucketrank.integrations.set_criterion.use_ranking_loss`.
    """
    settings = asdict(RankingLoss(loss, method, delta, box_weight))  # raises now if an argument is wrong
    own_train = _own_train("use_ranking_loss", model)

    @functools.wraps(own_train)
    def train(**arguments: Any) -> Any:
        with _ranking_modules(settings):
            return own_train(**arguments)

    vars(model)["train"] = train
    return model


def undo(model: Model) -> Model:
    """Let the ``train`` of ``model`` use its own loss again; return the model, or raise ValueError if it has that."""
    _own_train("undo", model)
    if "train" not in vars(model):
        raise ValueError(
            "undo: expected a model with a ranking loss, got one with its own; call use_ranking_loss first"
        )
    del vars(model)["train"]
    return model


def _own_train(caller: str, model: Any) -> Callable[..., Any]:
    """Return the ``train`` method of the model's class; TypeError if it is not one of a supported rfdetr."""
    train = getattr(type(model), "train", None)
    names = getattr(getattr(train, "__code__", None), "co_names", ())
    if train is None or MODULE not in names:
        raise TypeError(
            f"{caller}: expected a detector of {set_criterion.RFDETR}, got {type(model).__name__}; for a criterion use "
            "bucketrank.integrations.set_criterion"
        )
    own_train: Callable[..., Any] = train.__get__(model)
    return own_train


@contextmanager
def _ranking_modules(settings: dict[str, Any]) -> Iterator[None]:
    """Build the modules of rfdetr with a ranking loss inside this context."""
    from rfdetr import training

    original = getattr(training, MODULE)

    class RankingModule(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            set_criterion.use_ranking_loss(self.criterion, **settings)

    RankingModule.__name__ = RankingModule.__qualname__ = MODULE
    setattr(training, MODULE, RankingModule)
    try:
        yield
    finally:
        setattr(training, MODULE, original)
