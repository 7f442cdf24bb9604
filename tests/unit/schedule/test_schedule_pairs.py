"""Pairs of a forward and a backward: as text, judged, simulated and drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from ppctl.errors import ScheduleError
from ppctl.schedule.action import Op, Pair, Schedule
from ppctl.schedule.drawings import perfetto_json, timeline_html
from ppctl.schedule.pairs import deferred_weights, pair_up
from ppctl.schedule.passes import lower
from ppctl.schedule.picture import Picture
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import Costs, in_flight, simulate, to_slots
from ppctl.schedule.text_timeline import timeline_text
from ppctl.schedule.verify import verify

AHEAD = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,(1F1;1B0)OVERLAP_F_B,(1F2;1B1)OVERLAP_F_B,1B2\n"
"""1F1B of two ranks with one more forward ahead on each: what leaves room for pairs."""


@pytest.mark.parametrize(("pp", "m"), [(pp, m) for pp in range(1, 9) for m in (2 * pp, 2 * pp + 1, 4 * pp)])
def test_dualpipev_pairs_its_main_phase_soundly(pp: int, m: int) -> None:
    schedule = make_schedule("dualpipev", pp=pp, vpp=2, num_microbatches=m)
    ranks = [schedule.placement.rank_of(pair.forward.stage) for pair in schedule.pairs]
    wanted = [2 * (m - 2 * pp + r + 1) + pp - 1 - r for r in range(pp)]
    assert [ranks.count(r) for r in range(pp)] == [*wanted[:-1], wanted[-1] - 1]
    for each in (schedule, lower(schedule)):
        assert each.pairs == schedule.pairs
        assert verify(each) == []
    batched = lower(schedule, batched=True)
    assert batched.pairs == frozenset()
    assert verify(batched) == []


@pytest.mark.parametrize(
    ("exchanges", "link", "together"),
    [
        ((0.0, 0.0), 1.0, 30.0),  # nothing to hide
        ((4.0, 6.0), 1.0, 20.0),  # what both compute, 6 + 14
        ((4.0, 16.0), 1.0, 20.0),  # what both exchange, and no less than the backward alone
        ((8.0, 16.0), 0.9, 24.0 / 0.9),
        ((8.0, 16.0), 0.5, 30.0),  # side by side is no slower than one after the other
    ],
)
def test_the_halves_of_a_pair_hide_each_others_exchanges(
    exchanges: tuple[float, float], link: float, together: float
) -> None:
    schedule = Schedule.from_csv(AHEAD)
    costs = replace(Costs.uniform(2, 10.0, 20.0), exchanges=[exchanges] * 2, overlapped_link=link)
    trace = simulate(schedule, costs)
    seconds = {span.action: span.end - span.start for span in trace.spans}
    assert all(seconds[pair.forward] + seconds[pair.backward] == pytest.approx(together) for pair in schedule.pairs)
    paired = {action for pair in schedule.pairs for action in pair}
    alone = {action.op: value for action, value in seconds.items() if action not in paired}
    assert alone == {Op.F: 10.0, Op.B: 20.0}


def test_pairs_survive_their_csv_and_their_slots() -> None:
    schedule = Schedule.from_csv(AHEAD)
    assert schedule.to_csv() == AHEAD
    assert Schedule.from_csv(to_slots(schedule)) == schedule
    assert schedule.pairs == {Pair.parse(f"({pair})OVERLAP_F_B") for pair in ("0F2;0B0", "1F1;1B0", "1F2;1B1")}
    alone = replace(schedule, pairs=frozenset())
    assert alone.to_csv() == AHEAD.replace("(", "").replace(")OVERLAP_F_B", "").replace(";", ",")


def test_no_message_stands_between_the_two_of_a_pair_and_batches_leave_no_pairs() -> None:
    schedule = Schedule.from_csv(AHEAD)
    lowered, batched = lower(schedule), lower(schedule, batched=True)
    assert ",0RECV_B0,(0F2;0B0)OVERLAP_F_B,0SEND_F2," in lowered.to_csv()
    assert lowered.to_csv().count("OVERLAP") == 3 > batched.to_csv().count("OVERLAP") == 0
    assert len(lowered.pairs) == 3 > len(batched.pairs) == 0
    assert verify(lowered) == verify(batched) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n", "the backward cannot start before a forward"),
        ("0F0,0F1,0B0,0B1\n1F0,(1F1;1B1)OVERLAP_F_B,1B0\n", "the backward cannot start before a forward"),
        ("(0F0;0B0)OVERLAP_F_B,0F1,0B1\n", "the backward cannot start before a forward"),
        ("0F0,0F1,(0B0;0B1)OVERLAP_F_B\n1F0,1F1,1B0,1B1\n", "then a B or I, but not so in (0B0;0B1)OVERLAP_F_B"),
        ("0F0,0F1,(0B0;0F2)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n", "an F and then a B or I"),
        ("0F0,0F1,0I0,(0F2;0W0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n", "an F and then a B or I"),
    ],
)
def test_pairs_that_cannot_stand_side_by_side_are_named(text: str, reason: str) -> None:
    schedule = Schedule.from_csv(text)
    (problem,) = verify(schedule)
    assert problem.code == "PP-E318"
    assert reason in problem.message
    assert verify(replace(schedule, pairs=frozenset())) == []
    assert verify(lower(schedule))


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
    assert trace.pairs == schedule.pairs
    text = timeline_text(trace, 60)
    assert "k-t" in text
    (second,) = (line.partition("|")[2] for line in text.splitlines() if line.startswith("rank 1"))
    assert [letter for letter in "abcklm" if letter in second] == ["c", "k", "l"]
    picture = Picture("", "", trace, ())
    events = json.loads(perfetto_json(picture))["traceEvents"]
    marked = {event["name"]: event["args"]["pair"] for event in events if "pair" in event.get("args", {})}
    assert marked["0F2"] == marked["0B0"] == "(0F2;0B0)OVERLAP_F_B"
    assert len(marked) == 6
    assert '"pairs":[[[0,0,2],[1,0,0]],[[0,1,1],[1,1,0]],[[0,1,2],[1,1,1]]]' in timeline_html(picture)


@pytest.mark.parametrize("pp", [1, 2, 3, 5])
@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_1f1b_gets_the_next_forward_beside_every_backward(pp: int, vpp: int) -> None:
    for m in (1, 2, pp, pp + 1, 2 * pp, 3 * pp + 1):
        plain = make_schedule("1f1b" if vpp == 1 else "interleaved_1f1b", pp=pp, vpp=vpp, num_microbatches=m)
        paired = pair_up(plain)
        split = deferred_weights(paired)
        for schedule in (paired, split):
            assert verify(lower(schedule)) == []
            rows = zip(schedule.actions, plain.actions, strict=True)
            assert all({a for a in own if a.op is Op.F} == {a for a in row if a.op is Op.F} for own, row in rows)
        follows = [two for row in plain.actions for two in pairwise(row) if [a.op for a in two] == [Op.B, Op.F]]
        assert paired.pairs == {Pair(ahead, back) for back, ahead in follows}
        assert len(split.pairs) == len(paired.pairs) == len(split.split)
        more = [b - a for a, b in zip(in_flight(plain), in_flight(paired), strict=True)]
        assert set(more) <= {0, 1} and (m < 3 * pp or all(more))
