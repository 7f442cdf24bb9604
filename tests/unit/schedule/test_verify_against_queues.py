"""`verify` says of every swap what an engine of threads and blocking queues says of it."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from blocking_queues import goes_wrong
from schedule_sizes import made, out_of_order, v_shaped, with_row

from ppctl.schedule.action import Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.verify import verify


def swapped(schedule: Schedule, pp_rank: int, first: int, second: int) -> Schedule:
    row = [*schedule.actions[pp_rank]]
    row[first], row[second] = row[second], row[first]
    return with_row(schedule, pp_rank, row)


def all_swaps(schedule: Schedule) -> list[tuple[int, int, int]]:
    return [(r, i, j) for r, row in enumerate(schedule.actions) for i, j in combinations(range(len(row)), 2)]


SMALL = [
    lower(made(("1f1b", 2, 1, 2, 2)), capacity=1),
    lower(made(("1f1b", 2, 1, 3, 2))),
    lower(made(("gpipe", 3, 1, 2, 3)), capacity=2),
    lower(made(("interleaved_1f1b", 2, 2, 2, 2)), capacity=2),
    lower(made(("interleaved_1f1b", 1, 2, 2, 1))),
    lower(made(("interleaved_1f1b", 3, 2, 3, 3))),
    lower(made(("interleaved_1f1b", 2, 3, 3, 2)), capacity=3),
    lower(v_shaped()),
    lower(out_of_order()),
    lower(made(("1f1b", 2, 1, 3, 2)), batched=True),
    lower(made(("1f1b", 3, 1, 3, 3)), batched=True),
    lower(made(("interleaved_1f1b", 2, 2, 3, 2)), batched=True),
    lower(v_shaped(), batched=True),
    lower(out_of_order(), batched=True),
]
LARGE = [
    lower(made(("1f1b", 4, 1, 9, 4))),
    lower(made(("interleaved_1f1b", 2, 2, 6, 2)), capacity=2),
    lower(made(("interleaved_1f1b", 3, 2, 7, 3))),
    lower(made(("interleaved_1f1b", 4, 3, 5, 4)), capacity=4),
    lower(made(("interleaved_1f1b", 2, 2, 6, 2)), batched=True),
    lower(made(("interleaved_1f1b", 4, 2, 6, 4)), batched=True),
]


def agree(schedule: Schedule) -> bool:
    """Assert one verdict; says whether the schedule is sound."""
    reason, problems = goes_wrong(schedule), verify(schedule)
    assert bool(reason) == bool(problems), (reason, [*map(str, problems)], schedule.to_csv())
    return not reason


@pytest.mark.parametrize("schedule", SMALL, ids=lambda s: f"{s.name}-pp{s.placement.pp}-m{s.num_microbatches}")
def test_every_swap_of_two_actions_of_a_small_schedule(schedule: Schedule) -> None:
    verdicts = [agree(swapped(schedule, *swap)) for swap in all_swaps(schedule)]
    assert not all(verdicts)
    assert agree(schedule)


@pytest.mark.parametrize("schedule", LARGE, ids=lambda s: f"{s.name}-pp{s.placement.pp}-m{s.num_microbatches}")
def test_sampled_swaps_of_larger_schedules(schedule: Schedule) -> None:
    near = [swap for swap in all_swaps(schedule) if swap[2] - swap[1] < 6]  # far swaps are nearly all wrong
    sample = random.Random(7).sample(near, 120)
    verdicts = [agree(swapped(schedule, *swap)) for swap in sample]
    assert any(verdicts) and not all(verdicts)


@pytest.mark.parametrize("schedule", LARGE[:3], ids=lambda s: f"{s.name}-pp{s.placement.pp}-m{s.num_microbatches}")
def test_sampled_moves_drops_and_repetitions(schedule: Schedule) -> None:
    draw = random.Random(11)
    for _ in range(80):
        pp_rank = draw.randrange(len(schedule.actions))
        row = [*schedule.actions[pp_rank]]
        action = row.pop(draw.randrange(len(row)))
        for _ in range(draw.choice([0, 1, 1, 1, 2])):
            row.insert(draw.randrange(len(row) + 1), action)
        agree(with_row(schedule, pp_rank, row))


@pytest.mark.parametrize(
    "schedule",
    [made(("1f1b", 3, 1, 4, 3)), made(("gpipe", 2, 2, 3, 2)), made(("interleaved_1f1b", 3, 2, 3, 3)), v_shaped()],
    ids=lambda s: s.name,
)
def test_every_swap_before_messages_are_placed(schedule: Schedule) -> None:
    """A compute-only list is sound if it runs with channels in which everything fits."""
    for swap in all_swaps(schedule):
        changed = swapped(schedule, *swap)
        assert bool(verify(changed)) == bool(goes_wrong(lower(changed, capacity=1000))), changed.to_csv()


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_every_capacity_of_every_small_policy(capacity: int) -> None:
    verdicts = {
        sizes: agree(lower(made(sizes), capacity=capacity))
        for pp in (2, 3, 4)
        for m in (1, 2, pp, pp + 1, 2 * pp + 1)
        for sizes in (
            ("gpipe", pp, 1, m, pp),
            ("1f1b", pp, 1, m, pp),
            ("interleaved_1f1b", pp, 2, m, pp),
            ("interleaved_1f1b", pp, 3, m, pp),
        )
    }
    assert all(verdicts.values()) == (capacity > 1), verdicts
