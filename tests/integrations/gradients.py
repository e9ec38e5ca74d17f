"""The gradient of a leaf tensor, typed."""

from torch import Tensor


def gradient_of(value: Tensor) -> Tensor:
    """Return the gradient, which must exist."""
    assert value.grad is not None
    return value.grad
