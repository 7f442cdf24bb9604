"""Every schedule, message mode and placement on devices that compute later: the bits of a plain loop, and no hang."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pipeline
import pytest
from emulated_pipeline import EmulatedCommunicator, emulation, expected, make_step, run_step
from emulated_world import Deadlock, World
from pairwise import pairwise

from ppctl.comm.buffers import Message
from ppctl.comm.modes import Modes
from ppctl.engine.stage import StageProgram
from ppctl.errors import ScheduleError
from ppctl.schedule.action import COMPUTE, Action, B, F, Op, Placement, Schedule, deps
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import POLICIES, make_schedule
from ppctl.schedule.verify import verify
from ppctl.schedule.zero_bubble import zbv_zero_bubble

MODES = {
    "channels": (Modes(), False),
    "batched": (Modes(batched=True), True),
    "batched, synchronised": (Modes(batched=True, sync=True), True),
    "one by one": (Modes(), True),
    "channels, variable": (Modes(variable=True), False),
    "batched, variable": (Modes(batched=True, variable=True), True),
    "one by one, variable": (Modes(variable=True), True),
}
"""How messages travel, and whether the list has them in batches."""

AT_THE_END = {"at the end"}
MAY_WAIT = {mode: AT_THE_END for mode in MODES}
MAY_WAIT["batched, synchronised"] = AT_THE_END | {"torch.cuda.synchronize"}
MAY_WAIT |= {mode: AT_THE_END | {"channels.py: shapes_of"} for mode in MODES if "variable" in mode}
"""What hosts wait for their devices for: the shapes of messages that vary, and what batch_p2p_sync asks for."""

WORLDS = {
    "connected": {},
    "connects on the first message": {"connected": False},
    "eager": {"eager": 1 << 20},
    "eager if small": {"eager": 64},
    "loads kernels at their first launch": {"lazy_loading": True},
}

ORDERS = {
    "gpipe": (1, 2, 3),
    "1f1b": (1,),
    "1f1b, warmed up": (1,),
    "interleaved_1f1b": (2, 3),
    "interleaved_1f1b, wide groups": (2, 3),
    "one V": (2,),
    "two Vs": (4,),
    "any order": (1, 2, 3),
}
"""Orders of computing, and with how many stages a rank."""


def one_v(pp: int, m: int) -> Schedule:
    """ZBV's list with its backwards in one piece."""
    split = zbv_zero_bubble(pp, 2, m, pp)
    whole = [tuple(Action(B, a.stage, a.mb) if a.op is Op.I else a for a in row) for row in split.actions]
    rows = tuple(tuple(action for action in row if action.op is not Op.W) for row in whole)
    return replace(split, name="one V", actions=rows)


def any_order(kind: str, pp: int, vpp: int, m: int) -> Schedule:
    """What can be computed, in an order that a seed chooses; microbatches keep theirs on every stage."""
    place, draw = Placement(kind, pp, pp * vpp), random.Random(m)
    empty = Schedule(f"any order in a {kind}", place, m, ((),) * pp)
    rows: list[list[Action]] = [[] for _ in range(pp)]
    lanes = {(op, stage): 0 for op in (F, B) for stage in range(place.num_stages)}
    done: set[Action] = set()
    while lanes:
        following = [Action(op, stage, mb) for (op, stage), mb in lanes.items()]
        action = draw.choice([each for each in following if done.issuperset(deps(each, empty))])
        rows[place.rank_of(action.stage)].append(action)
        done.add(action)
        lanes[action.op, action.stage] += 1
        if lanes[action.op, action.stage] == m:
            del lanes[action.op, action.stage]
    return replace(empty, actions=tuple(map(tuple, rows)))


def computed(order: str, pp: int, vpp: int, m: int) -> Schedule:
    """The order without its messages."""
    if order == "one V":
        return one_v(pp, m)
    if order == "two Vs":
        return any_order("v", pp, vpp, m)
    if order == "any order":
        return any_order("loop", pp, vpp, m)
    policy, _, variant = order.partition(", ")
    more = {"": {}, "warmed up": {"extra_warmup": pp - 1}, "wide groups": {"microbatch_group_size": pp + 1}}[variant]
    return make_schedule(policy, pp=pp, vpp=vpp, num_microbatches=m, **more)


@cache
def scheduled(mode: str, order: str, pp: int, vpp: int, m: int, capacity: int | None) -> Schedule | None:
    """The schedule, if `verify` accepts it."""
    batched = MODES[mode][1]
    schedule = lower(computed(order, pp, vpp, m), batched=batched, capacity=None if batched else capacity)
    return None if verify(schedule) else schedule


ENOUGH = 600
"""Rows that hold every pair of values: 300 and 1,500 hold the same ones."""
PARTS = 5

Row = tuple[str, str, int, int, int | None, bool, str, int]


def grid(pp: int) -> list[Row]:
    """(mode, order, vpp, m, capacity, deallocate, world, seed)."""
    counts = sorted({1, 2, pp, pp + 1, 2 * pp + 1})
    orders = [(order, vpp) for order, several in ORDERS.items() for vpp in several]
    return [
        (mode, order, vpp, *rest)
        for mode, (order, vpp), *rest in itertools.product(
            MODES, orders, counts, (None, 1, 3), (True, False), WORLDS, range(3)
        )
    ]


