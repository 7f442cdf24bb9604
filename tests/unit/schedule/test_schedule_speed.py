"""Work is a promise: a schedule is cheap enough to be made and proved again whenever somebody asks.

Counted in lines that are executed, which no other process on the machine changes; seconds stand in
benchmarks/plan_speed.py.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest

from ppctl.schedule.action import Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import Costs, in_flight, simulate
from ppctl.schedule.verify import verify


def lines(work: Callable[[], object]) -> int:
    """How many lines of Python `work` executes."""
    number = 0

    def count(frame: object, event: str, argument: object) -> Callable[..., object]:
        nonlocal number
        number += event == "line"
        return count

    before = sys.gettrace()
    gc.disable()  # a collection may run what other tests left behind
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return number


def plan(pp: int, vpp: int, num_microbatches: int) -> None:
    schedule = lower(make_schedule("interleaved_1f1b", pp=pp, vpp=vpp, num_microbatches=num_microbatches))
    assert verify(schedule) == []
    simulate(schedule, Costs.uniform(pp * vpp, message=0.1))
    in_flight(schedule)


def test_a_plan_is_bounded_by_its_actions() -> None:
    """16 ranks with 2 chunks and 120 microbatches: 7,680 forwards and backwards, and the messages between them."""
    assert lines(lambda: plan(16, 2, 120)) < 200 * 7680


def test_a_schedule_is_made_with_a_line_or_two_an_action() -> None:
    """64 ranks with 2 chunks and 512 microbatches: 131,072 forwards and backwards."""
    assert lines(lambda: make_schedule("interleaved_1f1b", pp=64, vpp=2, num_microbatches=512)) < 2 * 131072


@pytest.mark.parametrize("name", ["zbv_zero_bubble", "v_half", "v_min"])
def test_a_v_is_made_with_as_much_work_for_each_microbatch_however_many_there_are(name: str) -> None:
    few, many = (lines(lambda m=m: make_schedule(name, pp=8, vpp=2, num_microbatches=m)) for m in (64, 512))
    assert many < 8 * few < 8 * 30 * 3 * 16 * 64


@pytest.mark.parametrize("work", [lower, verify, lambda schedule: simulate(schedule, Costs.uniform(8)), in_flight])
def test_eight_times_the_microbatches_are_eight_times_the_work(work: Callable[[Schedule], object]) -> None:
    schedules = [make_schedule("interleaved_1f1b", pp=4, vpp=2, num_microbatches=m) for m in (40, 320)]
    small, large = (
        lines(lambda each=each: work(each)) for each in (schedules if work is lower else map(lower, schedules))
    )
    assert large < 1.1 * 8 * small
