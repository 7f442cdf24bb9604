"""The engine on devices that compute later, over messages with NCCL's manners: what the first run on GPUs would meet.

The findings are those of the audit of commit 6c28470. Each is shown on what the code did then, beside what it does now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from devices import Beat
from emulated_gpu import CURRENT, Entry, Gpu, Mark
from emulated_nccl import Backend, Dist
from emulated_pipeline import (
    CHANNELS,
    EmulatedCommunicator,
    EmulatedConnections,
    emulation,
    expected,
    make_step,
    run_step,
)
from emulated_world import Deadlock, World
from unit_plan import plan

from ppctl.comm import connections
from ppctl.comm.channels import DirectEnd, PeerLost
from ppctl.comm.modes import Modes
from ppctl.engine.engine_error import EngineError
from ppctl.engine.pace import AHEAD
from ppctl.engine.stage import StageProgram
from ppctl.hang.verdict import verdict
from ppctl.plan import Plan
from ppctl.records.rank_records import RankState
from ppctl.schedule.action import COMPUTE, RECEIVES, Action, B, F, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule


def lowered(name: str, pp: int, vpp: int, m: int, **how) -> Schedule:
    return lower(make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m), **how)


# Finding 1: the two ends of a channel look for each other under different names.


class OldConnections(EmulatedConnections):
    """`_pair_lane` of commit 6c28470: `new_group(ends, use_local_synchronization=True)`, and torch named the group.

    The rule is `_hash_ranks_to_str` of torch/distributed/distributed_c10d.py: the group's ranks and the number of
    groups that the process has made so far. The world's, the pipeline's and the replicas' every rank had made.
    """

    groups = 3

    def name_of(self, what: str, members: Sequence[int]) -> str:
        ranks = [self.ranks[member] for member in members]
        name = "_".join([*map(str, ranks), str(self.groups)])
        self.groups += 1
        return hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()


CUTS = [(2, 2, 4, 0), (3, 1, 4, 2), (4, 1, 6, 4), (4, 2, 8, 6), (8, 1, 14, 12)]


@pytest.mark.parametrize(("pp", "vpp", "channels", "apart"), CUTS)
def test_channels_named_by_the_number_of_groups_do_not_meet(pp: int, vpp: int, channels: int, apart: int) -> None:
    schedule = lowered("interleaved_1f1b" if vpp > 1 else "1f1b", pp, vpp, 2 * pp)
    assert len(schedule.capacities) == channels

    def disagree(kind: type[EmulatedConnections], *, variable: bool = False) -> int:
        world = World(pp)
        ends = [
            EmulatedCommunicator(kind(world, rank, pp), schedule, Modes(variable=variable))._ends for rank in range(pp)
        ]

        def name(rank: int, channel) -> str:
            end = ends[rank][channel]
            return (end.body if variable else end).backend[0].connection.name

        return sum(name(each.source, each) != name(each.target, each) for each in schedule.capacities)

    assert disagree(OldConnections) == apart
    assert disagree(EmulatedConnections) == disagree(EmulatedConnections, variable=True) == 0


@pytest.mark.parametrize("connect", [True, False], ids=["connected ahead", "on the first message"])
def test_ranks_that_look_for_each_other_under_different_names_wait_for_ever(connect: bool) -> None:
    schedule = lowered("1f1b", 3, 1, 3)
    with pytest.raises(Deadlock, match=r"host \d waits for all of [0-9a-f]{40}"):
        run_step(World(3, connected=False), schedule, connections=OldConnections, connect=connect)
    now = run_step(World(3, connected=False), schedule, connect=connect)
    assert now.equals(expected(schedule))


def test_two_ranks_never_saw_it() -> None:
    schedule = lowered("interleaved_1f1b", 2, 2, 2)
    then = run_step(World(2, connected=False), schedule, connections=OldConnections, connect=True)
    assert then.equals(expected(schedule))


# Finding 2: the first launch of a kernel waits for the device, and the device for a message that follows from it.


def receives_first(schedule: Schedule) -> Schedule:
    """The list with every receive as early as its channel's order and capacity allow: how it was lowered then."""
    rows = []
    for row in schedule.actions:
        first = next(action for action in row if action.op in RECEIVES)
        rows.append((first, *(action for action in row if action != first)))
    return replace(schedule, actions=tuple(rows))


