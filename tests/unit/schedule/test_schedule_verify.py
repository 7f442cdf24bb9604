"""`verify` is silent on what the policies make, and names every mutation."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from pairwise import pairwise
from schedule_sizes import grid, made, out_of_order, sample, v_shaped, with_row

from ppctl.schedule.action import COMPUTE, MESSAGES, Action, Channel, Op, Placement, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.verify import verify

LOWERED = [
    lower(made(("1f1b", 3, 1, 4, 3))),
    lower(made(("gpipe", 2, 2, 2, 2))),
    lower(made(("forward_only", 2, 2, 3, 2))),
    lower(made(("interleaved_1f1b", 2, 2, 4, 2))),
    lower(made(("interleaved_1f1b", 3, 2, 4, 3))),
    lower(made(("interleaved_1f1b", 1, 3, 3, 1))),
    lower(v_shaped()),
    lower(out_of_order()),
]
PLAIN = [made(("1f1b", 3, 1, 4, 3)), made(("interleaved_1f1b", 3, 2, 4, 3)), v_shaped()]


def named(schedule: Schedule) -> str:
    kind = "lowered" if schedule.capacities else "plain"
    return f"{schedule.name}-pp{schedule.placement.pp}-{kind}"


def codes(schedule: Schedule) -> set[str]:
    return {problem.code for problem in verify(schedule)}


def assert_clean(sizes: tuple[str, int, int, int, int]) -> None:
    schedule = made(sizes)
    assert verify(schedule) == [], sizes
    assert verify(lower(schedule)) == [], sizes


def test_a_sample_of_the_grid_is_clean() -> None:
    for sizes in sample(400):
        assert_clean(sizes)


@pytest.mark.whole
def test_every_pair_of_values_of_the_grid_is_clean() -> None:
    for sizes in pairwise(grid()):
        assert_clean(sizes)


@pytest.mark.soak
@pytest.mark.timeout(480)
def test_the_whole_grid_is_clean() -> None:
    for sizes in grid():
        assert_clean(sizes)


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("m", [2, 3, 4, 5, 7, 12])
def test_the_wrap_around_runs_on_in_order_streams(pp: int, m: int) -> None:
    """At pp=2 all four channels run between one pair of ranks; each keeps its order, and none waits for another."""
    for vpp in (2, 3):
        lowered = lower(made(("interleaved_1f1b", pp, vpp, m, pp)))
        ring = [(rank, (rank + 1) % pp) for rank in range(pp)]
        forward = {Channel(a, b, "F") for a, b in ring}
        assert set(lowered.capacities) == forward | {Channel(b, a, "B") for a, b in ring}
        assert verify(lowered) == []


@pytest.mark.parametrize("schedule", LOWERED + PLAIN, ids=named)
def test_every_drop_is_caught(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        for index in range(len(row)):
            assert codes(with_row(schedule, rank, [*row[:index], *row[index + 1 :]])) & {"PP-E310"}, row[index]


@pytest.mark.parametrize("schedule", LOWERED + PLAIN, ids=named)
def test_every_duplication_is_caught(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            for where in (index, len(row)):
                twice = [*row]
                twice.insert(where, action)
                assert codes(with_row(schedule, rank, twice)) == {"PP-E311"}, action


@pytest.mark.parametrize("schedule", LOWERED + PLAIN, ids=named)
def test_every_foreign_stage_and_microbatch_is_caught(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        for index, (op, stage, mb) in enumerate(row):
            others = [Action(op, other, mb) for other in range(-1, schedule.placement.num_stages + 1) if other != stage]
            if op is not Op.REDUCE_GRAD:
                others += [
                    Action(op, stage, other) for other in range(-1, schedule.num_microbatches + 1) if other != mb
                ]
            for foreign in others:
                assert codes(with_row(schedule, rank, [*row[:index], foreign, *row[index + 1 :]])), foreign
                assert codes(with_row(schedule, rank, [*row[:index], foreign, *row[index:]])), foreign


@pytest.mark.parametrize("schedule", LOWERED, ids=named)
def test_every_pair_of_swapped_messages_on_a_channel_is_caught(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        messages = [(i, a.op, schedule.placement.channel(a)) for i, a in enumerate(row) if a.op in MESSAGES]
        for (i, op, channel), (j, other, same) in combinations(messages, 2):
            if (op, channel) == (other, same):
                changed = [*row]
                changed[i], changed[j] = row[j], row[i]
                assert codes(with_row(schedule, rank, changed)) & {"PP-E313", "PP-E314"}, (row[i], row[j])


@pytest.mark.parametrize("schedule", LOWERED, ids=named)
def test_an_action_on_another_rank_is_caught(schedule: Schedule) -> None:
    rows = schedule.actions
    for rank in range(len(rows)):
        other = (rank + 1) % len(rows)
        if other != rank:
            moved = with_row(schedule, rank, [*rows[rank][1:]])
            assert codes(with_row(moved, other, [*rows[other], rows[rank][0]])) == {"PP-E310", "PP-E312"}


PAIR = lower(made(("1f1b", 2, 1, 3, 2)))


@pytest.mark.parametrize(
    ("schedule", "code"),
    [
        (replace(PAIR, actions=PAIR.actions[:1]), "PP-E303"),
        (replace(PAIR, num_microbatches=4), "PP-E310"),
        (replace(PAIR, placement=Placement("loop", 2, 3)), "PP-E310"),
        (replace(PAIR, capacities={}), "PP-E315"),
        (replace(LOWERED[0], capacities=dict.fromkeys(LOWERED[0].capacities, 2)), "PP-E316"),
        (lower(made(("interleaved_1f1b", 2, 2, 2, 2)), capacity=1), "PP-E317"),
        (Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"), "PP-E317"),
        (Schedule.from_csv("0B0,0F0\n1F0,1B0\n"), "PP-E313"),
        (Schedule.from_csv("0F0,0I0,0W0\n1F0,1W0,1I0\n"), "PP-E313"),
        (Schedule.from_csv("0F0,0I0\n1F0,1B0\n"), "PP-E310"),
        (Schedule.from_csv("0F0,0I0,0W0,0B0\n1F0,1B0\n"), "PP-E312"),
        (Schedule.from_csv("0F0,0REDUCE_GRAD\n1F0\n"), "PP-E312"),
        (Schedule.from_csv("0F0,0B0,0SEND_B0\n1F0,1B0\n"), "PP-E312"),
    ],
)
def test_each_rule_has_its_code(schedule: Schedule, code: str) -> None:
    assert code in codes(schedule)


def test_everything_missing_is_reported_at_once_and_in_few_words() -> None:
    schedule = made(("1f1b", 4, 1, 50, 4))
    empty = replace(schedule, actions=((),) * 3 + (schedule.actions[3],))
    problems = verify(empty)
    assert [problem.message for problem in problems] == [
        f"rank {rank} lacks {rank}B0, {rank}B1, {rank}B2, {rank}B3, {rank}B4, {rank}B5 and 94 more" for rank in range(3)
    ]


def test_a_deadlock_is_shown_where_it_happens() -> None:
    (problem,) = verify(lower(made(("interleaved_1f1b", 2, 2, 2, 2)), capacity=1))
    assert problem.message == "the schedule hangs: rank 0 waits at 2SEND_F0, rank 1 waits at 1SEND_F1"
    assert problem.place.splitlines() == [
        "rank 0: ... 0SEND_F1 2F0 2SEND_F0 <-- here, waits for rank 1 to receive 2SEND_F0; 2RECV_F1 2RECV_B0 ...",
        "rank 1: ... 1RECV_F1 1F1 1SEND_F1 <-- here, waits for rank 0 to receive 1SEND_F1; 3RECV_F0 3F0 ...",
    ]
    assert problem.remedy == "pipeline.p2p_capacity=null"


def test_a_deadlock_of_the_order_itself_is_shown_too() -> None:
    (problem,) = verify(Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"))
    assert problem.place.splitlines() == [
        "rank 0: 0F0 0B0 <-- here, waits for 1B0 of rank 1; 0F1 0B1",
        "rank 1: 1F1 <-- here, waits for 0F1 of rank 0; 1B1 1F0 ...",
    ]
    assert problem.remedy == ""


def test_the_remedy_for_a_small_capacity_works() -> None:
    schedule = made(("interleaved_1f1b", 2, 2, 2, 2))
    assert verify(lower(schedule, capacity=None)) == []


def test_a_schedule_is_not_changed_by_being_judged() -> None:
    lowered = LOWERED[0]
    before = lowered.to_csv(), dict(lowered.capacities)
    verify(lowered)
    assert (lowered.to_csv(), dict(lowered.capacities)) == before
    assert all(action.op in COMPUTE for row in PLAIN[0].actions for action in row)
