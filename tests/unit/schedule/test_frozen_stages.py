"""First stages that train nothing have forwards alone; what is left of any schedule is sound, and no slower."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ppctl.errors import ScheduleError
from ppctl.schedule.action import BACKWARDS, MESSAGES, Op, Schedule
from ppctl.schedule.pairs import pair_up
from ppctl.schedule.passes import lower, without_frozen
from ppctl.schedule.policies import POLICIES, make_schedule
from ppctl.schedule.simulate import Costs, in_flight, simulate
from ppctl.schedule.trace import step_time
from ppctl.schedule.verify import verify

TRAINING = [policy for policy in POLICIES.values() if policy.trains]


def every(pp: int, num_microbatches: int) -> list[Schedule]:
    """All policies on `pp` ranks, those for several chunks with two."""
    made = []
    for policy in TRAINING:
        try:
            made.append(make_schedule(policy.name, pp=pp, vpp=policy.chunks, num_microbatches=num_microbatches))
        except ScheduleError:
            assert policy.needs_microbatches(pp) > num_microbatches
    return made


def costs_of(schedule: Schedule, frozen: int) -> Costs:
    """Backwards of frozen stages take no time: what plans say of them."""
    stages = range(schedule.placement.num_stages)
    back = [2.0 * (stage >= frozen) for stage in stages]
    return Costs([1.0 for _ in stages], back, message=0.125)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("pp", "count"), [(1, 3), (2, 4), (3, 7), (4, 8)])
def test_whatever_schedule_is_left_runs_and_sends_no_gradient_to_frozen_stages(pp: int, count: int, batched: bool):
    for schedule in every(pp, count):
        whole = lower(schedule, batched=batched)
        for frozen in range(schedule.placement.num_stages):
            found = without_frozen(whole, frozen)
            assert verify(found) == [], (schedule.name, frozen)
            assert verify(lower(without_frozen(schedule, frozen), batched=batched)) == [], (schedule.name, frozen)
            actions = [action for row in found.actions for action in row]
            of = Counter((op, stage) for op, stage, _ in actions)
            for stage in range(schedule.placement.num_stages):
                backwards = sum(of[op, stage] for op in BACKWARDS)
                assert bool(backwards) == bool(of[Op.REDUCE_GRAD, stage]) == (stage >= frozen)
                assert of[Op.F, stage] == count
                crosses = stage > 0 and not schedule.placement.is_local(stage - 1)
                assert of[Op.SEND_B, stage] == count * (crosses and stage > frozen)
                assert of[Op.RECV_F, stage] == count * crosses
            assert {found.placement.channel(a) for a in actions if a.op in MESSAGES} == found.capacities.keys()
            costs = costs_of(schedule, frozen)
            assert step_time(simulate(found, costs)) <= step_time(simulate(whole, costs)) + 1e-9


def test_frozen_stages_run_no_further_ahead_than_before() -> None:
    whole = lower(make_schedule("1f1b", pp=4, num_microbatches=64))
    found = without_frozen(whole, 2)
    assert all(size == whole.capacities[channel] for channel, size in found.capacities.items())
    assert in_flight(found) == (1, 1, *in_flight(whole)[2:])


def test_a_backward_that_a_trained_stage_lacks_is_missed_and_a_frozen_ones_is_foreign() -> None:
    whole = make_schedule("1f1b", pp=3, num_microbatches=2)
    found = without_frozen(whole, 1)
    rows = list(found.actions)
    rows[1] = tuple(action for action in rows[1] if action.op is not Op.B)
    assert [problem.code for problem in verify(replace(found, actions=tuple(rows)))] == ["PP-E310"]
    assert [problem.code for problem in verify(replace(whole, frozen_stages=1))] == ["PP-E312"]
    assert [problem.code for problem in verify(replace(found, frozen_stages=0))] == ["PP-E310"]


def test_pairs_of_frozen_backwards_come_apart() -> None:
    paired = pair_up(make_schedule("1f1b", pp=2, num_microbatches=6))
    found = without_frozen(lower(paired), 1)
    assert found.pairs == {pair for pair in paired.pairs if pair.backward.stage == 1} and len(found.pairs) > 1
    assert verify(found) == []