def test_a_receive_ahead_of_everything_hangs_where_kernels_are_loaded_lazily() -> None:
    early = receives_first(lowered("1f1b", 3, 1, 3))
    assert run_step(World(3), early).equals(expected(early)), "it is right where kernels are there"
    with pytest.raises(Deadlock, match="to load"):
        run_step(World(3, lazy_loading=True), early)


def test_without_a_dry_pass_two_ranks_can_each_load_a_kernel_behind_the_other_ones_message() -> None:
    """The order of the list alone does not help: a kernel is first used in the middle of an action."""
    both = r"host 0 waits for its device, to load[\s\S]*host 1 waits for its device, to load"
    with pytest.raises(Deadlock, match=both):
        for seed in range(8):
            run_step(World(2, seed, lazy_loading=True), lowered("interleaved_1f1b", 2, 2, 4))


def test_neither_lazy_connections_nor_lazy_kernels_hang_but_both_together_do() -> None:
    """Why a run connects its channels before the first step: a host that connects enqueues nothing meanwhile."""
    with pytest.raises(Deadlock, match=r"for all of[\s\S]*to load"):
        for seed in range(8):
            run_step(World(2, seed, lazy_loading=True, connected=False), lowered("1f1b", 2, 1, 2))


# Finding 3: streams that share a queue wait for each other.


def test_few_queues_can_hang_what_many_do_not() -> None:
    schedule = lowered("1f1b", 4, 1, 4)
    with pytest.raises(Deadlock):
        run_step(World(4, queues=1), schedule)
    for seed in range(3):
        assert run_step(World(4, seed, queues=32), schedule).equals(expected(schedule))


# Finding 6: the host runs ahead of its device.


@dataclass
class State(Beat):
    """A rank's heartbeat, also outside its list."""

    name: str = "training"

    def leave(self) -> None:
        """The list is over: gradients are summed and weights updated, as a rank sees it."""
        self.enter(-1)
        self.name = "updating"


class Job:
    """A step of a plan of which one rank's device stops in one action, and what is known of its ranks."""

    def __init__(
        self, schedule: Schedule, stuck: str, seed: int, *, modes: Modes = CHANNELS, watchdog: bool = False
    ) -> None:
        self.modes = modes
        self.schedule, self.stuck = schedule, Action.parse(stuck)
        self.world = World(schedule.placement.pp, seed, watchdog=watchdog)
        self.world.hosts_first = 1.0
        clock = [0]
        self.beats = [State(clock) for _ in self.world.gpus]
        self.finished: list[list[Action]] = [[] for _ in self.world.gpus]
        """What each device has computed, as it says itself."""
        self.states: list[RankState] = []
        self.world.on_still = self.note
        self.finished_at_failure: dict[int, int] = {}
        """How much of its list a device had computed when its host failed."""

    def note(self) -> None:
        """What `ppctl status` would read when nothing moves any more, for the first time."""
        if not self.states:
            self.states = [
                RankState(rank, beat.name, 0, beat.index, float(beat.since), beat.working)
                for rank, beat in enumerate(self.beats)
            ]

    def wrap(self, program: StageProgram, rank: int) -> StageProgram:
        gpu: Gpu = self.world.gpus[rank]

        @contextmanager
        def computing(action: Action) -> Iterator[None]:
            if action == self.stuck:
                gpu.stop()
            yield
            gpu.put(CURRENT, Entry(f"end of {action}", lambda: self.finished[rank].append(action)))

        def forward(mb, inputs):
            with computing(Action(F, program.stage, mb)):
                return program.forward(mb, inputs)

        def backward(mb, run) -> None:
            with computing(Action(B, program.stage, mb)):
                run()

        return replace(program, forward=forward, around_backward=backward)

    def play(self, *, paced: bool = True):
        step = make_step(self.world, self.schedule, modes=self.modes, wrap=self.wrap, heartbeats=self.beats)

        def host(rank: int) -> None:
            try:
                step(rank)
            except EngineError:
                self.finished_at_failure[rank] = len(self.finished[rank])
                raise
            self.beats[rank].leave()

        with emulation(self.world, paced=paced):
            return self.world.play(host, to_the_end=True)

    def ahead(self, rank: int, named: Action) -> int:
        """Computations in front of an action of the list that the rank's device had not finished at the failure."""
        row = self.schedule.actions[rank]
        return sum(action.op in COMPUTE for action in row[: row.index(named)]) - self.finished_at_failure[rank]


