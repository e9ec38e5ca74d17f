"""The scope of a ranking: batch, image or all processes."""

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from bucketrank import alrp_loss, rank_sort_loss
from bucketrank.detectors.criterion.base import ImageScope

from . import distributed_steps
from .small_detectors import scene, small_detector


def rs(logits, targets, _):
    return rank_sort_loss(logits, targets)


def test_the_image_scope_is_the_mean_over_images_with_positives():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 2, generator=generator)
    targets = torch.zeros(9, 2)
    targets[[0, 1, 4], [0, 1, 1]] = torch.tensor([0.9, 0.4, 0.7])  # the third image has no positive
    image_index = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    actual = ImageScope().rank(rs, logits, targets, images=image_index, values=None, parts=False)
    first, second = rank_sort_loss(logits[:3], targets[:3]), rank_sort_loss(logits[3:6], targets[3:6])
    torch.testing.assert_close(torch.stack(actual), (torch.stack(first) + torch.stack(second)) / 2)


def test_one_call_ranks_the_images_of_a_loss_that_takes_sizes():
    generator = torch.Generator().manual_seed(1)
    logits, targets = torch.randn(7, 3, generator=generator), torch.zeros(7, 3)
    targets[[0, 5], [1, 2]] = torch.tensor([0.8, 0.3])  # the second image has no positive
    image_index = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    calls = []

    def rs_of_parts(logits, targets, values, sizes):
        calls.append(sizes)
        return rank_sort_loss(logits, targets, sizes=sizes)

    together = ImageScope().rank(rs_of_parts, logits, targets, images=image_index, values=None, parts=True)
    assert calls == [[6, 9, 6]]
    apart = ImageScope().rank(rs, logits, targets, images=image_index, values=None, parts=False)
    torch.testing.assert_close(torch.stack(together), torch.stack(apart))


def test_the_image_scope_splits_the_values_of_the_positives():
    logits, targets = torch.tensor([[1.0], [0.0], [2.0], [-1.0]]), torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    errors = torch.tensor([0.2, 0.8])

    def alrp(logits, targets, values):
        return alrp_loss(logits, targets, values)

    actual = ImageScope().rank(alrp, logits, targets, images=torch.tensor([0, 0, 1, 1]), values=errors, parts=False)
    parts = [alrp_loss(logits[:2], targets[:2], errors[:1]), alrp_loss(logits[2:], targets[2:], errors[1:])]
    torch.testing.assert_close(torch.stack(actual), torch.stack([torch.stack(part) for part in parts]).mean(0))


@pytest.mark.parametrize("name", ["atss", "faster_rcnn"])
def test_scopes_differ_for_several_images(name):
    images, targets = scene()
    losses = {
        scope: sum(small_detector(name, ranking_scope=scope)(images, targets).values()).item()
        for scope in ("batch", "image", "global")
    }
    assert losses["batch"] != pytest.approx(losses["image"], rel=1e-3)
    assert losses["batch"] == losses["global"]  # one process


@pytest.mark.slow
def test_the_global_scope_does_not_depend_on_how_the_batch_is_split(tmp_path):
    """Compare two processes with one image each, the second without objects, with one process that has both."""
    spawn(distributed_steps.train, args=(str(tmp_path),), nprocs=2)
    for name, loss in distributed_steps.CASES:
        images, targets = distributed_steps.whole_batch()
        model = distributed_steps.model(name, loss)
        losses = model(images, targets)
        sum(losses.values()).backward()
        for rank in range(2):
            saved = torch.load(tmp_path / f"{name}-{loss}-{rank}.pt")
            torch.testing.assert_close(saved["losses"], losses, rtol=1e-5, atol=1e-6)
            gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
            torch.testing.assert_close(saved["gradients"], gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_published_baselines_divide_by_counts_averaged_over_processes(tmp_path):
    """Two processes with three objects and one: the gradient is that of one process with both images."""
    spawn(distributed_steps.train_averaged, args=(str(tmp_path),), nprocs=2)
    images, targets = scene((3, 0, 1))
    for name, loss in distributed_steps.AVERAGED:
        model = distributed_steps.averaged_model(name, loss)
        sum(model([images[0], images[2]], [targets[0], targets[2]]).values()).backward()
        saved = torch.load(tmp_path / f"{name}-{loss}-0.pt")
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        torch.testing.assert_close(saved, gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_batch_scope_trains_under_distributed_data_parallel(tmp_path):
    """The two processes end with the same weights, although one of them has no objects."""
    spawn(distributed_steps.train_alone, args=(str(tmp_path),), nprocs=2)
    for name in distributed_steps.EVERY_DETECTOR:
        first, second = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2))
        torch.testing.assert_close(first, second, rtol=0, atol=0)
