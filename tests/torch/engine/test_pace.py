"""Hosts that only enqueue: how far they run ahead, that they never wait for ever, and where a rank is said to be."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from devices import Ranks

from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.engine.pace import AHEAD, DevicePace
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


class Gate:
    """An event that is passed when it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        assert self.opened.wait(20)


class Places:
    """A heartbeat that notes where the device is said to be."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def enter(self, index: int) -> None:
        self.seen.append(("enters", index))

    def work(self, index: int) -> None:
        self.seen.append(("works", index))


def test_a_device_is_not_waited_for_between_two_lists_and_is_followed_through_both() -> None:
    gates: list[Gate] = []
    places = Places()

    def make() -> Gate:
        gates.append(Gate())
        return gates[-1]

    pace = DevicePace(2, places, make, ahead=9)
    for _ in range(2):
        for index in range(2):
            pace.enter(index)
            pace.begin(index)
            pace.end(index)
        pace.finish(lambda: None)  # nothing is passed yet, and the host is here
    assert len(gates) == 10 and {index for _, index in places.seen} == {0}
    pace.leave(lambda: None)
    settled = threading.Thread(target=pace.settle)
    settled.start()
    for opened in range(5):
        gates[opened].opened.set()
    settled.join(0.2)
    assert settled.is_alive(), "the second list is not over"
    assert places.seen[-1] in {("enters", 2), ("enters", 0)}
    while settled.is_alive():
        for gate in list(gates):
            gate.opened.set()
        settled.join(0.01)
    assert pace.idle and pace.ended > 0
    assert [place for place in places.seen if place[0] == "works"] == [("works", i) for i in (0, 1, 0, 1)]
    assert places.seen[-1] == ("enters", 2)


def test_an_error_of_the_device_in_an_earlier_list_is_raised_with_its_action() -> None:
    class Broken(Gate):
        def synchronize(self) -> None:
            raise RuntimeError("illegal address")

    pace = DevicePace(3, Places(), Broken, ahead=9)
    pace.enter(0)
    pace.enter(1)
    pace.begin(1)
    pace.end(1)
    pace.finish(lambda: None)
    pace.enter(0)
    with pytest.raises(RuntimeError, match="illegal address"):
        pace.settle()
    assert pace.at == 1


def test_hosts_without_a_bound_would_all_be_through() -> None:
    """What the records said before: nobody is in any action."""
    plan = plan_of(4, 1)
    ranks = Ranks(plan.schedule, 10**6, stuck=Action.parse("2B3"))
    ranks.run()
    assert ranks.most_ahead > 4 * AHEAD
