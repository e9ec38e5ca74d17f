"""Batches are all wide or all tall, reproducible and complete."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrank.data import GroupedBatchSampler, collate, repeat_factors

WIDE, TALL = (30, 40), (40, 30)


def test_repeat_factors_by_hand() -> None:
    # Of 8 images, class 1 is in 8, class 2 in 2 and class 3 in 1; at t = 1/2: 1, sqrt(.5/.25) = 1.41, sqrt(.5/.125) = 2
    labels = [[1], [1, 1], [1], [1, 2], [1, 2, 3], [1], [1], [1]]
    assert repeat_factors(labels, threshold=0.5) == [1, 1, 1, 2, 2, 1, 1, 1]
    assert repeat_factors(labels) == [1] * 8, "no class is rarer than one image in a thousand"
    assert repeat_factors([[1], []], threshold=0.5) == [1, 1], "f = 1/2 = t"
    assert repeat_factors([], threshold=0.5) == []


def test_a_second_object_of_a_class_changes_nothing() -> None:
    assert repeat_factors([[1, 1, 1], [2], [2]], threshold=1.0) == repeat_factors([[1], [2], [2]], threshold=1.0)


sizes = st.lists(st.sampled_from([WIDE, TALL, (30, 30)]), min_size=1, max_size=40)


@given(sizes, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(0, 3))
def test_every_image_occurs_and_every_rank_gets_equally_many(
    sizes: list[tuple[int, int]], batch_size: int, world: int, repeats: int, shuffle: bool, epoch: int
) -> None:
    ranks = []
    for rank in range(world):
        sampler = GroupedBatchSampler(
            sizes, batch_size=batch_size, repeats=repeats, seed=4, rank=rank, world_size=world, shuffle=shuffle
        )
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
        assert len(ranks[-1]) == len(sampler)
        assert list(sampler) == ranks[-1], "the same epoch, the same order"
    batches = [batch for rank in ranks for batch in rank]
    seen = Counter(index for batch in batches for index in batch)
    assert all(seen[index] >= repeats for index in range(len(sizes)))
    images = len(sizes) * repeats
    unpadded = -(-images // batch_size)
    assert len(batches) == -(-unpadded // world) * world
    if len(batches) == unpadded:
        assert set(seen.values()) == {repeats}
    mixed = sum(len({sizes[index][0] > sizes[index][1] for index in batch}) > 1 for batch in batches)
    assert mixed <= max(1, world), "only the images left over are mixed (and may be repeated to fill up)"
    assert all(1 <= len(batch) <= batch_size for batch in batches)


def test_epochs_and_seeds_differ() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        sampler = GroupedBatchSampler([WIDE] * 30, batch_size=4, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert len({str(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    # The same on every machine and with every version of numpy.
    assert order(0, 0)[0] == [18, 25, 19, 17]


def test_resuming_in_the_middle_of_an_epoch() -> None:
    sampler = GroupedBatchSampler([WIDE, TALL] * 9, batch_size=2, rank=1, world_size=2)
    sampler.set_epoch(3)
    whole = list(sampler)
    sampler.skip(2)
    sampler.set_epoch(3)
    assert list(sampler) == whole[2:]
    assert list(sampler) == whole, "skips only once"


@pytest.mark.slow  # the import
def test_lightning_sets_the_epoch() -> None:
    data = pytest.importorskip("lightning.fabric.utilities.data", reason="Lightning is not installed")
    from torch.utils.data import DataLoader

    sampler = GroupedBatchSampler([WIDE] * 4, batch_size=2)
    data._set_sampler_epoch(DataLoader([0] * 4, batch_sampler=sampler), 5)  # type: ignore[arg-type]
    assert sampler.epoch == 5


def test_repeats_by_image() -> None:
    sampler = GroupedBatchSampler([WIDE] * 3, batch_size=1, repeats=[1, 3, 2])
    assert Counter(index for batch in sampler for index in batch) == {0: 1, 1: 3, 2: 2}
    assert len(sampler) == 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size of at least 1, got 0"),
        ({"batch_size": 1, "rank": 2, "world_size": 2}, "rank below world_size 2, got 2"),
        ({"batch_size": 1, "repeats": [1]}, "for each of 2 images, got 1 values"),
        ({"batch_size": 1, "repeats": 0}, "the smallest 0"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedBatchSampler([WIDE, TALL], **wrong)  # type: ignore[arg-type]


def test_collate_makes_two_lists() -> None:
    assert collate([("a", 1), ("b", 2)]) == (["a", "b"], [1, 2])
