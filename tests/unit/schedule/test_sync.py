"""Sync events as data: merged into every rank's list they give the order of events that Megatron was seen to run."""

import json
from pathlib import Path

import pytest

from ppctl.schedule.action import Action, Op, Schedule
from ppctl.schedule.passes import split_before_late_weights
from ppctl.schedule.policies import POLICIES, make_schedule
from ppctl.schedule.sync_events import (
    HOLD,
    RELEASE,
    SyncKind,
    sync_of_chunks,
    sync_of_one_chunk,
    sync_without_pipelining,
)
from ppctl.schedule.verify import verify

RECORDS = json.loads((Path(__file__).parents[2] / "golden" / "trace.json").read_text())["records"]
NAMES = {SyncKind.HOLD: "no_sync_enter", SyncKind.RELEASE: "no_sync_exit"}
CALLS = {SyncKind.REDUCE: "grad_sync_func", SyncKind.GATHER: "param_sync_func"}


def schedule_of(args):
    """The compute-only schedule of a record."""
    vpp = args.get("vpp")
    name = "forward_only" if args.get("forward_only") else "interleaved_1f1b" if vpp else "1f1b"
    return make_schedule(
        name, pp=args["pp"], vpp=vpp or 1, num_microbatches=args["m"], microbatch_group_size=args.get("group")
    )


def plan_of(args, schedule, pp_rank):
    row, gathers = schedule.actions[pp_rank], args.get("param_sync", False)
    reduces = args.get("grad_sync", False) and not args.get("forward_only", False)
    if args["pp"] == 1:
        return sync_without_pipelining(row)
    if "vpp" not in args:
        return sync_of_one_chunk(row, reduces=reduces)
    return sync_of_chunks(
        row,
        pp_rank,
        stages=schedule.placement.stages_of(pp_rank),
        reduces=reduces,
        gathers=gathers,
    )


def events(schedule, plan, pp_rank):
    """What the rank does, in the words of the record."""

    def told(syncs):
        return [
            [NAMES[sync.kind]] if sync.kind in NAMES else [CALLS[sync.kind], schedule.placement.chunk_of(sync.stage)]
            for sync in syncs
        ]

    found = told(plan.start)
    for action in schedule.actions[pp_rank]:
        done = [str(action.op), action.mb, schedule.placement.chunk_of(action.stage)]
        found += [*told(plan.before.get(action, ())), done, *told(plan.after.get(action, ()))]
    return found + told(plan.end)


def told_in(record_events):
    return [e[:3] if e[0] == "F" else e for e in record_events if e[0] not in ("comm", "finalize")]


@pytest.mark.parametrize("record", [r for r in RECORDS if r["ok"]], ids=lambda r: json.dumps(r["args"]))
def test_events_come_in_the_order_of_the_original(record):
    schedule = schedule_of(record["args"])
    for rank in record["ranks"]:
        plan = plan_of(record["args"], schedule, rank["rank"])
        assert events(schedule, plan, rank["rank"]) == told_in(rank["events"])


@pytest.mark.parametrize(("pp", "vpp", "m"), [(4, 4, 1), (4, 3, 2), (3, 1, 2), (2, 2, 5)])
def test_every_chunk_is_gathered_before_its_first_forward_and_reduced_after_its_last_backward(pp, vpp, m):
    """Also where there are fewer microbatches than ranks, and where there is no second chunk."""
    schedule = make_schedule("interleaved_1f1b", pp=pp, vpp=vpp, num_microbatches=m)
    for pp_rank, row in enumerate(schedule.actions):
        stages = schedule.placement.stages_of(pp_rank)
        plan = sync_of_chunks(row, pp_rank, stages=stages, reduces=True, gathers=True)
        ready = {sync.stage for sync in plan.start}
        reduced = []
        backwards = []
        for action in row:
            ready |= {sync.stage for sync in plan.before.get(action, ())}
            assert action.op is not Op.F or action.stage in ready
            backwards += [action.stage] if action == Action(Op.B, action.stage, m - 1) else []
            reduced += [s.stage for s in plan.after.get(action, ()) if s.kind is SyncKind.REDUCE]
            assert set(reduced) <= set(backwards)
        reduced += [s.stage for s in plan.end if s.kind is SyncKind.REDUCE]
        assert sorted(reduced) == list(stages)


