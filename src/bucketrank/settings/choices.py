"""Accepted values and defaults of the ranking losses. Needs no torch."""

from typing import Literal

Method = Literal["exact", "bucketed", "pairwise"]
# aLRP loss has no bucketed form.
ALRPMethod = Literal["exact", "pairwise"]
Backend = Literal["auto", "fused", "torch", "triton"]
Reduction = Literal["mean", "none"]

# Two logits closer than delta count as partly tied. Keys are loss names; the defaults are those of the papers.
DEFAULT_DELTAS = {"ap": 1.0, "rs": 0.5, "alrp": 1.0}
