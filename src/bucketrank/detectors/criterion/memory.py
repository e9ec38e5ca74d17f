"""Score memory: scores of earlier steps that join the rankings of a criterion.

For each input of a criterion (a head has one, a DETR has one per layer) the memory holds up to N positives and up to N
negatives, with their logits and targets. A ranking then covers the list of the step followed by the list of the memory.
The loss is that of the joined list: its mean runs over the positives of both. So a step without positives still moves
its negatives, which the remembered positives rank.

The logits are stored relative to the mean of their step, and the mean of the current step is added to them, with its
gradient. Without this, steps without positives would only push scores down: the positives fall with the negatives, and
below the remembered ones, until the detector finds nothing. With it, the gradients of a step sum to zero, as without a
memory, and all logits may rise or fall together.

After the ranking, the step adds at most N / 4 entries of each kind, and the oldest ones leave. Of the negatives it adds
those with the highest logits, as all others rank below almost every positive. Of more than N / 4 positives it adds a
fixed subset, spread over all candidates. Ignored entries, NaN and Inf are never stored.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Entries of a kind that one step may replace, as a part of the memory.
STEP_PART = 4
# Knuth's multiplicative hash: neighbouring positions get distant numbers.
HASH_FACTOR, HASH_RANGE = 2654435761, 1 << 32


class ScoreQueues(nn.Module):
    """The memory of a criterion with ``inputs`` inputs: ``size`` positives and ``size`` negatives of each.

    It is part of the detector's state, so that a resumed run continues with the same memory. Empty places have target
    -1, which every loss ignores. There is no device sync. Several processes share the memory of the first, whose
    buffers DistributedDataParallel sends to the others.

    >>> memory = ScoreQueues(size=4)
    >>> memory.join(0, torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0.0, 0.7, 0.0]))[1]  # still empty
    tensor([ 0.0000,  0.7000,  0.0000, -1.0000, -1.0000, -1.0000, -1.0000, -1.0000,
            -1.0000, -1.0000, -1.0000])
    >>> memory.targets[0].tolist()  # the positive, then the highest negative
    [[0.699999988079071, -1.0, -1.0, -1.0], [0.0, -1.0, -1.0, -1.0]]
    >>> memory.logits[0].tolist()  # 2 and 3, relative to their step's mean
    [[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    """

    logits: Tensor
    targets: Tensor

    def __init__(self, size: int, inputs: int = 1) -> None:
        super().__init__()
        self.per_step = -(-size // STEP_PART)
        # (input, positives or negatives, place), newest first
        self.register_buffer("logits", torch.zeros(inputs, 2, size))
        self.register_buffer("targets", torch.full((inputs, 2, size), -1.0))

    def join(self, number: int, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Append the memory of input ``number`` to its flattened list; then store the list."""
        logits, targets = logits.flatten(), targets.flatten()
        counted = logits.isfinite() & (targets >= 0)
        mean = torch.where(counted, logits, 0).sum() / counted.sum().clamp(min=1)
        joined = (
            torch.cat([logits, self.logits[number].flatten() + mean]),
            torch.cat([targets, self.targets[number].flatten()]),
        )
        self._store(number, (logits - mean).detach(), targets)
        return joined

    @torch.no_grad()
    def _store(self, number: int, logits: Tensor, targets: Tensor) -> None:
        finite = logits.isfinite() & targets.isfinite()
        position = torch.arange(logits.numel(), device=logits.device)
        spread = (position * HASH_FACTOR % HASH_RANGE).to(logits.dtype)
        for kind, (members, key) in enumerate(((targets > 0, spread), (targets == 0, logits))):
            key = torch.where(finite & members, key, -torch.inf)
            highest, chosen = key.topk(min(self.per_step, key.numel()))
            stored = targets[chosen].masked_fill(highest == -torch.inf, -1)
            all_targets = torch.cat([stored.to(self.targets), self.targets[number, kind]])
            all_logits = torch.cat([logits[chosen].to(self.logits), self.logits[number, kind]])
            # Empty places move to the end, and the newest entries stay.
            kept = (all_targets < 0).to(torch.uint8).argsort(stable=True)[: self.logits.shape[2]]
            self.targets[number, kind] = all_targets[kept]
            # Places that are not filled hold 0: the logit of an ignored entry may be NaN.
            self.logits[number, kind] = all_logits[kept].masked_fill(all_targets[kept] < 0, 0)

    def extra_repr(self) -> str:
        inputs, _, size = self.logits.shape
        return f"size={size}, inputs={inputs}"