def drawn(pp: int, count: int) -> Iterator[tuple[Row, Schedule]]:
    """`count` rows of the grid that `verify` accepts, by the seed `pp`."""
    rows = random.Random(pp).sample(grid(pp), 4 * count)
    cases = ((row, scheduled(*row[:2], pp, *row[2:5])) for row in rows)
    return itertools.islice(((row, schedule) for row, schedule in cases if schedule is not None), count)


def check(monkeypatch: pytest.MonkeyPatch, row: Row, schedule: Schedule) -> None:
    mode, _, _, _, _, deallocate, world, seed = row
    modes, pp = MODES[mode][0], schedule.placement.pp
    with monkeypatch.context() as patch:
        if modes.variable:
            patch.setattr(pipeline, "data", pipeline.ragged)
        devices = World(pp, seed, **WORLDS[world])
        found = run_step(
            devices,
            schedule,
            modes=modes,
            dry="loads" in world,
            connect=modes.variable or (not modes.batched and "loads" in world),
            deallocate_pipeline_outputs=deallocate,
        )
        assert found.equals(expected(schedule)), row
    for gpu in devices.gpus:
        assert {why for why in gpu.waits if not why.startswith("to load")} <= MAY_WAIT[mode], row


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_whatever_moves_first_a_step_ends_with_the_bits_of_a_plain_loop(monkeypatch, pp: int) -> None:
    for row, schedule in drawn(pp, {1: 4, 2: 10, 3: 8, 4: 5}[pp]):
        check(monkeypatch, row, schedule)


@pytest.mark.whole
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_every_pair_of_values_gives_the_bits_of_a_plain_loop(monkeypatch, pp: int, part: int) -> None:
    cases = dict(drawn(pp, ENOUGH))
    for row in pairwise(cases)[part::PARTS]:
        check(monkeypatch, row, cases[row])


@pytest.mark.parametrize("mode", MODES)
def test_a_v_turns_without_a_message_in_every_mode(monkeypatch, mode: str) -> None:
    for order, vpp in (("one V", 2), ("two Vs", 4)):
        schedule = scheduled(mode, order, 2, vpp, 3, None)
        assert schedule is not None and schedule.placement.kind == "v"
        check(monkeypatch, (mode, order, vpp, 3, None, True, "connected", 1), schedule)


def test_with_variable_shapes_channels_are_connected_before_the_first_message(monkeypatch) -> None:
    """A host that reads a header off its device enqueues nothing that the other one, which connects, waits for.

    So the engine is refused before it sends; without that it stands still.
    """
    monkeypatch.setattr(pipeline, "data", pipeline.ragged)
    schedule = scheduled("channels, variable", "interleaved_1f1b, wide groups", 2, 2, 5, None)
    with pytest.raises(ScheduleError, match="connect=True") as refused:
        run_step(World(2, connected=False), schedule, modes=Modes(variable=True))
    assert [problem.code for problem in refused.value.problems] == ["PP-E390"]
    with monkeypatch.context() as patch, pytest.raises(Deadlock) as stood:
        patch.setattr(EmulatedCommunicator, "connected", property(lambda _: True, lambda *_: None), raising=False)
        run_step(World(2, connected=False), schedule, modes=Modes(variable=True))
    hosts = sorted(line.split(" waits ")[1] for line in str(stood.value).splitlines() if line.startswith("host"))
    assert hosts[0].startswith("for all of") and hosts[1] == "for an event"
    now = run_step(World(2, connected=False), schedule, modes=Modes(variable=True), connect=True)
    assert now.equals(expected(schedule))


@pytest.mark.parametrize("mode", ["channels", "batched", "one by one"])
def test_forwards_alone_end_with_the_same_losses(mode: str) -> None:
    modes, batched = MODES[mode]
    schedule = lower(make_schedule("forward_only", pp=2, vpp=2, num_microbatches=5), batched=batched)
    world = World(2, seed=1)
    with emulation(world):
        losses = pipeline.join(world.run(make_step(world, schedule, modes=modes))).losses
    assert losses == pipeline.plain_loop(4, 5).losses


def test_the_orders_hold_every_policy_that_runs() -> None:
    """A new policy is added to the grid."""
    named = {order.partition(",")[0] for order in ORDERS}
    for name in POLICIES.keys() - named - {"forward_only"}:
        made = next(
            make_schedule(name, pp=2, vpp=vpp, num_microbatches=4) for vpp in (1, 2) if POLICIES[name].runs(vpp)
        )
        assert made.split, name
        assert any(action.op in COMPUTE for row in made.actions for action in row)


def test_nodes_of_a_backward_run_in_a_thread_of_their_ranks_device() -> None:
    """As on CUDA, whichever thread of the host asks: pairs rest on it."""
    where: set[tuple[int, str]] = set()

    def wrap(program: StageProgram, rank: int) -> StageProgram:
        def forward(mb: int, inputs: Message) -> Message:
            outputs = program.forward(mb, inputs)
            outputs[0].register_hook(lambda _: where.add((rank, threading.current_thread().name.partition("_")[0])))
            return outputs

        return replace(program, forward=forward)

    schedule = lower(make_schedule("dualpipev", pp=2, vpp=2, num_microbatches=4))
    assert schedule.pairs
    assert run_step(World(2), schedule, wrap=wrap).equals(expected(schedule))
    assert where == {(rank, "autograd") for rank in range(2)}
