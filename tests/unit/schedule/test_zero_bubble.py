"""What the papers promise of schedules with split backwards: memory and bubble where F, I and W take equal times."""

from __future__ import annotations

from itertools import accumulate, product

import pytest

from ppctl.schedule.action import Op, Schedule
from ppctl.schedule.passes import lower, run_weights_sooner
from ppctl.schedule.policies import POLICIES, make_schedule
from ppctl.schedule.simulate import Costs, in_flight, simulate
from ppctl.schedule.trace import longest_span, step_time
from ppctl.schedule.verify import verify

SPLIT = [name for name, policy in POLICIES.items() if policy.splits and name != "dualpipev"]
MOST = {
    "zb_h1": lambda p: p,
    "zb_h2": lambda p: 2 * p - 1,
    "zbv_zero_bubble": lambda p: p,
    "v_half": lambda p: (p + 2) // 2,
    "v_min": lambda p: (p + 4) // 3,
}
"""Activations at most, whole until W, in units of what a rank keeps of a microbatch (arXiv 2401.10241, 2405.15362)."""
LARGE = [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16]


def made(name: str, pp: int, m: int) -> Schedule:
    return make_schedule(name, pp=pp, vpp=POLICIES[name].chunks, num_microbatches=m)


def idle(schedule: Schedule, forward: float = 1.0, gradient: float = 1.0, weights: float = 1.0) -> tuple[float, float]:
    """Idle time within the longest span of a rank (the papers' bubble) and within the step, costs of whole ranks."""
    stages = schedule.placement.num_stages
    share = schedule.placement.pp / stages
    forward, gradient, weights = share * forward, share * gradient, share * weights
    costs = Costs([forward] * stages, [gradient + weights] * stages, [gradient] * stages, [weights] * stages)
    trace = simulate(schedule, costs)
    work = schedule.num_microbatches * (forward + gradient + weights) / share
    return longest_span(trace) - work, step_time(trace) - work


@pytest.mark.parametrize("seldom", [5, pytest.param(1, marks=pytest.mark.whole)])
@pytest.mark.parametrize(("name", "pp"), list(product(SPLIT, range(1, 9))))
def test_every_list_runs_to_its_end_as_it_is_and_with_messages(name: str, pp: int, seldom: int) -> None:
    for m in range(1 + pp % seldom, 25, seldom):
        schedule = made(name, pp, m)
        for each in (schedule, lower(schedule), lower(schedule, batched=True)):
            assert verify(each) == [], m


@pytest.mark.parametrize("name", SPLIT)
def test_weight_gradients_of_a_stage_run_in_the_order_of_microbatches(name: str) -> None:
    for row in made(name, 4, 9).actions:
        for stage in {action.stage for action in row}:
            assert [action.mb for action in row if action[:2] == (Op.W, stage)] == list(range(9))


@pytest.mark.parametrize(("name", "pp"), list(product(MOST, LARGE)))
def test_activations_are_the_papers_and_few_microbatches_hold_no_more(name: str, pp: int) -> None:
    chunks = POLICIES[name].chunks
    assert max(in_flight(made(name, pp, 4 * pp))) == chunks * MOST[name](pp)
    for m in {1, pp, 2 * pp - 1}:
        assert max(in_flight(made(name, pp, m))) <= chunks * min(m, MOST[name](pp))


@pytest.mark.parametrize(("name", "pp"), list(product(["zb_h2", "zbv_zero_bubble"], LARGE)))
def test_no_bubble_is_left_but_filling_and_draining(name: str, pp: int) -> None:
    for m in (2 * pp - 1, 2 * pp, 4 * pp + 1):
        bubble, with_filling = idle(made(name, pp, m))
        assert bubble == 0
        assert with_filling == (pp - 1) / POLICIES[name].chunks  # the forwards until the last rank has its first one


@pytest.mark.parametrize("pp", LARGE)
def test_v_half_has_at_most_half_of_the_bubble_of_1f1b_and_v_min_two_thirds(pp: int) -> None:
    whole = 3 * (pp - 1)
    for m in (pp, 2 * pp, 4 * pp + 1):
        assert idle(made("1f1b", pp, m)) == (whole, whole) or m < pp
        assert max(idle(made("v_half", pp, m))) <= whole / 2
        beyond = max(0.5, (pp - 4) / 6) if pp % 3 == 1 and pp > 4 else 0
        assert max(idle(made("v_min", pp, m))) <= 2 * whole / 3 + beyond


@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 1.2, 0.8), (1.2, 1, 1), (1, 1.4, 1), (1, 0.8, 0.4)])
def test_the_bubble_of_v_half_does_not_grow_with_microbatches_where_the_paper_says_so(costs: tuple[float, ...]) -> None:
    forward, gradient, weights = costs
    assert 2 * forward <= weights + 2 * gradient and 2 * gradient <= weights + 2 * forward
    few, many = (idle(made("v_half", 8, m), *costs)[0] for m in (16, 64))
    assert many == pytest.approx(few)


def test_the_bubble_of_v_min_grows_with_microbatches_where_costs_differ() -> None:
    few, many = (idle(made("v_min", 8, m))[0] for m in (16, 64))
    assert many == few
    few, many = (idle(made("v_min", 8, m), 1, 1.2, 0.8)[0] for m in (16, 64))
    assert many > 2 * few


def test_a_v_sends_twice_the_messages_of_a_loop_but_for_its_turning_point() -> None:
    def messages(name: str) -> int:
        return sum(action.op in (Op.SEND_F, Op.SEND_B) for row in lower(made(name, 8, 16)).actions for action in row)

    assert messages("zb_h2") == messages("zb_h1") == 2 * 16 * 7
    assert {messages(name) for name in ("zbv_zero_bubble", "v_half", "v_min")} == {2 * 2 * 16 * 7}


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("name", [*SPLIT, "dualpipev"])
def test_weight_gradients_that_run_sooner_leave_at_most_so_many_and_all_else_in_order(name: str, most: int) -> None:
    whole = made(name, 4, 11)
    sooner = run_weights_sooner(whole, most)
    assert verify(lower(sooner)) == [] and sooner.pairs == whole.pairs
    for row, before in zip(sooner.actions, whole.actions, strict=True):
        assert [a for a in row if a.op is not Op.W] == [a for a in before if a.op is not Op.W]
        owed = list(accumulate((a.op is Op.I) - (a.op is Op.W) for a in row))
        assert max(owed, default=0) <= most + 1, "one more while an I ends"
        assert all(a.op is Op.W for a, waits in zip(row[1:], owed, strict=False) if waits > most)
    largest = max(max(accumulate((a.op is Op.I) - (a.op is Op.W) for a in row)) for row in whole.actions)
    assert run_weights_sooner(whole, largest) == whole
