"""Upper bounds of what the loss side of a training step costs a GPU, besides the ranking losses themselves."""

import pytest
import torch

from .loss_side_counts import PAIRS, Counting, _Operations, _Reads, count

# Launches forward and backward, waits, and copies from the host, for two images. PAA's launches depend on the number
# of iterations of its mixtures.
BOUNDS = {
    ("atss", "rs"): (310, 2, 1),
    ("atss", "focal"): (340, 2, 1),
    ("paa", "rs"): (860, 6, 1),
    ("paa", "focal"): (900, 6, 1),
    ("retinanet", "rs"): (320, 2, 1),
    ("retinanet", "focal"): (230, 2, 1),
    ("faster_rcnn", "rs"): (650, 4, 1),
    ("faster_rcnn", "ce"): (470, 12, 1),
    ("mask_rcnn", "rs"): (740, 5, 1),
    ("mask_rcnn", "ce"): (530, 13, 1),
    ("cascade_rcnn", "rs"): (1270, 8, 1),
    ("cascade_rcnn", "ce"): (910, 30, 1),
    ("co_detr", "rs"): (2800, 8, 8),
    ("co_detr", "focal"): (2660, 26, 8),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "loss"), PAIRS)
def test_bounds(name, loss):
    counts = count(name, loss, backward=True, ranking=False)
    launches, waits, copies = BOUNDS[name, loss]
    assert counts.launches.total() <= launches, counts.launches
    assert counts.waits.total() <= waits, counts.waits
    assert counts.copies <= copies


def test_backward_makes_no_wait():
    """A boolean mask would wait again in the backward pass."""
    forward, both = (count("atss", "rs", backward=backward, ranking=False) for backward in (False, True))
    assert forward.waits == both.waits
    assert forward.launches.total() < both.launches.total()


def test_every_kind_of_wait_is_counted():
    counting, values = Counting(), torch.arange(3.0)
    with _Reads(counting), _Operations(counting):
        values[values > 1] += 1  # waits twice
        torch.where(values > 1)  # waits
        values.sum().item()  # waits
        values.tolist()  # waits
        values[torch.tensor([0])]  # one copy
        with counting.paused():
            values.max().item()
    assert counting.counts.waits.total() == 5
    assert counting.counts.copies == 1
