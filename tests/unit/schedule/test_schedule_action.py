"""Actions, channels and schedules as text, both ways; the dependency rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppctl.errors import ScheduleError
from ppctl.schedule.action import (
    COMPUTE,
    INPUT_GRADIENTS,
    LIFE_ENDS,
    MESSAGES,
    PASSED_ON,
    SENDS,
    TIMED,
    WEIGHT_GRADIENTS,
    Action,
    Channel,
    Op,
    Placement,
    Schedule,
    deps,
    lane,
    receive_slots,
    send_slots,
)
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import POLICIES, make_schedule

numbers = st.integers(0, 9999)
actions = st.builds(
    lambda op, stage, mb: Action(op, stage, -1 if op is Op.REDUCE_GRAD else mb), st.sampled_from(Op), numbers, numbers
)
small = st.integers(1, 5)


@given(actions)
def test_an_action_prints_and_parses_both_ways(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(st.builds(Channel, numbers, numbers, st.sampled_from("FB")))
def test_a_channel_prints_and_parses_both_ways(channel: Channel) -> None:
    assert Channel.parse(str(channel)) == channel


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "0F-1",
        "0F0x",
        "0f0",
        "-1F0",
        "0F\u0661",
        "0UNSHARD",
        "0B0W1",
        "(0F0;1B0)OVERLAP_F_B",
    ],
)
def test_what_is_not_exactly_one_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="PP-E301"):
        Action.parse(text)


@pytest.mark.parametrize("text", ["", "0->1", "0->1 X", "0-1 F", "0->1 F "])
def test_what_is_not_a_channel_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="PP-E301"):
        Channel.parse(text)


@given(
    st.sampled_from(sorted(policy.name for policy in POLICIES.values() if not policy.splits)),
    small,
    small,
    small,
    st.booleans(),
)
def test_a_schedule_survives_its_csv(name: str, pp: int, vpp: int, m: int, lowered: bool) -> None:
    schedule = make_schedule(name, pp=pp, vpp=1 if name == "1f1b" else vpp, num_microbatches=m)
    schedule = lower(schedule) if lowered else schedule
    assert replace(Schedule.from_csv(schedule.to_csv(), name=name), capacities=schedule.capacities) == schedule


@given(st.lists(st.lists(actions, max_size=6), min_size=1, max_size=4))
def test_any_lists_survive_csv_when_the_placement_is_given(rows: list[list[Action]]) -> None:
    schedule = Schedule("any", Placement("v", len(rows), 10000), 10000, tuple(map(tuple, rows)))
    read = Schedule.from_csv(schedule.to_csv(), name="any", placement=schedule.placement, num_microbatches=10000)
    assert read == schedule


def test_torch_time_slots_may_be_idle_and_padded_with_blanks() -> None:
    text = "0F0, 0F1,,,0B0 ,,0B1\r\n,1F0,1B0,1F1,,1B1\r\n\r\n"
    schedule = Schedule.from_csv(text)
    assert schedule.to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert schedule.placement == Placement("loop", 2, 2)
    assert schedule.num_microbatches == 2


def test_the_rows_say_whether_stages_are_a_loop_or_a_v() -> None:
    assert Schedule.from_csv("0F0,2F0\n1F0,3F0\n").placement == Placement("loop", 2, 4)
    assert Schedule.from_csv("0F0,3F0\n1F0,2F0\n").placement == Placement("v", 2, 4)


def test_every_bad_cell_is_named_by_row_and_column() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv("0F0,0F-1\n1F0,,1G0,1B0junk\n")
    places = [problem.place for problem in caught.value.problems]
    assert places == ["row 1 (pp_rank 0), column 2", "row 2 (pp_rank 1), column 3", "row 2 (pp_rank 1), column 4"]
    assert {problem.code for problem in caught.value.problems} == {"PP-E302"}


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("", None),
        (",,\n,\n", None),
        ("0F0\n0F1\n", None),
        ("1F0\n0F0\n", None),
        ("0F0,1F0\n2F0,3F0\n", None),
        ("0F0\n", Placement("loop", 2, 2)),
        ("0F0\n1F0\n2F0\n", Placement("loop", 2, 2)),
    ],
)
def test_rows_that_fit_no_pipeline_are_refused(text: str, placement: Placement | None) -> None:
    with pytest.raises(ScheduleError, match="PP-E303"):
        Schedule.from_csv(text, placement=placement)


def test_a_lane_is_one_operation_for_every_microbatch() -> None:
    assert list(lane(Op.B, 3, 2)) == [Action(Op.B, 3, 0), Action(Op.B, 3, 1)]
    assert all(type(action) is Action for action in lane(Op.B, 3, 2))


@pytest.mark.parametrize(("capacity", "slots"), [(1, (1, 0)), (2, (1, 1)), (3, (2, 1)), (4, (2, 2)), (7, (4, 3))])
def test_a_capacity_is_receives_and_sends(capacity: int, slots: tuple[int, int]) -> None:
    assert (receive_slots(capacity), send_slots(capacity)) == slots


PLAIN = make_schedule("interleaved_1f1b", pp=2, vpp=2, num_microbatches=2)
MIXED = Schedule.from_csv("0F0,0F1,0I0,0W0,0B1\n1F0,1F1,1I0,1W0,1B1\n")


@pytest.mark.parametrize(
    ("schedule", "action", "needs"),
    [
        (PLAIN, "0F1", ""),
        (PLAIN, "2F1", "1F1"),
        (PLAIN, "3B0", "3F0"),
        (PLAIN, "1B0", "1F0 2B0"),
        (lower(PLAIN), "2F1", "2RECV_F1"),
        (lower(PLAIN), "2RECV_F1", "1SEND_F1"),
        (lower(PLAIN), "1SEND_F1", "1F1"),
        (lower(PLAIN), "1B0", "1F0 1RECV_B0"),
        (lower(PLAIN), "1RECV_B0", "2SEND_B0"),
        (lower(PLAIN), "2SEND_B0", "2B0"),
        (lower(PLAIN), "2REDUCE_GRAD", "2B0 2B1"),
        (MIXED, "0I0", "0F0 1I0"),
        (MIXED, "0B1", "0F1 1B1"),
        (MIXED, "0W0", "0I0"),
        (lower(MIXED), "1SEND_B0", "1I0"),
        (lower(MIXED), "1REDUCE_GRAD", "1W0 1B1"),
    ],
)
def test_what_an_action_needs(schedule: Schedule, action: str, needs: str) -> None:
    assert " ".join(map(str, deps(Action.parse(action), schedule))) == needs


@pytest.mark.parametrize(("name", "vpp"), [("1f1b", 1), ("zb_h1", 1), ("interleaved_zero_bubble", 2), ("dualpipev", 2)])
def test_the_sets_of_operations_are_those_of_the_dependency_rule(name: str, vpp: int) -> None:
    """dualpipev has whole backwards and split ones in one list."""
    schedule = lower(make_schedule(name, pp=3, vpp=vpp, num_microbatches=7))
    for row in schedule.actions:
        for action in row:
            needs = deps(action, schedule)
            if action.op is Op.SEND_B:
                assert [need.op in INPUT_GRADIENTS for need in needs] == [True]
            if action.op is Op.REDUCE_GRAD:
                own = {a for a in row if a.op in WEIGHT_GRADIENTS and a.stage == action.stage}
                assert set(needs) == own
                assert len(own) == 7
        for stage in schedule.placement.stages_of(schedule.actions.index(row)):
            for mb in range(7):
                ops = [a.op for a in row if (a.stage, a.mb) == (stage, mb) and a.op in COMPUTE]
                assert [op in INPUT_GRADIENTS for op in ops].count(True) == 1
                assert [op in LIFE_ENDS for op in ops] == [False] * (len(ops) - 1) + [True]
    sent = {deps(action, schedule)[0].op for row in schedule.actions for action in row if action.op in SENDS}
    assert sent <= PASSED_ON
    assert name != "dualpipev" or sent == PASSED_ON


def test_an_operation_takes_the_time_of_a_rank_or_of_a_channel() -> None:
    assert set(Op) == TIMED | MESSAGES
    assert not TIMED & MESSAGES
    assert PASSED_ON <= COMPUTE <= TIMED
