"""Inputs and checks that the tests of the backbone share."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Module = TypeVar("Module", bound=nn.Module)


def randomise_constants(model: Module) -> Module:
    """Randomise tensors that start as ones or zeros, which would hide mistakes and stop gradients; return the model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.eq(parameter.flatten()[0]).all() and "predictor" not in name:
                parameter.uniform_(0.5, 1.5)
        for part in model.modules():
            if isinstance(part, _BatchNorm) and part.running_mean is not None and part.running_var is not None:
                part.running_mean.normal_(std=0.1)
                part.running_var.uniform_(0.5, 1.5)
    return model


def random_images(height: int = 64, width: int = 96, count: int = 1) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))


def random_sum(maps: list[Tensor]) -> Tensor:
    """Return a number whose gradient reaches every cell; the gradient of a plain sum vanishes in a layer norm."""
    generator = torch.Generator().manual_seed(2)
    return torch.stack([(m * torch.randn(m.shape, generator=generator)).mean() for m in maps]).sum()


def assert_identical(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def with_gradient(backbone: nn.Module) -> set[str]:
    """Return the names of the parameters that have a gradient."""
    return {name for name, parameter in backbone.named_parameters() if parameter.grad is not None}


def trainable(backbone: nn.Module) -> set[str]:
    """Return the names of the parameters that are trained."""
    return {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}


def norms_in_training(backbone: nn.Module) -> set[str]:
    """Return the names of the batch norms in training mode."""
    return {name for name, part in backbone.named_modules() if isinstance(part, _BatchNorm) and part.training}
