"""Who waits for whom, who is waited for in the end, and when nothing has moved for too long."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from unit_plan import plan

from ppctl.hang.progress import GRACE, LEAST, TIMES, Limits, Progress
from ppctl.hang.verdict import _ORDER, root, verdict, waits
from ppctl.plan import Plan
from ppctl.records.rank_records import EXCHANGING_AXES, NO_ACTION, STATES, RankState
from ppctl.schedule.action import INPUT_GRADIENTS, MESSAGES, Action, B, F, I, Op, Schedule, W, deps, input_gradient_of

PLANS = {
    "1f1b": dict(pp=4, gbs=8, mbs=1),
    "interleaved": dict(pp=4, vpp=2, gbs=8, mbs=1),
    "two pipelines": dict(pp=2, dp=2, gbs=16, mbs=1),
    "I and W": dict(pp=4, gbs=8, mbs=1, pipeline__pp_schedule="zb_h1"),
    "I and W on a V": dict(pp=3, gbs=8, mbs=1, pipeline__pp_schedule="zbv_zero_bubble"),
    "pairs": dict(pp=2, gbs=8, mbs=1, pipeline__pp_schedule="dualpipev"),
}

AXES = {
    "tp": dict(tp=2),
    "cp": dict(cp=2),
    "ep": dict(dp=2, ep=2, model__num_moe_experts=4),
    "etp": dict(tp=2, sp=True, model__num_moe_experts=4),
}


def stuck_at(schedule: Schedule, culprit: int, at: int) -> list[int]:
    """Where every pp_rank stands when one never gets past entry `at` of its list: all run until nobody can go on."""
    positions = [0] * len(schedule.actions)
    done: set = set()
    moved = True
    while moved:
        moved = False
        for pp_rank, row in enumerate(schedule.actions):
            while positions[pp_rank] < len(row) and (pp_rank, positions[pp_rank]) != (culprit, at):
                action = row[positions[pp_rank]]
                sends = action.op.name.startswith("SEND")
                if (
                    not sends
                    and action.op.name != "REDUCE_GRAD"
                    and any(need not in done for need in deps(action, schedule))
                ):
                    break
                done.add(action)
                positions[pp_rank] += 1
                moved = True
    return positions


def stands(made: Plan, rank: int, at: int, *, flushed: bool, working: bool = False) -> RankState:
    """A rank that is through its list waits for its sends; only where they are delivered it goes on."""
    over = at >= len(made.schedule.actions[made.for_rank(rank).pp_rank])
    state, at = ("updating", -1) if over and flushed else ("training", at)
    return RankState(rank, state, 3, at, 10.0, working=working, host=f"host{rank}")


def every_way(test: Callable) -> Callable:
    """Several sizes, random places, and ranks that are through with their list before or behind its flush."""
    for mark in (
        pytest.mark.parametrize("sizes", PLANS.values(), ids=PLANS),
        pytest.mark.parametrize("seed", range(8)),
        pytest.mark.parametrize("flushed", [True, False]),
    ):
        test = mark(test)
    return test


@every_way
def test_the_rank_that_stands_still_is_found(sizes: dict, seed: int, flushed: bool) -> None:
    made, draw = plan(**sizes), random.Random(seed)
    culprit = draw.randrange(made.sizes.pp)
    row = made.schedule.actions[culprit]
    at = draw.choice([i for i, action in enumerate(row) if action.op not in MESSAGES and action.mb >= 0])
    positions = stuck_at(made.schedule, culprit, at)
    states = []
    for rank in range(made.sizes.world):
        pp_rank = made.for_rank(rank).pp_rank
        states.append(stands(made, rank, positions[pp_rank], flushed=flushed, working=pp_rank == culprit))
    found = waits(made, states)
    told = root(found)
    assert told is not None
    assert made.for_rank(told.state.rank).pp_rank == culprit
    assert str(told.current) == str(row[at])


@every_way
def test_a_message_that_was_sent_and_never_comes_is_a_dead_edge(sizes: dict, seed: int, flushed: bool) -> None:
    """One rank waits for ever for what its neighbour has sent; all others wait for the two in the end."""
    made, draw = plan(**sizes), random.Random(seed)
    receiver = draw.randrange(made.sizes.pp)
    row = made.schedule.actions[receiver]
    waiting = [i for i, action in enumerate(row) if message(made.schedule, receiver, action) is not None]
    at = draw.choice(waiting)
    positions = stuck_at(made.schedule, receiver, at)
    states = [
        stands(made, rank, positions[made.for_rank(rank).pp_rank], flushed=flushed) for rank in range(made.sizes.world)
    ]
    told = verdict(made, states, 5.0, 15.0)
    need = message(made.schedule, receiver, row[at])
    assert need is not None
    ends = {made.schedule.placement.rank_of(need.stage), receiver}
    assert told.code == "PP-E707"
    named = {int(rank) for rank in re.findall(r"rank (\d+) on host\1", told.message)}
    assert {made.for_rank(rank).pp_rank for rank in named} == ends
    assert f"{need} was sent" in told.message


def message(schedule: Schedule, pp_rank: int, action: Action) -> Action | None:
    """What another rank makes for an action that computes."""
    if action.op not in (F, *INPUT_GRADIENTS):
        return None
    stage = action.stage + (-1 if action.op is F else 1)
    if not 0 <= stage < schedule.placement.num_stages or schedule.placement.rank_of(stage) == pp_rank:
        return None
    return Action(F, stage, action.mb) if action.op is F else input_gradient_of(stage, action.mb, schedule)


@pytest.mark.parametrize("op", [I, W], ids=["in an I", "in a W"])
@pytest.mark.parametrize("stopped", [False, True])
def test_who_stands_still_in_half_a_backward_is_named_with_stage_and_microbatch(op: Op, stopped: bool) -> None:
    """Its neighbour waits for what comes behind it, and the other stages for the neighbour."""
    made = plan(pp=3, gbs=8, mbs=1, pipeline__pp_schedule="zb_h1")
    row = made.schedule.actions[1]
    at = row.index(Action(op, 1, 3))
    states = [
        stands(made, rank, index, flushed=True, working=rank == 1 and not stopped)
        for rank, index in enumerate(stuck_at(made.schedule, 1, at))
    ]
    states[1] = replace(states[1], stopped=stopped)
    told = verdict(made, states, 200.0, 210.0)
    assert (told.rank, told.code, told.stage, told.action) == (1, "PP-E706", 1, f"1{op}3")
    assert ("this rank's process is stopped" in told.message) == stopped
    before = next(action for action in reversed(row[:at]) if action.op not in MESSAGES)
    behind, own, ahead = told.place.splitlines()
    assert own.startswith(f"rank 1: step 4, in 1{op}3, after {before}, for 200 s")
    assert re.search(r"waits for rank 1 \(1I\d\)$", behind), "for an I of its neighbour, never for a W"
    assert re.search(r"waits for rank 1 \(1F\d\)$", ahead)


@pytest.mark.parametrize(("working", "half"), [(True, "forward"), (False, "forward"), (False, "backward")])
def test_a_pair_is_named_where_both_halves_compute_and_else_the_half_that_waits(working: bool, half: str) -> None:
    ahead = dict(launch__transport="channels", parallel__overlap_p2p_comm=True, parallel__batch_p2p_comm=False)
    experts = dict(dp=2, ep=2, model__num_moe_experts=4)  # without their exchange nothing runs in pairs
    made = plan(pp=2, gbs=16, mbs=1, pipeline__pp_schedule="dualpipev", **ahead, **experts)
    row = made.schedule.actions[0]
    pair = next(pair for pair in made.schedule.pairs if pair.backward == (B, 0, 2))
    at = row.index(getattr(pair, half))
    other = RankState(2, "training", 3, 0, 10.0, working=True, host="host1")  # of the same pipeline
    told = verdict(made, [RankState(0, "training", 3, at, 9.0, working=working, host="host0"), other], 5.0, 15.0)
    where = f"in {pair.forward} beside {pair.backward}, after" if working else f"in {row[at]}, after"
    assert where in told.place
    assert told.message.endswith(f"it runs {pair.forward} beside {pair.backward}") == working
    assert (f"waits for rank 2 (1B{pair.backward.mb}" in told.place) == (half == "backward")


def test_a_sender_that_still_computes_is_no_dead_edge() -> None:
    """What it has sent last may wait in its queue: a stopped process delivers nothing."""
    made = plan(pp=2, gbs=8, mbs=1)
    first = [str(action) for action in made.schedule.actions[0]]
    second = [str(action) for action in made.schedule.actions[1]]
    states = [
        RankState(0, "training", 3, first.index("0F1"), 9.0, working=True),
        RankState(1, "training", 3, second.index("1F0"), 8.0),
    ]
    (told,) = {wait.state.rank for wait in [root(waits(made, states))] if wait is not None}
    assert told == 0
    stopped = [replace(states[0], working=False, stopped=True), states[1]]
    assert "stopped" in verdict(made, stopped, 5.0, 15.0).message
    receiver = verdict(
        made, [replace(states[0], index=first.index("0B0")), replace(states[1], stopped=True)], 5.0, 15.0
    )
    assert (receiver.rank, receiver.code) == (1, "PP-E706"), "it was sent to a process that is stopped"


def test_a_silent_hosts_last_word_is_no_dead_edge() -> None:
    """Its record is old: what it waited for then has been sent since, and nobody knows whether it came."""
    made = plan(pp=2, gbs=8, mbs=1)
    first, second = ([str(action) for action in row] for row in made.schedule.actions)
    lost = RankState(1, "training", 3, second.index("1F1"), 8.0, host="far")
    states = [RankState(0, "training", 3, first.index("0B0"), 9.0, host="near"), lost]
    assert verdict(made, states, 5.0, 15.0).code == "PP-E707"
    told = verdict(made, [states[0], replace(lost, stopped=True)], 5.0, 15.0)
    assert (told.rank, told.code) == (1, "PP-E706")
    assert "its host far does not answer" in told.message


def test_in_a_collective_whoever_is_behind_is_waited_for() -> None:
    made = plan(pp=2, gbs=8, mbs=1)
    found = waits(made, [RankState(0, "saving", 5, -1, 1.0), RankState(1, "updating", 5, -1, 0.5)])
    assert [wait.on for wait in found] == [1, None]
    assert root(found) is found[1]


def exchanged(made: Plan, where: str, counts: dict[int, tuple[int, ...]]) -> list[RankState]:
    """All ranks compute in an action of their lists, having started so many exchanges."""
    states = []
    for rank, own in counts.items():
        row = [str(action) for action in made.schedule.actions[made.for_rank(rank).pp_rank]]
        at = row.index(where) if where in row else row.index("1F0")
        states.append(RankState(rank, "training", 3, at, 10.0 - rank, working=where in row, exchanges=own))
    return states


@pytest.mark.parametrize("axis", EXCHANGING_AXES)
def test_a_rank_that_does_not_come_to_an_exchange_is_named_with_the_axis_and_those_that_wait(axis: str) -> None:
    """Who is behind is not the one that is longest in its action."""
    made = plan(pp=2, gbs=8, mbs=1, **AXES[axis])
    place = EXCHANGING_AXES.index(axis)
    counts = {rank: tuple(7 * (at == place) for at in range(4)) for rank in range(4)}
    counts[0] = tuple(6 * (at == place) for at in range(4))
    told = verdict(made, exchanged(made, "0F0", counts), 5.0, 15.0)
    assert (told.rank, told.action, told.code) == (0, "0F0", "PP-E706")
    assert told.message.endswith(f"wait for this one in the end, rank 1 in an exchange along {axis}")
    rows = told.place.splitlines()
    assert rows[1].endswith(f"waits for rank 0 in an exchange along {axis}")
    assert rows[2].endswith("waits for rank 0 (0F0)")


def test_an_exchange_that_all_have_started_and_that_does_not_end_is_a_connection() -> None:
    made = plan(pp=2, gbs=8, mbs=1, tp=2)
    states = exchanged(made, "0F0", dict.fromkeys(range(4), (7, 0, 0, 0)))
    told = verdict(made, states, 5.0, 15.0)
    assert "ranks 0 and 1 have all started the same collective along tp, but it does not end" in told.message
    later = [states[0], replace(states[1], index=states[1].index + 1), *states[2:]]
    assert "exchange" not in verdict(made, later, 5.0, 15.0).message


def test_behind_its_list_a_rank_waits_for_who_has_started_fewer_exchanges() -> None:
    made = plan(tp=2, cp=2, gbs=8, mbs=1)
    states = [RankState(rank, "updating", 3, NO_ACTION, 9.0, exchanges=(7, 7, 0, 0)) for rank in range(4)]
    states[2] = replace(states[2], exchanges=(7, 6, 0, 0))
    found = waits(made, states)
    assert [(wait.on, wait.axis) for wait in found] == [(2, "cp"), (None, None), (None, None), (None, None)]
    assert root(found) is found[2]


def standing(state: str, step: int, since: float) -> list[RankState]:
    return [RankState(0, state, step, 0, since)]


def test_each_phase_has_its_limit() -> None:
    progress = Progress(Limits(start=30, first_step=900, step=None), now=0.0)
    assert progress.late(standing("starting", 0, 1.0), 31.0) is None
    assert progress.late(standing("starting", 0, 1.0), 32.0) == 31.0
    assert progress.late(standing("training", 0, 40.0), 939.0) is None
    assert progress.late(standing("training", 0, 40.0), 941.0) == 901.0
    for step in range(1, 5):
        progress.late(standing("training", step, 100.0 + 20.0 * step), 100.0 + 20.0 * step)
    assert progress.limit(standing("training", 4, 180.0)) == TIMES * 80.0  # the first step took from 40 to 120
    assert progress.limit(standing("saving", 4, 180.0)) == 900


def test_loading_kernels_says_nothing_of_how_long_a_step_takes() -> None:
    """On a GPU layers are compiled before the first step: ten times those minutes would be no limit for a step."""
    progress = Progress(Limits(start=30, first_step=3600, step=None), now=0.0)
    assert progress.late(standing("loading kernels", 0, 40.0), 3600.0) is None
    for step in range(4):
        progress.late(standing("training", step, 3600.0 + step), 3600.0 + step)
    assert progress.limit(standing("training", 3, 3603.0)) == LEAST
    assert progress.limit(standing("recording", 3, 3603.0)) == 3600


def test_every_state_has_its_place_in_the_order_of_a_run() -> None:
    assert sorted(_ORDER) == sorted(STATES)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(start=1800, first_step=3600, step=None),  # the defaults
        Limits(start=7200, first_step=60, step=None),  # a checkpoint that takes long to load
        Limits(start=30, first_step=60, step=14400),
        Limits(start=5, first_step=5, step=None),
    ],
)
@pytest.mark.parametrize("slowest", [0.1, 700.0, 5000.0])
def test_the_watch_ends_a_job_before_any_alarm_and_any_alarm_before_a_process_group_gives_up(
    limits: Limits, slowest: float
) -> None:
    progress = Progress(limits, now=0.0)
    for step in range(3):
        progress.late(standing("training", step, step * slowest), step * slowest)
    watch = max(
        progress.limit(standing(state, 2, 0.0)) for state in ("starting", "loading", "training", "saving", "updating")
    )
    alarm = limits.longest + GRACE
    assert watch <= limits.longest < alarm < limits.of_groups.total_seconds()


def test_the_adaptive_limit_is_never_short() -> None:
    progress = Progress(Limits(start=30, first_step=60, step=None), now=0.0)
    for step in range(4):
        progress.late(standing("training", step, float(step)), float(step))
    assert progress.limit(standing("training", 3, 3.0)) == LEAST


def test_a_run_that_goes_back_keeps_the_limit_of_its_steps() -> None:
    """Loading and the steps up to the bad one again are no one step."""
    progress = Progress(Limits(start=30, first_step=3600, step=None), now=0.0)
    for place, step in enumerate([*range(10), *range(4, 12)]):
        since = 20.0 * place + 600.0 * (place > 9)
        progress.late(standing("training", step, since), since)
    assert progress.limit(standing("training", 11, 0.0)) == TIMES * 20.0


def test_a_finished_job_is_never_late() -> None:
    progress = Progress(Limits(start=30, first_step=60, step=1), now=0.0)
    assert progress.late(standing("done", 9, 1.0), 1e6) is None
