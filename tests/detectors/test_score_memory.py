"""The score memory of the criteria, against the definition on the joined list of a step and its memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bucketrank.detectors.assignment import IGNORED, NEGATIVE
from bucketrank.detectors.criterion import Assigned, Criterion, HeadRecipe, build_criterion
from bucketrank.detectors.criterion.memory import ScoreQueues
from bucketrank.settings import loss_settings

from ..losses import oracle
from .small_detectors import scene, small_detector

SIZE = 12  # a step stores three positives and three negatives


def _criterion(name: str, inputs: int = 1, **settings: object) -> Criterion:
    return build_criterion(loss_settings(name, memory=SIZE, **settings), HeadRecipe(inputs=inputs)).double()


def _step(seed: int, positives: int) -> Assigned:
    """Eight candidates of two classes; the last is ignored."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.full((8,), NEGATIVE)
    labels[1 : 1 + positives] = torch.randint(0, 2, (positives,), generator=generator)
    labels[-1] = IGNORED
    corner = torch.rand(positives, 2, generator=generator).double()
    boxes = torch.cat([corner, corner + 1], 1)
    return Assigned(
        logits=torch.randn(8, 2, generator=generator).double().requires_grad_(),
        labels=labels,
        image_index=torch.zeros(8, dtype=torch.int64),
        boxes=boxes,
        objects=torch.tensor([[0.0, 0, 1, 1]]).double().repeat(positives, 1),
        box_deltas=boxes,
        target_deltas=boxes,
    )


