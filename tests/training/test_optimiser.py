"""The learning rate of every step, as arithmetic."""

import pytest
import torch
from torch import nn

from bucketrank.settings.training import ScheduleSettings
from bucketrank.training.optimiser import Schedule, build_optimiser, require_known_factors, set_rate


def rates(settings: ScheduleSettings, batch_size: int = 16, steps_per_epoch: int = 100) -> list[float]:
    schedule = Schedule(settings, batch_size=batch_size, steps_per_epoch=steps_per_epoch)
    return [schedule.rate(step) for step in range(schedule.total_steps)]


def test_published_steps():
    by_step = rates(ScheduleSettings(lr=0.012, warmup_steps=200), steps_per_epoch=100)
    assert len(by_step) == 1200
    assert by_step[0] == pytest.approx(0.012 * 0.001)
    assert by_step[100] == pytest.approx(0.012 * (1 - 0.5 * 0.999))
    assert by_step[200] == by_step[799] == pytest.approx(0.012)
    assert by_step[800] == by_step[1099] == pytest.approx(0.0012)
    assert by_step[1100] == by_step[-1] == pytest.approx(0.00012)


def test_brs_detr_steps():
    by_step = rates(ScheduleSettings(lr=2e-4, warmup_steps=0, milestones=(10, 11), gamma=0.2))
    assert by_step[999] == by_step[0] == pytest.approx(2e-4)
    assert [by_step[1000], by_step[1100]] == pytest.approx([4e-5, 8e-6])


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 2.0), ("sqrt", 2**0.5), ("none", 1.0)])
def test_the_rate_is_scaled_to_the_batch(scaling, factor):
    settings = ScheduleSettings(lr=0.01, scaling=scaling, warmup_steps=0)
    assert rates(settings, batch_size=32)[0] == pytest.approx(0.01 * factor)


def test_a_short_run_warms_up_for_a_quarter_at_most():
    assert Schedule(ScheduleSettings(epochs=2), batch_size=16, steps_per_epoch=20).warmup_steps == 10


def test_one_cycle_rises_and_falls():
    by_step = rates(ScheduleSettings(lr=1.0, policy="one_cycle", epochs=1))
    assert by_step[0] == pytest.approx(1 / 25)
    assert by_step.index(max(by_step)) == 25
    assert by_step[25] == 1.0
    assert by_step[:26] == sorted(by_step[:26])
    assert by_step[25:] == sorted(by_step[25:], reverse=True)
    assert by_step[-1] < 0.01


def test_max_steps_end_the_run_and_the_cycle():
    by_step = rates(ScheduleSettings(lr=1.0, policy="one_cycle", epochs=12, max_steps=40))
    assert len(by_step) == 40
    assert by_step[10] == 1.0


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(2, 2, bias=False)
        self.sampling_offsets = nn.Linear(2, 2, bias=False)
        self.head = nn.Linear(2, 2, bias=False)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(("optimiser", "kind"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_parameters_have_the_factor_of_their_name(optimiser, kind):
    settings = ScheduleSettings(optimiser=optimiser, backbone_factor=0.5, factors={"sampling_offsets": 0.1})
    model = Parts()
    built = build_optimiser(model, settings)
    assert type(built) is kind
    set_rate(built, 0.02)
    rate_of = {id(p): group["lr"] for group in built.param_groups for p in group["params"]}
    assert rate_of == {
        id(model.backbone.weight): pytest.approx(0.01),
        id(model.sampling_offsets.weight): pytest.approx(0.002),
        id(model.head.weight): pytest.approx(0.02),
    }


def test_a_factor_of_no_parameter_is_refused():
    require_known_factors(Parts(), ScheduleSettings(factors={"sampling_offsets": 0.1, "frozen": 0.5}))
    expected = r"schedule\.factors: expected a part of a parameter name.* backbone\.weight, got 'bakcbone'"
    with pytest.raises(ValueError, match=expected):
        require_known_factors(Parts(), ScheduleSettings(factors={"bakcbone": 0.1}))


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_factors_are_finite_and_not_negative(factor):
    with pytest.raises(ValueError, match=r"schedule\.factors: expected numbers of at least 0"):
        ScheduleSettings(factors={"head": factor})
