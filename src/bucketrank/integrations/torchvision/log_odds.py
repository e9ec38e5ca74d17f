"""Log-odds of a softmax classifier: one sigmoid logit per class, without changing the classifier's weights."""

from __future__ import annotations

import torch
from torch import Tensor


def log_odds(logits: Tensor) -> Tensor:
    """Return the log-odds of the softmax, ``s_c = z_c - log sum_{k != c} exp z_k``: ``sigmoid(s) = softmax(z)``.

    The cost is O(C) per row. Both branches avoid cancellation: a probability p of at most 1/2 gives
    ``log p - log(1 - p)``. Only the largest logit of a row can have p above 1/2, and its sum over the other classes
    is computed explicitly.

    >>> z = torch.tensor([[1.0, 2.0, 40.0]])
    >>> log_odds(z)  # the last: 40 - log(e^1 + e^2)
    tensor([[-39.0000, -38.0000,  37.6867]])
    """
    logits = logits.float()
    top = logits.argmax(-1, keepdim=True)
    is_top = torch.arange(logits.shape[-1], device=logits.device) == top
    others = logits.masked_fill(is_top, float("-inf")).logsumexp(-1, keepdim=True)
    log_p = logits.log_softmax(-1).masked_fill(is_top, -1.0)  # a dummy with a finite gradient: `where` discards it
    return torch.where(is_top, logits - others, log_p - torch.log1p(-log_p.exp()))