PLAN = plan(
    pp=3,
    model__num_layers=3,
    gbs=8,
    mbs=1,
    launch__transport="channels",
    parallel__overlap_p2p_comm=True,
    parallel__batch_p2p_comm=False,
)


def test_hosts_without_a_bound_are_all_in_the_same_collective_when_a_device_stops() -> None:
    """The engine of then had no pace: `HostPace` is what it did."""
    then, now = Job(PLAN.schedule, "1B2", seed=0), Job(PLAN.schedule, "1B2", seed=0)
    then.play(paced=False)
    assert then.stuck not in then.finished[1]
    assert {(state.state, state.index) for state in then.states} == {("updating", -1)}
    assert "all ranks wait in the same collective" in verdict(PLAN, then.states, 200.0, 1e6).message
    now.play()
    told = verdict(PLAN, now.states, 200.0, 1e6)
    assert (told.rank, told.action, told.code) == (1, "1B2", "PP-E706")


def test_without_a_bound_every_message_of_the_step_stays_allocated() -> None:
    def memory(m: int, *, paced: bool) -> tuple[int, int]:
        schedule, world = lowered("1f1b", 2, 1, m), World(2)
        world.hosts_first = 1.0  # the host is as fast as it can be
        assert run_step(world, schedule, paced=paced).equals(expected(schedule))
        return world.gpus[0].memory.most_held, world.gpus[0].memory.reserved

    (held, reserved), (held_of_more, reserved_of_more) = memory(8, paced=False), memory(24, paced=False)
    assert held >= 8 and held_of_more - held == 24 - 8
    assert reserved_of_more > 1.5 * reserved
    (held, reserved), (held_of_more, reserved_of_more) = memory(8, paced=True), memory(24, paced=True)
    assert held_of_more == held <= AHEAD
    assert reserved_of_more == reserved


# The watchdog of NCCL, and ppctl's own verdict.


BATCHED = plan(pp=3, model__num_layers=3, gbs=8, mbs=1, parallel__overlap_p2p_comm=False, parallel__batch_p2p_comm=True)
STOPS = [
    pytest.param(PLAN, CHANNELS, stuck, id=f"channels {stuck}") for stuck in ("0F0", "1F3", "1B2", "2B7", "0B6")
] + [pytest.param(BATCHED, Modes(batched=True), stuck, id=f"batched {stuck}") for stuck in ("0F3", "1B2", "2B7")]


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.whole), pytest.param(2, marks=pytest.mark.whole)]
)
@pytest.mark.parametrize(("plan", "modes", "stuck"), STOPS)
def test_a_device_that_stops_is_named_and_its_peers_lose_a_connection(
    plan: Plan, modes: Modes, stuck: str, seed: int
) -> None:
    """First the records tell who it is. Later NCCL's watchdogs abort what does not end: whose connection it was, fails.

    Kernels then leave without their messages. A rank may have waited for all of them before: only what it asks for at
    the end of its list keeps it from going on with what was in the buffers.
    """
    job = Job(plan.schedule, stuck, seed, modes=modes, watchdog=True)
    fates = job.play()
    culprit = job.schedule.placement.rank_of(job.stuck.stage)
    told = verdict(plan, job.states, 200.0, 1e6)
    assert (told.rank, told.action, told.code) == (culprit, stuck, "PP-E706")
    assert fates[culprit].waits, "no watchdog of NCCL helps a host whose own device stands"
    connections = job.world.network.connections.values()
    lost = {rank for connection in connections for rank in connection.aborted} - {culprit}
    assert lost
    for rank, fate in enumerate(fates):
        if rank not in lost:
            continue
        assert isinstance(fate.failure, EngineError), "it would go on with what it has not received"
        assert isinstance(fate.failure.__cause__, PeerLost)
        assert rank in fate.failure.__cause__.channel[:2]
        assert 0 <= job.ahead(rank, fate.failure.action) <= AHEAD


