"""Hosts that only enqueue: how far they run ahead, that they never wait for ever, and where a rank is said to be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import pytest
from devices import Ranks

from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.engine.pace import AHEAD
from ppctl.errors import ScheduleError
from ppctl.hang.verdict import verdict
from ppctl.plan.build import build_plan
from ppctl.schedule.action import COMPUTE, Action, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import POLICIES, make_schedule


def schedules() -> Iterator[Schedule]:
    for name in POLICIES:
        for pp, vpp, m in ((2, 1, 4), (3, 1, 7), (2, 2, 4), (4, 2, 8), (3, 3, 6)):
            with suppress(ScheduleError):
                yield lower(make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m))


@pytest.mark.parametrize("ahead", [1, 2, AHEAD])
def test_no_host_runs_further_ahead_and_none_waits_for_ever(ahead: int) -> None:
    seen = set()
    for schedule in schedules():
        ranks = Ranks(schedule, ahead)
        ranks.run()
        computed = {action for row in schedule.actions for action in row if action.op in COMPUTE}
        assert ranks.finished == computed, schedule.name
        assert ranks.most_ahead <= ahead
        seen.add(schedule.name)
    assert seen == POLICIES.keys()


def plan_of(pp: int, vpp: int):
    config = RunConfig(model=ModelConfig(num_layers=pp * vpp, hidden_size=16, num_attention_heads=2))
    config.parallel.pipeline_model_parallel_size = pp
    config.parallel.virtual_pipeline_model_parallel_size = vpp
    config.parallel.overlap_p2p_comm, config.parallel.batch_p2p_comm, config.parallel.batch_p2p_sync = (
        True,
        False,
        False,
    )
    config.train.micro_batch_size, config.train.global_batch_size = 1, 3 * pp
    config.launch.device, config.launch.nodes, config.launch.gpus_per_node = "cuda", 1, pp
    plan = build_plan(config, {})
    assert not plan.problems, plan.problems
    return plan


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (4, 2)])
def test_a_device_that_is_stuck_is_named_with_the_action_that_it_is_stuck_in(pp: int, vpp: int) -> None:
    """Also in the last actions of a list, behind which the hosts would meet in a collective."""
    plan = plan_of(pp, vpp)
    computed = [(rank, a) for rank, row in enumerate(plan.schedule.actions) for a in row if a.op in COMPUTE]
    ends = [next(a for a in reversed(row) if a.op in COMPUTE) for row in plan.schedule.actions]
    for rank, action in [*random.Random(pp).sample(computed, 12), *enumerate(ends)]:
        ranks = Ranks(plan.schedule, AHEAD, stuck=action)
        ranks.run()
        told = verdict(plan, ranks.states(), 200.0, 1e6)
        assert (told.rank, told.action) == (rank, str(action))
        assert "same collective" not in told.message


def test_where_the_host_waits_inside_a_stage_the_record_still_says_where_the_device_is() -> None:
    """Experts read counts off the device in every layer: the host stands there, and no bound is reached."""
    plan = plan_of(4, 1)
    inside, stuck = Action.parse("1F6"), Action.parse("1F5")
    ranks = Ranks(plan.schedule, AHEAD, stuck=stuck, waits_inside=inside)
    ranks.run()
    told = verdict(plan, ranks.states(), 200.0, 1e6)
    assert (told.rank, told.action) == (1, "1F5")


def test_hosts_without_a_bound_would_all_be_through() -> None:
    """What the records said before: nobody is in any action."""
    plan = plan_of(4, 1)
    ranks = Ranks(plan.schedule, 10**6, stuck=Action.parse("2B3"))
    ranks.run()
    assert ranks.most_ahead > 4 * AHEAD
