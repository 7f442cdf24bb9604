"""Batched schedules: one sequence per pair of ranks, no deadlock, and refusals where somebody writes one that hangs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_sizes import made, out_of_order, sample, v_shaped

from ppctl.schedule.action import COMPUTE, MESSAGES, RECEIVES, SENDS, Action, Channel, Op, Placement, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import step_time
from ppctl.schedule.verify import verify

SIZES = sample(300)


def rows(*texts: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(Action.parse, text.split())) for text in texts)


@pytest.mark.parametrize("part", range(4))
def test_every_policy_can_be_batched(part: int) -> None:
    for sizes in SIZES[part::4]:
        plain = made(sizes)
        batched = lower(plain, batched=True)
        assert batched.batched and not verify(batched), sizes
        for row, computed in zip(batched.actions, plain.actions, strict=True):
            assert tuple(action for action in row if action.op in COMPUTE) == computed, sizes


@pytest.mark.parametrize("plain", [v_shaped(), out_of_order()], ids=lambda s: s.name)
def test_so_can_what_no_policy_makes(plain: Schedule) -> None:
    assert not verify(lower(plain, batched=True))


def messages(schedule: Schedule, source: int, target: int, ops: frozenset[Op]) -> list[tuple[str, int]]:
    """What goes from one rank to another as one end's list has it: (direction, microbatch)."""
    end = source if ops is SENDS else target
    return [
        (action.op[-1], action.mb)
        for action in schedule.actions[end]
        if action.op in ops and schedule.placement.channel(action)[:2] == (source, target)
    ]


@pytest.mark.parametrize("vpp", [2, 3])
def test_both_ends_see_the_same_sequence_where_both_neighbours_are_one_rank(vpp: int) -> None:
    schedule = lower(made(("interleaved_1f1b", 2, vpp, 6, 2)), batched=True)
    for source, target in ((0, 1), (1, 0)):
        sent = messages(schedule, source, target, SENDS)
        assert sent == messages(schedule, source, target, RECEIVES)
        assert {direction for direction, _ in sent} == {"F", "B"}


def test_a_batch_ends_where_the_messages_end() -> None:
    schedule = Schedule("s", Placement("loop", 1, 1), 1, rows("0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0"))
    assert schedule.batch_ends(0) == {2, 4}
    batched = lower(made(("1f1b", 3, 1, 4, 3)), batched=True)
    for pp_rank, row in enumerate(batched.actions):
        for index, action in enumerate(row):
            last = index + 1 == len(row) or row[index + 1].op not in MESSAGES
            assert (index in batched.batch_ends(pp_rank)) == (action.op in MESSAGES and last)


def test_neighbouring_messages_are_one_batch() -> None:
    schedule = lower(made(("1f1b", 4, 1, 16, 4)), batched=True)
    count = sum(action.op in MESSAGES for row in schedule.actions for action in row)
    assert sum(len(schedule.batch_ends(pp_rank)) for pp_rank in range(4)) < 0.9 * count


@pytest.mark.parametrize("sizes", [("1f1b", 4, 1, 16, 4), ("gpipe", 4, 1, 8, 4)])
def test_where_all_stages_are_alike_batches_cost_little(sizes: tuple) -> None:
    costs = Costs.uniform(sizes[1] * sizes[2], message=0.02)
    assert step_time(simulate(lower(made(sizes), batched=True), costs)) < 1.05 * step_time(
        simulate(lower(made(sizes)), costs)
    )


PAIR = Placement("loop", 2, 2)
CAPACITY = {Channel(a, b, d): 9 for a, b in ((0, 1), (1, 0)) for d in "FB"}


def written(place: Placement, m: int, *texts: str) -> Schedule:
    return Schedule("written", place, m, rows(*texts), CAPACITY, batched=True)


def test_a_receive_ahead_of_need_hangs_as_part_of_a_batch() -> None:
    """Channels run it: the receive is only posted. A batch waits for it, and its cause is not sent before that."""
    early = written(
        PAIR,
        2,
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD",
    )
    assert not verify(replace(early, batched=False))
    (problem,) = verify(early)
    assert problem.code == "PP-E317"
    assert problem.message == "the schedule hangs: rank 0 waits at 0RECV_B0, rank 1 waits at 1RECV_F1"
    assert "0RECV_B0 <-- here, waits for rank 1 to send it" in problem.place
    assert not problem.remedy


def test_prefetching_lists_hang_as_batches() -> None:
    for pp in (2, 3, 4):
        ahead = lower(made(("1f1b", pp, 1, 6, pp)))
        assert not verify(ahead)
        assert {problem.code for problem in verify(replace(ahead, batched=True))} == {"PP-E317"}


def test_what_the_original_sends_at_pp_2_is_refused() -> None:
    """Activation and gradient leave in one order and are awaited in the other: a silent exchange, were it run."""
    schedule = lower(made(("interleaved_1f1b", 2, 2, 4, 2)), batched=True)
    sent = [
        (i, a, b)
        for i, (a, b) in enumerate(zip(schedule.actions[0], schedule.actions[0][1:], strict=False))
        if {a.op, b.op} == SENDS
    ]
    index, first, second = sent[0]
    row = [*schedule.actions[0]]
    row[index], row[index + 1] = second, first
    (problem,) = verify(replace(schedule, actions=(tuple(row), schedule.actions[1])))
    assert problem.code == "PP-E314" and "channel 0->1 FB" in problem.message