# Lifetimes: memory that the host frees is used again, and what a message uses only when the device is through with it.


def test_what_was_sent_is_not_used_again_before_the_device_has_sent_it_and_the_host_has_looked() -> None:
    world = World(2)
    world.hosts_first = 1.0  # no device moves while a host can
    memory = world.gpus[0].memory
    addresses: list[int] = []

    def address() -> int:
        return torch.empty(100).untyped_storage().data_ptr()

    def host(rank: int) -> None:
        backend = Backend(world, rank, "channel", (0, 1))
        if rank == 1:
            backend.recv([torch.empty(100)], 0, 0).wait()
            return
        addresses.append(address())
        addresses.append(address())
        sent = torch.empty(100)
        sent.fill_(3.0)
        work = backend.send([sent], 1, 0)
        addresses.append(sent.untyped_storage().data_ptr())
        del sent
        addresses.append(address())
        assert len(memory.held) == 1, "freed by the host, and not sent yet"
        work.wait()
        world.gpus[0].drain("until it is sent")
        assert len(memory.held) == 1, "sent, and the host has not looked"
        addresses.append(address())
        assert not memory.held

    world.run(host)
    before, again, sent, meanwhile, afterwards = addresses
    assert before == again == sent, "what only the current stream uses is free at once"
    assert meanwhile != sent
    assert afterwards in (sent, meanwhile) and memory.reserved == 2 * 448


class Forgetful(DirectEnd):
    """An end that does not keep what it sends until the stream has waited for it."""

    __slots__ = ()

    def send(self, message) -> None:
        self.start_send(message)


def test_a_lifetime_that_is_too_short_shows_in_the_bits(monkeypatch) -> None:
    """ppctl keeps a message until its stream waits for the send, so it does not need recordStream; else it would."""
    schedule = lowered("1f1b", 2, 1, 8)

    def is_right(*, record_streams: bool) -> bool:
        world = World(2, record_streams=record_streams)
        world.hosts_first = 1.0
        return run_step(world, schedule).equals(expected(schedule))

    assert is_right(record_streams=True) and is_right(record_streams=False)
    monkeypatch.setattr(connections, "DirectEnd", Forgetful)
    assert is_right(record_streams=True)
    assert not is_right(record_streams=False)


def test_a_buffer_that_is_given_back_too_early_shows_in_the_bits(monkeypatch) -> None:
    """Receives wait for what the current stream holds: without that a message overwrites one that is still read."""
    schedule = lowered("1f1b", 3, 1, 8)
    monkeypatch.setattr(Mark, "hold", lambda mark, stream: None if stream != CURRENT else HOLD(mark, stream))
    seen = []
    for seed in range(4):
        world = World(3, seed)
        world.hosts_first = 1.0
        seen.append(run_step(world, schedule).equals(expected(schedule)))
    assert not all(seen)


HOLD = Mark.hold


def test_a_message_of_another_size_is_waited_for_for_ever() -> None:
    world = World(2)

    def host(rank: int) -> None:
        backend = Backend(world, rank, "channel", (0, 1))
        if rank == 0:
            backend.send([torch.ones(3)], 1, 0)
        else:
            backend.recv([torch.empty(4)], 0, 0)

    with pytest.raises(Deadlock, match="device 1: receive 0 from 0 to 1 on channel"):
        world.run(host)


@pytest.mark.parametrize("seed", range(4))
def test_fused_messages_are_over_together_and_a_wait_holds_the_stream_alone(seed: int) -> None:
    """Each rank sends and receives in one group: neither side has to go first."""
    world = World(2, seed)

    def host(rank: int) -> torch.Tensor:
        group = Backend(world, rank, "pipeline", (0, 1))
        sent, received = torch.full((4,), float(rank)), torch.empty(4)
        ops = [Dist.P2POp(op, t, group=group, group_peer=1 - rank) for op, t in (("send", sent), ("receive", received))]
        for work in Dist.batch_isend_irecv(ops):
            work.wait()
        doubled = received * 2
        assert world.gpus[rank].waits.total() == 0
        return doubled

    assert [found.tolist() for found in world.run(host)] == [[2.0] * 4, [0.0] * 4]
