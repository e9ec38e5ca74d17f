"""From a softmax with background to a sigmoid for each class, keeping the classifier's weights."""

from __future__ import annotations

import torch
from torch import Tensor


def log_odds(logits: Tensor) -> Tensor:
    """The log-odds of the softmax: ``s_c = z_c - log sum_{k != c} exp z_k``, so that ``sigmoid(s) = softmax(z)``.

    In O(C) and without loss of digits: where p <= 1/2 it is ``log p - log(1 - p)``; only the largest class of a row
    can lie above, and gets its sum over the others.

    >>> z = torch.tensor([[1.0, 2.0, 40.0]])
    >>> log_odds(z)  # the last: 40 - log(e^1 + e^2)
    tensor([[-39.0000, -38.0000,  37.6867]])
    """
    logits = logits.float()
    top = logits.argmax(-1, keepdim=True)
    is_top = torch.arange(logits.shape[-1], device=logits.device) == top
    others = logits.masked_fill(is_top, float("-inf")).logsumexp(-1, keepdim=True)
    below = logits.log_softmax(-1).masked_fill(is_top, -1.0)  # any number whose gradient is finite: not used
    return torch.where(is_top, logits - others, below - torch.log1p(-below.exp()))
