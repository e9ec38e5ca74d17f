"""The imports of a run and its compiled kernels, loaded once for all processes that are forked from the importing one.

Otherwise every process of a tiny run spends a third of its time on them.
"""

import matplotlib.backends.backend_agg
import torch

import bucketrank.detectors.atss
import bucketrank.detectors.criterion.ranked
import bucketrank.drawing
import bucketrank.settings.flags
from bucketrank.losses.rankings import Settings, rank_all

from . import strikes

__all__ = ["bucketrank", "matplotlib", "strikes"]


def load_kernels() -> None:
    """Compile or load the kernels of the losses that the runs train, forward and backward.

    Without autograd: on a machine with a GPU it starts threads, and a process with threads cannot be forked.
    """
    logits, targets = torch.tensor([0.0, 1.0, 0.5, -0.5]), torch.tensor([0.3, 0.0, 0.6, 0.0])
    one = torch.ones(())
    for loss, errors in (("rs", None), ("alrp", torch.tensor([0.4, 0.2]))):
        _, prepared = rank_all(logits, targets, errors, Settings(loss, "exact", "auto", 0.5, None, None))
        prepared.backward(one, one)


load_kernels()