def test_where_backwards_are_split_gradients_are_held_but_in_both_halves_of_the_last_backward():
    """What is not put off gets its last share in I; the Ws between that and the last one must not start anything."""
    row = make_schedule("zb_h1", pp=3, num_microbatches=4).actions[1]
    plan = sync_of_one_chunk(row, reduces=False)
    assert plan.before == dict.fromkeys([Action(Op.I, 1, 3), Action(Op.W, 1, 3)], (RELEASE,))
    assert plan.after == {Action(Op.I, 1, 3): (HOLD,)}
    assert row.index(Action(Op.W, 1, 2)) > row.index(Action(Op.I, 1, 3)), "or there would be nothing to hold back"


def test_where_backwards_are_split_every_chunk_is_released_for_both_halves_of_its_last_backward():
    row = make_schedule("interleaved_zero_bubble", pp=2, vpp=2, num_microbatches=4).actions[1]
    plan = sync_of_chunks(row, 1, stages=(1, 3), reduces=False, gathers=False)
    ends = {Action(op, stage, 3) for op in (Op.I, Op.W) for stage in (1, 3)}
    assert plan.before == dict.fromkeys(ends, (RELEASE,))
    assert plan.after == dict.fromkeys(ends, (HOLD,))


def test_a_backward_that_is_last_in_an_order_of_ones_own_is_released():
    """The order of a file need not be that of the microbatches."""
    row = tuple(map(Action.parse, ("0F0", "0F1", "0B1", "0B0")))
    assert sync_of_one_chunk(row, reduces=False).before == {Action(Op.B, 0, 0): (RELEASE,)}
    assert sync_of_chunks(row, 0, stages=(0,), reduces=False, gathers=False).before == {Action(Op.B, 0, 0): (RELEASE,)}


def released_gradients(row, plan):
    """Stage -> what the gradients that are made while nothing is held are of: those of I, those of W, in order."""
    made, held = {}, True
    for action in row:
        held &= RELEASE not in plan.before.get(action, ())
        if not held and action.op in (Op.B, Op.I, Op.W):
            made.setdefault(action.stage, []).append(action)
        held |= HOLD in plan.after.get(action, ())
    return made


MIXED = (
    "0F0,0F1,0F2,0B0,0I1,0B2,0W1\n1F0,1B0,1F1,1B1,1F2,1I2,1W2\n",
    "0F0,0F1,0F2,0I1,0I0,(0F3;0B2)OVERLAP_F_B,0W0,0B3,0W1\n1F0,1F1,1F2,1B1,1B0,1B2,1F3,1B3\n",
    "0F0,0F1,2F0,(2F1;2B0)OVERLAP_F_B,2I1,0I0,2W1,0B1,0W0\n1F0,1F1,3F0,3B0,3F1,1I0,3B1,1B1,1W0\n",
)


@pytest.mark.parametrize("text", MIXED)
def test_what_is_released_is_the_last_gradient_of_every_parameter_under_whole_and_split_backwards(text):
    """A whole backward that stands before a W of its stage would release parameters whose last gradient W makes."""
    given = Schedule.from_csv(text)
    assert verify(given) == []
    schedule = split_before_late_weights(given)
    assert verify(schedule) == []
    for pp_rank, (row, before) in enumerate(zip(schedule.actions, given.actions, strict=True)):
        stages = schedule.placement.stages_of(pp_rank)
        if len(stages) == 1:
            plan = sync_of_one_chunk(row, reduces=False)
        else:
            plan = sync_of_chunks(row, pp_rank, stages=stages, reduces=False, gathers=False)
        for stage, made in released_gradients(row, plan).items():
            inputs = [action for action in row if action.stage == stage and action.op in (Op.B, Op.I)]
            weights = [action for action in row if action.stage == stage and action.op in (Op.B, Op.W)]
            assert made in ([weights[-1]], [inputs[-1], weights[-1]])
            assert made[0] == inputs[-1]
        changed = set(before) - set(row)
        assert changed <= {Action(Op.B, stage, mb) for stage in stages for mb in range(schedule.num_microbatches)}
        assert [(a.stage, a.mb) for a in row if a.op in (Op.B, Op.I)] == [
            (a.stage, a.mb) for a in before if a.op in (Op.B, Op.I)
        ], "nothing else moves"
    assert any(set(before) - set(row) for row, before in zip(schedule.actions, given.actions, strict=True))


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.trains])
def test_no_policy_has_a_whole_backward_that_is_last_before_a_w(name):
    schedule = make_schedule(name, pp=3, vpp=POLICIES[name].chunks, num_microbatches=7)
    assert split_before_late_weights(schedule) == schedule
