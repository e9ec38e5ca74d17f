"""The values that string arguments of the losses accept. Needs no torch."""

from typing import Literal

Method = Literal["exact", "bucketed", "pairwise"]
# aLRP loss has no bucketed form.
ALRPMethod = Literal["exact", "pairwise"]
Backend = Literal["auto", "fused", "torch", "triton"]
Reduction = Literal["mean", "none"]
