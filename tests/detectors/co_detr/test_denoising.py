"""Contrastive denoising: the noisy copies of objects, who sees them, and their losses."""

from typing import Any

import pytest
import torch
from torchvision.ops import box_convert

from bucketrank.detectors.assignment import NEGATIVE
from bucketrank.detectors.co_detr.decoder import Decoder, Queries
from bucketrank.detectors.co_detr.denoising import DenoisingQueries, attention_mask
from bucketrank.detectors.co_detr.transformer import Geometry, TransformerSettings

SCALES = torch.tensor([[100.0, 80, 100, 80]] * 3)


def objects(*counts):
    """Return boxes in the middle of images of 100 x 80 pixels, which noise does not move beyond the border."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for count in counts:
        corner = torch.rand(count, 2, generator=generator) * 10 + 30
        boxes = torch.cat([corner, corner + 10 + torch.rand(count, 2, generator=generator) * 5], 1)
        found.append({"boxes": boxes, "labels": torch.randint(3, (count,), generator=generator)})
    return found


def noisy(ground_truths, *, limit=10, label_noise=0.0, box_noise=1.0, seed=0):
    torch.manual_seed(seed)
    module = DenoisingQueries(8, 3, limit=limit, label_noise=label_noise, box_noise=box_noise)
    return module, module(ground_truths, SCALES[: len(ground_truths)])


def test_groups_of_a_positive_and_a_negative_copy_of_each_object():
    ground_truths = objects(3, 1, 0)
    module, queries = noisy(ground_truths)
    groups = 10 // 3
    assert queries.groups == groups
    assert queries.content.shape == (3, 2 * 3 * groups, 8)
    assert queries.boxes.shape == (3, 2 * 3 * groups, 4)
    none = [NEGATIVE] * 3
    assert [match.tolist() for match in queries.matches] == [
        [0, 1, 2, *none] * groups,
        [0, NEGATIVE, NEGATIVE, *none] * groups,
        [*none, *none] * groups,
    ]
    first, second, third = (each.unflatten(0, (2 * groups, 3)) for each in queries.content)
    for copy in first:
        torch.testing.assert_close(copy, module.labels(ground_truths[0]["labels"]))
    assert (second[:, 1:] == 0).all()
    assert (third == 0).all()
    torch.testing.assert_close(
        queries.boxes[1].unflatten(0, (2 * groups, 3))[:, 1:], torch.full((2 * groups, 2, 4), 0.5)
    )


@pytest.mark.parametrize(("limit", "count", "groups"), [(100, 7, 14), (100, 101, 1), (1, 1, 1)])
def test_the_number_of_groups(limit, count, groups):
    _, queries = noisy(objects(count), limit=limit)
    assert queries.groups == groups
    assert queries.boxes.shape[1] == 2 * groups * count


def test_a_positive_copy_moves_by_up_to_half_a_side_and_a_negative_one_further():
    ground_truths = objects(3)
    _, queries = noisy(ground_truths, limit=600)
    exact = ground_truths[0]["boxes"] / SCALES[0]
    sides = (exact[:, 2:] - exact[:, :2]).repeat(1, 2)
    corners = box_convert(queries.boxes[0].unflatten(0, (-1, 2, 3)), "cxcywh", "xyxy")
    positive, negative = (((corners[:, kind] - exact) / sides).abs() for kind in (0, 1))
    assert positive.max() <= 0.5 + 1e-4
    assert positive.max() > 0.45
    assert positive.min() < 0.05
    # The corners of a negative copy may change places; the others moved by half a side to a whole one.
    upright = (corners[:, 1, :, 2:] - corners[:, 1, :, :2] > 2e-3).all(-1)
    assert negative[upright].min() >= 0.5 - 1e-4
    assert negative[upright].max() <= 1 + 1e-4
    signs = (corners[:, 0] - exact).sign().mean(0)
    assert signs.abs().max() < 0.3, "both directions are equally likely"


def test_without_noise_the_copies_are_exact():
    ground_truths = objects(2)
    module, queries = noisy(ground_truths, box_noise=0.0)
    exact = box_convert(ground_truths[0]["boxes"] / SCALES[0], "xyxy", "cxcywh")
    torch.testing.assert_close(queries.boxes[0].unflatten(0, (-1, 2)), exact.expand(10, 2, 4), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(queries.content[0, :2], module.labels(ground_truths[0]["labels"]))


def test_a_quarter_of_the_labels_is_drawn_anew():
    torch.manual_seed(0)
    module = DenoisingQueries(8, 50, limit=100, label_noise=0.25, box_noise=1.0)
    labels = torch.full((200, 100), 7)
    drawn = module.noisy_labels(labels)
    assert 0.23 < (drawn != labels).float().mean() < 0.26  # 0.25 x 49 / 50
    assert drawn.unique().tolist() == list(range(50))


def test_a_batch_without_objects_has_no_copies_and_a_gradient_of_zeros():
    module, queries = noisy(objects(0, 0))
    assert queries.content.shape == (2, 0, 8)
    assert [match.tolist() for match in queries.matches] == [[], []]
    queries.content.sum().backward()
    assert module.labels.weight.grad is not None
    assert (module.labels.weight.grad == 0).all()


def test_the_same_seed_draws_the_same_noise():
    first, second, third = (noisy(objects(3), label_noise=0.5, seed=seed)[1] for seed in (1, 1, 2))
    torch.testing.assert_close(first.boxes, second.boxes, rtol=0, atol=0)
    torch.testing.assert_close(first.content, second.content, rtol=0, atol=0)
    assert not torch.equal(first.boxes, third.boxes)


def test_the_mask_by_hand():
    hides = attention_mask(4, 2, groups=2)
    assert hides.int().tolist() == [
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0],
    ]
    assert attention_mask(0, 2, groups=1).int().tolist() == [[0, 0], [0, 0]]


class TestDecoder:
    """What a query of the decoder depends on."""

    def decode(self, *changed: int) -> torch.Tensor:
        """Return the logits (K,) of two groups of two copies and three other queries; some have other content."""
        torch.manual_seed(0)
        settings = TransformerSettings(
            width=32, heads=2, points=2, levels=1, feedforward=16, decoder_layers=2, dino=True
        )
        decoder: Any = Decoder(settings, num_classes=2, score=0.01)
        geometry = Geometry.of([torch.zeros(1, 32, 4, 4)], (32, 32), [(32, 32)])
        content, boxes, memory = torch.randn(1, 7, 32), torch.rand(1, 7, 4) * 0.8 + 0.1, torch.randn(1, 16, 32)
        for query in changed:
            content[0, query] += 1 + torch.rand(32)
        layers = decoder(Queries(content, None, boxes, attention_mask(4, 3, groups=2)), memory, geometry)
        logits: torch.Tensor = layers[-1].logits[0].detach()
        return logits

    @pytest.mark.parametrize(
        ("changed", "seen_by"), [(0, {0, 1}), (3, {2, 3}), (5, set(range(7)))], ids=["group 1", "group 2", "query"]
    )
    def test_who_sees_whom(self, changed, seen_by):
        """The queries do not see the copies, groups do not see each other, and the copies see the queries."""
        difference = (self.decode(changed) - self.decode()).abs().amax(1)
        assert set(torch.where(difference > 1e-6)[0].tolist()) == seen_by
