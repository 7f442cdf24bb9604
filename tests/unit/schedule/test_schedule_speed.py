"""Speed is a promise: a schedule is cheap enough to be made and proved again whenever somebody asks."""

from __future__ import annotations

import time
from collections.abc import Callable

from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import Costs, in_flight, simulate
from ppctl.schedule.verify import verify

LOADED = 4.0
"""Other tests may run beside this one: the limits are for an idle core, times this. The best of several runs counts."""


def best_of(runs: int, work: Callable[[], object]) -> float:
    def once() -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    return min(once() for _ in range(runs))


def test_a_plan_for_pp16_vpp2_and_120_microbatches_takes_a_fraction_of_a_second() -> None:
    def plan() -> None:
        schedule = lower(make_schedule("interleaved_1f1b", pp=16, vpp=2, num_microbatches=120))
        assert verify(schedule) == []
        simulate(schedule, Costs.uniform(32, message=0.1))
        in_flight(schedule)

    assert best_of(4, plan) < 0.15 * LOADED


def test_64_ranks_by_512_microbatches_by_2_chunks_are_made_in_no_time() -> None:
    assert best_of(3, lambda: make_schedule("interleaved_1f1b", pp=64, vpp=2, num_microbatches=512)) < 0.15 * LOADED


def test_the_time_of_verify_is_linear() -> None:
    """Eight times the microbatches may take twice eight times as long, not eight times eight."""
    small, large = (lower(make_schedule("interleaved_1f1b", pp=4, vpp=2, num_microbatches=m)) for m in (40, 320))
    assert best_of(3, lambda: verify(large)) < 16 * best_of(5, lambda: verify(small))
