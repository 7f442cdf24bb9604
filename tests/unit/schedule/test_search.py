"""The search for a schedule: sound, within memory, never slower than a named one, and as short as the optimum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from optimal_order import Pipeline

from ppctl.errors import ScheduleError
from ppctl.schedule.action import Placement
from ppctl.schedule.lane_orders import (
    Clock,
    Lanes,
    Task,
    critical_blocks,
    least_limits,
    named_schedules,
    rows_of,
    schedule_of,
)
from ppctl.schedule.list_scheduler import First, OrderByRule, Rule, WeightsPlaced
from ppctl.schedule.order_search import FoundSchedule, find_schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import step_time
from ppctl.schedule.verify import verify

QUICK = 400_000
"""An allowance that is used up in a fraction of a second."""


def drawn(chance: Random, placement: Placement, most_microbatches: int) -> Task:
    """A task with other times, sizes and limits on every stage."""
    stages, pp = placement.num_stages, placement.pp
    count = chance.randint(1, most_microbatches)

    def times() -> list[float]:
        return [chance.choice((0.5, 1.0, 2.0, chance.uniform(0.2, 3.0))) for _ in range(stages)]

    forward, inputs, weights = times(), times(), times()
    backward = [a + b for a, b in zip(inputs, weights, strict=True)]
    sizes = [chance.choice((1.0, 1.0, chance.uniform(0.5, 2.0))) for _ in range(stages)]
    unit = min(pp, count) * sum(sizes[: stages // pp])
    part = chance.choice((0.3, 0.5, 1.0, 1.5, 2.0))
    limits = [max(least, part * unit) for least in least_limits(placement, sizes)]
    message = chance.choice((0.0, 0.05, 0.3, 1.0))
    return Task(placement, count, Costs(forward, backward, inputs, weights, message=message), sizes, limits)


def any_placement(chance: Random, most_pp: int) -> Placement:
    pp = chance.randint(2, most_pp)
    kind, vpp = chance.choice((("loop", 1), ("loop", 1), ("v", 2), ("loop", 2), ("loop", 3)))
    return Placement(kind, pp, pp * vpp)


def peaks(task: Task, found: FoundSchedule) -> list[float]:
    """What each rank holds at most, counted action by action: from F to W, or to B."""
    most = []
    for row in found.schedule.actions:
        held = largest = 0.0
        for op, stage, _ in row:
            held += task.sizes[stage] * ((op == "F") - (op in "BW"))
            largest = max(largest, held)
        most.append(largest)
    return most


def check_found(task: Task, found: FoundSchedule) -> None:
    assert found.schedule.placement == task.placement and found.schedule.num_microbatches == task.num_microbatches
    assert verify(lower(found.schedule)) == []
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks(task, found), task.limits, strict=True))
    simulated = step_time(simulate(found.schedule, task.costs))
    assert simulated == pytest.approx(found.seconds, rel=1e-12)
    assert found.bound <= simulated * (1 + 1e-9)
    for named in named_schedules(task):
        if all(a <= b for a, b in zip(peaks(task, replace(found, schedule=named)), task.limits, strict=True)):
            assert simulated <= step_time(simulate(named, task.costs)) * (1 + 1e-9), named.name


def random_sets(start: int, stop: int) -> None:
    for number in range(start, stop):
        chance = Random(number)
        task = drawn(chance, any_placement(chance, 8), 16)
        check_found(task, find_schedule(task, QUICK))


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(partial(random_sets, 0, 30), id="sample"),
        *(
            pytest.param(partial(random_sets, at, at + 47), marks=pytest.mark.whole, id=f"from {at}")
            for at in range(30, 500, 47)
        ),
    ],
)
def test_it_is_sound_within_memory_and_never_slower_than_a_named_schedule(run: Callable[[], None]) -> None:
    run()


SMALL = [
    *(Placement("loop", pp, pp) for pp in (2, 3)),
    *(Placement(kind, 2, 4) for kind in ("loop", "v")),
]


@pytest.mark.parametrize("placement", SMALL, ids=lambda p: f"{p.kind} of {p.num_stages}")
@pytest.mark.parametrize(
    "seeds",
    [range(8), *(pytest.param(range(at, at + 26), marks=pytest.mark.whole) for at in (8, 34))],
    ids=("few", "more", "most"),
)
def test_it_finds_the_optimum_of_small_pipelines(placement: Placement, seeds: range) -> None:
    for seed in seeds:
        task = drawn(Random(seed), placement, 4 if placement.num_stages == placement.pp else 2)
        found = find_schedule(task)
        assert Pipeline(task).shorter_than(found.seconds * (1 - 1e-9)) is None, seed


def test_the_optimum_is_found_by_branching() -> None:
    """The judge itself, on a case that can be counted: two ranks, one microbatch in flight."""
    costs = Costs([1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0])
    task = Task(Placement("loop", 2, 2), 2, costs, [1.0, 1.0], [1.0, 1.0])
    assert Pipeline(task).shorter_than(100.0) == 10.0  # F F I I W, then the same once more
    assert Pipeline(replace(task, limits=[2.0, 2.0])).shorter_than(100.0) == 7.0
    assert Pipeline(task).shorter_than(10.0) is None


def equal_costs(num_stages: int, message: float = 0.0) -> Costs:
    one = (1.0,) * num_stages
    return Costs(one, (2.0,) * num_stages, one, one, message=message)


def test_twice_the_memory_of_1f1b_takes_the_bubble_but_for_the_fill() -> None:
    place = Placement("loop", 4, 4)
    found = find_schedule(Task(place, 12, equal_costs(4, 0.1), [1.0] * 4, [8.0] * 4))
    assert found.seconds == pytest.approx(found.bound) == 3 * 1.1 + 12 * 3
    assert found.best_named is not None and found.best_named.schedule.name == "zb_h2"


def test_the_memory_of_1f1b_on_one_chunk_gives_zb_h1() -> None:
    found = find_schedule(Task(Placement("loop", 4, 4), 12, equal_costs(4, 0.05), [1.0] * 4, [4.0] * 4), QUICK)
    assert found.schedule == make_schedule("zb_h1", pp=4, num_microbatches=12)


@pytest.mark.parametrize("seconds", [(0.1, 0.7, 0.3), (0.9, 0.8, 0.6)])
def test_where_splitting_gains_nothing_backwards_stay_whole(seconds: tuple[float, float, float]) -> None:
    """Their sums differ in the last digit."""
    forward, inputs, weights = seconds
    place = Placement("loop", 1, 1)
    found = find_schedule(Task(place, 5, Costs([forward], [inputs + weights], [inputs], [weights]), [1.0], [1.0]))
    assert found.schedule.name == "1f1b"


def test_less_memory_than_any_named_schedule_needs_is_used_as_it_is() -> None:
    place = Placement("v", 4, 8)
    task = Task(place, 8, equal_costs(8), [1.0] * 8, [3.0] * 4)
    found = find_schedule(task, QUICK)
    assert found.best_named is None
    check_found(task, found)


def test_the_same_task_gives_the_same_schedule() -> None:
    task = drawn(Random(3), Placement("v", 4, 8), 9)
    assert find_schedule(task, QUICK).schedule == find_schedule(task, QUICK).schedule


def test_work_is_counted_and_ends_with_the_allowance() -> None:
    task = drawn(Random(5), Placement("loop", 5, 5), 12)
    little, more = (find_schedule(task, allowance) for allowance in (1, QUICK))
    assert little.tried < more.tried < QUICK // (3 * 5 * task.num_microbatches)
    assert more.seconds <= little.seconds
    check_found(task, little)


def test_a_limit_below_one_microbatch_is_refused_by_rank() -> None:
    task = Task(Placement("v", 2, 4), 4, equal_costs(4), [1.0, 2.0, 1.0, 1.0], [2.0, 2.5])
    with pytest.raises(ScheduleError, match=r"pp_rank 1 .* 2\.5 .* 3") as caught:
        find_schedule(task)
    assert caught.value.problems[0].code == "PP-E321"
    find_schedule(replace(task, limits=[2.0, 3.0]), 1)


@pytest.mark.parametrize("seed", range(6))
def test_the_clock_is_the_simulation_and_rules_keep_to_memory(seed: int) -> None:
    chance = Random(seed)
    task = drawn(chance, any_placement(chance, 5), 8)
    lanes = Lanes.of(task)
    for first in First:
        rule = Rule(first, chance.random() < 0.5, chance.random() < 0.5, chance.random(), chance.random())
        rows = OrderByRule(lanes, rule, lanes.limits).made()
        assert rows is not None and lanes.fit(rows)
        assert all(lanes.sound(pp_rank, row) for pp_rank, row in enumerate(rows))
        ends = Clock(lanes, rows).ends
        schedule = schedule_of(rows, lanes, "made")
        assert ends is not None and rows_of(schedule) == rows
        assert max(ends) == pytest.approx(step_time(simulate(schedule, task.costs)), rel=1e-12)
        placed = WeightsPlaced(lanes, rows, 0.5).made()
        assert placed is not None and lanes.fit(placed)
        assert [[lane for lane in row if lane % 3 < 2] for row in placed] == [
            [lane for lane in row if lane % 3 < 2] for row in rows
        ]


def test_critical_blocks_lead_from_the_first_action_to_the_last_one() -> None:
    task = Task(Placement("loop", 3, 3), 4, equal_costs(3, 0.5), [1.0] * 3, [3.0] * 3)
    lanes = Lanes.of(task)
    rows = rows_of(make_schedule("zb_h1", pp=3, num_microbatches=4))
    assert rows is not None
    blocks = critical_blocks(lanes, rows)
    assert blocks[-1][:2] == (0, 0)  # pp_rank 0 begins
    length = sum(sum(lanes.seconds[lane] for lane in rows[r][i : j + 1]) for r, i, j in blocks)
    ends = Clock(lanes, rows).ends
    assert ends is not None and length + 0.5 * (len(blocks) - 1) == pytest.approx(max(ends))


def test_rows_that_wait_for_each_other_have_no_end() -> None:
    task = Task(Placement("loop", 2, 2), 2, equal_costs(2), [1.0] * 2, [9.0] * 2)
    lanes = Lanes.of(task)
    assert Clock(lanes, [[0, 1, 0, 1, 2, 2], [3, 3, 4, 4, 5, 5]]).ends is None