class _PlainMemory:
    """The memory as its docstring describes it, in Python lists: logits minus the mean of their step, and targets."""

    def __init__(self) -> None:
        self.kinds: list[list[tuple[float, float]]] = [[], []]  # newest first

    def joined(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        entries = torch.tensor([*self.kinds[0], *self.kinds[1]]).double().view(-1, 2)
        remembered = entries[:, 0] + logits[targets >= 0].mean()
        return torch.cat([logits.flatten(), remembered]), torch.cat([targets.flatten(), entries[:, 1]])

    def store(self, logits: Tensor, targets: Tensor) -> None:
        relative = logits - logits[targets >= 0].mean()
        pairs = list(zip(relative.flatten().tolist(), targets.flatten().tolist(), strict=True))
        negatives = sorted((pair for pair in pairs if pair[1] == 0), reverse=True)[: SIZE // 4]
        for kind, new in enumerate([[pair for pair in pairs if pair[1] > 0], negatives]):
            self.kinds[kind] = [*new, *self.kinds[kind]][:SIZE]


@pytest.mark.parametrize("method", ["exact", "pairwise"])
@pytest.mark.parametrize("name", ["ap", "rs", "rsq"])
def test_a_step_is_ranked_with_the_memory(name: str, method: str) -> None:
    criterion, plain = _criterion(name, method=method), _PlainMemory()
    delta = criterion.settings.effective_delta  # type: ignore[attr-defined]
    for seed, positives in enumerate((2, 0, 3, 1, 0, 3, 3)):
        step = _step(seed, positives)
        terms = criterion(step)
        ranking = [terms[part] for part in ("rank", "sort") if part in terms]
        (gradient,) = torch.autograd.grad(torch.stack(ranking).sum(), step.logits)
        targets = step.targets(1.0 if name == "ap" else step.ious)
        logits = step.logits.detach()
        expected = (oracle.ap if name == "ap" else oracle.rank_sort)(*plain.joined(logits, targets), delta)
        torch.testing.assert_close(torch.stack(ranking), torch.stack(expected.values), rtol=1e-6, atol=1e-7)
        every = sum(expected.gradients)
        own, remembered = every[: logits.numel()].view_as(logits), every[logits.numel() :].sum()  # type: ignore[index]
        # The remembered entries move with the mean of the entries that are not ignored.
        own = own + remembered * (targets >= 0) / (targets >= 0).sum()
        torch.testing.assert_close(gradient, own, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(gradient.sum(), torch.zeros_like(remembered), rtol=0, atol=1e-7)
        plain.store(logits, targets)
    assert not gradient[-1].any()  # ignored


def test_a_step_without_positives_lowers_the_negatives_above_the_remembered_positives() -> None:
    criterion = _criterion("ap", delta=0.0)
    full, empty = _step(3, 3), _step(1, 0)
    criterion(full)
    loss = criterion(empty)["rank"]
    (gradient,) = torch.autograd.grad(loss, empty.logits)

    def relative(step: Assigned) -> Tensor:
        return step.logits - step.logits[step.targets(1.0) >= 0].mean()

    lowest_positive = relative(full)[full.targets(1.0) > 0].min()
    negative = empty.targets(1.0) == 0
    lowered = (relative(empty) >= lowest_positive) & negative
    assert loss > 0
    assert lowered.any()
    others = negative & ~lowered
    assert (gradient[others] < 0).all(), "they rise with the mean"
    assert gradient[lowered].min() > gradient[others].max()
    assert gradient.flatten()[torch.where(negative, empty.logits, -math.inf).argmax()] > 0
    assert not gradient[~negative].any()


def test_the_memory_follows_the_level_of_the_logits() -> None:
    """Rank steps whose logits fall from step to step: the losses are those of steps that stay where they are."""
    still, falling = _criterion("rs"), _criterion("rs")
    for seed, positives in enumerate((3, 0, 2, 0, 0, 1)):
        one, other = _step(seed, positives), _step(seed, positives)
        other.logits.data -= 7.0 * seed
        torch.testing.assert_close(still(one), falling(other))


def test_what_a_step_stores() -> None:
    memory = ScoreQueues(SIZE)
    logits = torch.tensor([5.0, math.nan, 4.0, 3.0, 2.0, 9.0, math.inf, 1.0])
    targets = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, -1.0, 0.8, 0.0])
    memory.join(0, logits, targets)
    # The mean of 5, 4, 3, 2 and 1, which are finite and not ignored, is 3.
    assert memory.logits[0, :, :4].tolist() == [[1.0, 0.0, 0.0, 0.0], [2.0, 0.0, -1.0, 0.0]]
    assert memory.targets[0, :, :4].tolist() == [[0.5, -1.0, -1.0, -1.0], [0.0, 0.0, 0.0, -1.0]]
    for k in range(5):  # without positives the old ones stay, the negatives move on
        memory.join(0, torch.tensor([10.0 + k, -10.0 - k]), torch.tensor([0.0, -1.0 if k else 0.0]))
    assert memory.logits[0, 0, 0] == 1
    assert memory.logits[0, 1, :9].tolist() == [0.0, 0.0, 0.0, 0.0, 10.0, -10.0, 2.0, 0.0, -1.0]
    assert repr(memory) == "ScoreQueues(size=12, inputs=1)"


def test_of_many_positives_a_spread_subset_is_stored() -> None:
    memory = ScoreQueues(400)
    memory.join(0, torch.arange(10_000.0), torch.ones(10_000))
    stored = memory.logits[0, 0, :100] + 4999.5  # the mean
    assert (memory.targets[0, 0] > 0).sum() == 100
    counts = torch.histc(stored, bins=10, min=0, max=10_000)
    assert counts.min() >= 5
    assert counts.max() <= 15


def test_every_input_has_its_own_memory() -> None:
    together, alone = _criterion("rs", inputs=2), [_criterion("rs"), _criterion("rs")]
    for seed in range(4):
        steps = [_step(seed, 2), _step(10 + seed, 1)]
        expected = [criterion(step) for criterion, step in zip(alone, steps, strict=True)]
        torch.testing.assert_close(together(steps), expected)


def test_evaluation_neither_reads_nor_writes_the_memory() -> None:
    criterion = _criterion("rs")
    criterion(_step(0, 3))
    before = criterion.state_dict()["memory.logits"].clone()
    without = build_criterion(loss_settings("rs"), HeadRecipe()).eval()
    torch.testing.assert_close(criterion.eval()(_step(1, 2)), without(_step(1, 2)))
    assert torch.equal(criterion.state_dict()["memory.logits"], before)


@pytest.mark.parametrize("name", ["atss", "faster_rcnn", "cascade_rcnn", "co_detr"])
def test_every_head_fills_its_memory(name: str) -> None:
    detector = small_detector(name, memory=SIZE)
    first = detector(*scene())
    second = detector(*scene())
    memories = [module for module in detector.modules() if isinstance(module, ScoreQueues)]
    assert memories
    for memory in memories:
        assert (memory.targets[:, :, 0] >= 0).all()
    assert any(not torch.equal(first[term], second[term]) for term in first if term.endswith("rank"))
    images, targets = scene((0, 0))  # no objects: the remembered ones still rank
    losses = sum(detector(images, targets).values())
    assert losses > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": -1}, "loss.memory: expected from 0 to 1000000, got -1"),
        ({"memory": 8, "ranking_scope": "image"}, "loss.memory: expected 0 with loss.ranking_scope image.*, got 8"),
    ],
)
def test_invalid_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_settings("rs", **settings)
