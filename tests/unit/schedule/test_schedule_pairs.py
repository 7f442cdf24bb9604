"""Pairs of a forward and a backward: as text, judged, simulated and drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from ppctl.errors import ScheduleError
from ppctl.schedule.action import Pair, Schedule
from ppctl.schedule.page import timeline_html
from ppctl.schedule.passes import lower
from ppctl.schedule.perfetto import perfetto_json
from ppctl.schedule.picture import Picture
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import Costs, simulate, to_slots
from ppctl.schedule.text_timeline import timeline_text
from ppctl.schedule.trace import Trace
from ppctl.schedule.verify import verify

AHEAD = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,(1F1;1B0)OVERLAP_F_B,(1F2;1B1)OVERLAP_F_B,1B2\n"
"""1F1B of two ranks with one more forward ahead on each: what leaves room for pairs."""


@pytest.mark.parametrize(("pp", "m"), [(pp, m) for pp in range(1, 9) for m in (2 * pp, 2 * pp + 1, 4 * pp)])
def test_dualpipev_pairs_its_main_phase_soundly(pp: int, m: int) -> None:
    schedule = make_schedule("dualpipev", pp=pp, vpp=2, num_microbatches=m)
    ranks = [schedule.placement.rank_of(pair.forward.stage) for pair in schedule.pairs]
    wanted = [2 * (m - 2 * pp + r + 1) + pp - 1 - r for r in range(pp)]
    assert [ranks.count(r) for r in range(pp)] == [*wanted[:-1], wanted[-1] - 1]
    for each in (schedule, lower(schedule), lower(schedule, batched=True)):
        assert each.pairs == schedule.pairs
        assert verify(each) == []


def test_pairs_survive_their_csv_and_their_slots() -> None:
    schedule = Schedule.from_csv(AHEAD)
    assert schedule.to_csv() == AHEAD
    assert Schedule.from_csv(to_slots(schedule)) == schedule
    assert schedule.pairs == {Pair.parse(f"({pair})OVERLAP_F_B") for pair in ("0F2;0B0", "1F1;1B0", "1F2;1B1")}
    alone = replace(schedule, pairs=frozenset())
    assert alone.to_csv() == AHEAD.replace("(", "").replace(")OVERLAP_F_B", "").replace(";", ",")


@pytest.mark.parametrize("batched", [True, False])
def test_what_ranks_execute_is_the_same_with_pairs_and_without(batched: bool) -> None:
    for schedule in (Schedule.from_csv(AHEAD), make_schedule("dualpipev", pp=4, vpp=2, num_microbatches=9)):
        with_pairs = lower(schedule, batched=batched)
        without = lower(replace(schedule, pairs=frozenset()), batched=batched)
        assert replace(with_pairs, pairs=frozenset()) == without != with_pairs


def test_messages_between_the_two_are_no_part_of_a_pair() -> None:
    lowered = lower(Schedule.from_csv(AHEAD))
    assert ",0F2,0SEND_F2,0RECV_B1,0B0," in lowered.to_csv()
    assert len(lowered.pairs) == 3
    assert verify(lowered) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n", "the backward cannot start before a forward"),
        ("0F0,0F1,0B0,0B1\n1F0,(1F1;1B1)OVERLAP_F_B,1B0\n", "the backward cannot start before a forward"),
        ("(0F0;0B0)OVERLAP_F_B,0F1,0B1\n", "the backward cannot start before a forward"),
        ("0F0,0F1,(0B0;0B1)OVERLAP_F_B\n1F0,1F1,1B0,1B1\n", "an F and then a B or I: not so (0B0;0B1)OVERLAP_F_B"),
        ("0F0,0F1,(0B0;0F2)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n", "an F and then a B or I"),
        ("0F0,0F1,0I0,(0F2;0W0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n", "an F and then a B or I"),
    ],
)
def test_pairs_that_cannot_stand_side_by_side_are_named(text: str, reason: str) -> None:
    schedule = Schedule.from_csv(text)
    for each in (schedule, lower(schedule)):
        (problem,) = verify(each)
        assert problem.code == "PP-E318"
        assert reason in problem.message
        assert verify(replace(each, pairs=frozenset())) == []


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        (["(0F1;0B0)OVERLAP_F_B"], "stand side by side in a rank's list"),
        (["(0F2;1B0)OVERLAP_F_B"], "stand side by side in a rank's list"),
        (["(0F2;0B0)OVERLAP_F_B", "(0F1;0B0)OVERLAP_F_B"], "an action is in one pair"),
    ],
)
def test_pairs_that_are_none_in_the_lists_are_named(pairs: list[str], reason: str) -> None:
    (problem,) = verify(replace(Schedule.from_csv(AHEAD), pairs=frozenset(map(Pair.parse, pairs))))
    assert problem.code == "PP-E318"
    assert reason in problem.message


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_1f1b_may_pair_its_steady_state_but_on_the_last_rank(extra: int) -> None:
    """There the backward behind a forward is the same microbatch's, and only that pair is named."""
    schedule = make_schedule("1f1b", pp=4, num_microbatches=9, extra_warmup=extra)
    turns = [Pair(*two) for row in schedule.actions for two in pairwise(row)]
    turns = [pair for pair in turns if (pair.forward.op, pair.backward.op) == ("F", "B")]
    assert verify(replace(schedule, pairs=frozenset(pair for pair in turns if pair.forward.stage < 3))) == []
    (problem,) = verify(replace(schedule, pairs=frozenset(turns)))
    assert problem.message.endswith(": (3F0;3B0)OVERLAP_F_B")


@pytest.mark.parametrize("cell", ["(0F0;1B0)", "(0F0)OVERLAP_F_B", "(0F0;1B0;1F0)OVERLAP_F_B", "(0F0;1X0)OVERLAP_F_B"])
def test_what_is_not_exactly_one_pair_is_refused_with_its_place(cell: str) -> None:
    with pytest.raises(ScheduleError, match="PP-E302") as caught:
        Schedule.from_csv(f"0F0,{cell}\n1F0\n")
    assert caught.value.problems[0].place == "row 1 (pp_rank 0), column 2"


def test_a_pair_takes_the_time_of_the_two_in_turn_and_is_marked_in_every_picture() -> None:
    schedule = Schedule.from_csv(AHEAD)
    trace = simulate(schedule, Costs.uniform(2))
    assert trace.spans == simulate(replace(schedule, pairs=frozenset()), Costs.uniform(2)).spans
    assert trace.pairs == schedule.pairs == Trace.from_json(json.loads(json.dumps(trace.to_json()))).pairs
    text = timeline_text(trace, 60)
    assert "k-t" in text
    (second,) = (line.partition("|")[2] for line in text.splitlines() if line.startswith("rank 1"))
    assert [letter for letter in "abcklm" if letter in second] == ["c", "k", "l"]
    picture = Picture("", "", trace, ())
    events = json.loads(perfetto_json(picture))["traceEvents"]
    marked = {event["name"]: event["args"]["pair"] for event in events if "pair" in event["args"]}
    assert marked["0F2"] == marked["0B0"] == "(0F2;0B0)OVERLAP_F_B"
    assert len(marked) == 6
    assert '"pairs":[[[0,0,2],[1,0,0]],[[0,1,1],[1,1,0]],[[0,1,2],[1,1,1]]]' in timeline_html(picture)
