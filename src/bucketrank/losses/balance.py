"""Self-balancing: weights computed from the values of the losses, not tuned ("self-balancing"; Oksuz et al., 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def self_balance(loss: Tensor, to: Tensor) -> Tensor:
    """Scale ``loss`` and its gradient so that its value becomes that of ``to``, which gets no gradient.

    A ``loss`` of 0 is returned unchanged, with its own gradient.

    Args:
        loss: a tensor with one value.
        to: a tensor with the value that the loss is scaled to.

    >>> box = torch.tensor(0.5, requires_grad=True)
    >>> balanced = self_balance(box * 2, to=torch.tensor(3.0))
    >>> balanced.backward()
    >>> balanced.item(), box.grad.item()  # scaled by 3 / 1
    (3.0, 6.0)
    """
    for argument, value in (("loss", loss), ("to", to)):
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"self_balance: expected {argument} to be a tensor with one value, got {got}")
    value = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))  # a ratio may exceed the range of float16
    scale = torch.where(value == 0, 1, to.detach() / torch.where(value == 0, 1, value))
    return loss * scale
