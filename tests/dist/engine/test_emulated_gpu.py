"""The engine on devices that compute later, over messages with NCCL's manners: same bits, and where it would hang."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pipeline
import pytest
import torch
from emulated_gpu import Backend, Deadlock, HostQueue, HostSemaphore, HostThread, Mark, World, current_rank

from ppctl.comm.buffers import BufferPool, Message, Shelf
from ppctl.comm.channels import Arrival, DirectEnd
from ppctl.comm.communicator import Communicator
from ppctl.comm.message_batches import LooseBatch, MessageBatch
from ppctl.comm.modes import Modes
from ppctl.comm.variable_shapes import VariableEnd
from ppctl.engine import interpreter, pace
from ppctl.engine.dry_pass import dry_pass
from ppctl.engine.interpreter import run_schedule
from ppctl.errors import ScheduleError
from ppctl.schedule.action import COMPUTE, RECEIVES, Action, Channel, Placement, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import POLICIES, make_schedule

CPU = torch.device("cpu")
CHANNELS = Modes()


class Emulated(Communicator):
    """A communicator whose channels are connections of an emulated world, each under its own name."""

    def __init__(
        self, world: World, rank: int, schedule: Schedule, modes: Modes, name: Callable[[Channel], str]
    ) -> None:
        self.world, self.modes, self.pp_rank, self.pp = world, modes, rank, schedule.placement.pp
        self.device, self.pool = CPU, BufferPool(CPU)
        self.gpu = world.gpus[rank]
        self.fused = modes.batched
        self.group = Backend(world, rank, "pipeline", range(self.pp)) if self.fused else None
        self._ends = {
            channel: self._make_end(channel, name) for channel in sorted(schedule.capacities) if rank in channel[:2]
        }

    def _make_end(self, channel: Channel, name: Callable[[Channel], str]) -> DirectEnd:
        ends = sorted(channel[:2])
        peer = ends.index(channel.target if channel.source == self.pp_rank else channel.source)

        def end(part: str) -> DirectEnd:
            return DirectEnd(channel, Backend(self.world, self.pp_rank, f"{name(channel)}/{part}", ends), peer, 0)

        return VariableEnd(end("body"), end("header"), CPU, CPU) if self.modes.variable else end("body")

    def batch(self) -> MessageBatch:
        return Group(self) if self.fused and not self.modes.variable else LooseBatch(self.end)


class Group:
    """A fused batch: all of its messages are one entry of the pipeline's connection."""

    def __init__(self, communicator: Emulated) -> None:
        self.communicator = communicator
        self.moves: list[tuple[int, int, torch.Tensor]] = []

    def send(self, channel: Channel, message: Message) -> None:
        self.moves += [(channel.source, channel.target, tensor) for tensor in message]

    def post(self, channel: Channel, shelf: Shelf) -> Arrival:
        message = shelf.take()
        self.send(channel, message)
        return Arrival(message, shelf=shelf)

    def settle(self) -> None:
        moves, self.moves = self.moves, []
        if moves:
            self.communicator.group.start(moves).wait()
        if self.communicator.modes.sync:
            self.communicator.gpu.synchronize("behind a batch (batch_p2p_sync)")


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Run a step of a schedule on every rank of a new world; returns the joined outcome."""

    def run(
        world: World,
        schedule: Schedule,
        *,
        modes: Modes = CHANNELS,
        paced: bool = True,
        dry: bool = False,
        names: Callable[[int], Callable] = lambda rank: str,
    ):
        for name, stand_in in (("Semaphore", HostSemaphore), ("SimpleQueue", HostQueue), ("Thread", HostThread)):
            monkeypatch.setattr(pace, name, stand_in)

        def make_pace(device, length, heartbeat):
            beat = pace._Silence() if heartbeat is None else heartbeat
            gpu = world.gpus[current_rank()]
            return pace.DevicePace(length, beat, lambda: Mark(gpu)) if paced else pace.HostPace(length, beat)

        monkeypatch.setattr(interpreter, "make_pace", make_pace)

        def host(rank: int):
            communicator = None
            if schedule.placement.pp > 1:
                communicator = Emulated(world, rank, schedule, modes, names(rank))
            stages = {stage: pipeline.build(stage) for stage in schedule.placement.stages_of(rank)}
            losses: dict = {}
            programs = pipeline.programs_of(schedule, rank, stages, losses)
            last = schedule.placement.num_stages - 1
            for program in [each for each in programs for _ in range(2)] if dry else []:
                dry_pass(program, rank, 0, CPU, is_last=program.stage == last)
            for weights in stages.values() if dry else []:
                for parameter in weights.values():
                    parameter.grad = None
            run_schedule(schedule, programs, communicator, variable_shapes=modes.variable)
            return pipeline.Outcome(losses, {(s, n): p.grad for s, w in stages.items() for n, p in w.items()})

        return pipeline.join(world.run(host))

    return run


def expected(schedule: Schedule):
    return pipeline.plain_loop(schedule.placement.num_stages, schedule.num_microbatches)


def schedules(batched: bool = False):
    for name in sorted(POLICIES):
        for pp, vpp, m in ((1, 2, 3), (2, 1, 4), (3, 1, 5), (2, 2, 4), (4, 1, 6), (3, 2, 6), (4, 2, 8)):
            try:
                schedule = lower(make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m), batched=batched)
            except ScheduleError:
                continue
            if not schedule.split and any(action.op in COMPUTE for row in schedule.actions for action in row):
                yield schedule


CASES = {f"{s.name}-{s.placement.pp}-{s.placement.num_stages}": s for s in schedules() if s.name != "forward_only"}


SAMPLE = random.Random(0).sample(sorted(CASES), 5)
EVERY = [pytest.param(case, marks=() if case in SAMPLE else pytest.mark.whole) for case in CASES]


@pytest.mark.parametrize("case", EVERY)
def test_every_schedule_ends_with_the_bits_of_a_plain_loop(emulate, case) -> None:
    schedule = CASES[case]
    assert emulate(World(schedule.placement.pp, seed=1), schedule).equals(expected(schedule))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", ["1f1b-3-3", "interleaved_1f1b-2-4"])
def test_no_order_in_which_hosts_and_devices_move_changes_a_bit_or_hangs(emulate, case, seed) -> None:
    schedule = CASES[case]
    assert emulate(World(schedule.placement.pp, seed), schedule).equals(expected(schedule))


@pytest.mark.parametrize("case", SAMPLE)
def test_connections_may_be_made_on_their_first_message(emulate, case) -> None:
    schedule = CASES[case]
    assert emulate(World(schedule.placement.pp, seed=4, connected=False), schedule).equals(expected(schedule))


def test_neither_lazy_connections_nor_lazy_kernels_hang_but_both_together_do(emulate) -> None:
    """Why a run connects its channels before the first step: a host that connects enqueues nothing meanwhile."""
    with pytest.raises(Deadlock, match=r"for all of[\s\S]*to load"):
        emulate(World(2, seed=3, lazy_loading=True, connected=False), CASES["1f1b-2-2"])


@pytest.mark.parametrize("eager", [64, 1 << 20])
@pytest.mark.parametrize("case", SAMPLE)
def test_sends_may_go_on_without_their_receivers(emulate, case, eager) -> None:
    schedule = CASES[case]
    assert emulate(World(schedule.placement.pp, seed=2, eager=eager), schedule).equals(expected(schedule))


@pytest.mark.parametrize("case", EVERY)
def test_kernels_may_be_loaded_at_their_first_use_where_a_dry_pass_goes_before(emulate, case) -> None:
    schedule = CASES[case]
    world = World(schedule.placement.pp, seed=3, lazy_loading=True)
    assert emulate(world, schedule, dry=True).equals(expected(schedule))


def test_without_a_dry_pass_two_ranks_can_each_load_a_kernel_behind_the_other_ones_message(emulate) -> None:
    """The order of the list alone does not help: a kernel is first used in the middle of an action."""
    with pytest.raises(
        Deadlock, match=r"host 0 waits for its device, to load[\s\S]*host 1 waits for its device, to load"
    ):
        emulate(World(2, seed=3, lazy_loading=True), CASES["interleaved_1f1b-2-4"])


def receives_first(schedule: Schedule) -> Schedule:
    """The list with every receive as early as its channel's order and capacity allow: how it was lowered once."""
    rows = []
    for row in schedule.actions:
        first = next(action for action in row if action.op in RECEIVES)
        rows.append((first, *(action for action in row if action != first)))
    return replace(schedule, actions=tuple(rows))


def test_a_receive_ahead_of_everything_hangs_where_kernels_are_loaded_lazily(emulate) -> None:
    """The first launch of a kernel waits for the device, and the device for a message that follows from it."""
    early = receives_first(CASES["1f1b-3-3"])
    assert emulate(World(3, seed=0), early).equals(expected(early)), "it is right where kernels are there"
    with pytest.raises(Deadlock, match="to load"):
        emulate(World(3, seed=0, lazy_loading=True), early)


def test_few_queues_can_hang_what_many_do_not(emulate) -> None:
    """Streams that share a queue wait for each other."""
    schedule = CASES["1f1b-4-4"]
    with pytest.raises(Deadlock):
        emulate(World(4, seed=0, queues=1), schedule)
    for seed in range(3):
        assert emulate(World(4, seed, queues=32), schedule).equals(expected(schedule))


def test_ends_that_name_their_connection_differently_never_meet(emulate) -> None:
    """Names that follow from how many groups a rank has made."""
    schedule = CASES["1f1b-3-3"]

    def counted(rank: int) -> Callable[[Channel], str]:
        made = [c for c in sorted(schedule.capacities) if rank in c[:2]]
        return lambda channel: f"{sorted(channel[:2])}#{made.index(channel)}"

    with pytest.raises(Deadlock, match="for all of"):
        emulate(World(3, connected=False), schedule, names=counted)


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


MODES = {
    "batched": Modes(batched=True),
    "batched, synchronised": Modes(batched=True, sync=True),
    "one by one, variable": Modes(variable=True),
    "batched, variable": Modes(batched=True, variable=True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_every_mode_of_messages_changes_no_bit(emulate, mode, name) -> None:
    modes = MODES[mode]
    vpp = 2 if name != "1f1b" else 1
    schedule = lower(make_schedule(name, pp=3, vpp=vpp, num_microbatches=6), batched=modes.batched)
    assert emulate(World(3, seed=5), schedule, modes=modes).equals(expected(schedule))


def test_the_host_runs_at_most_four_computations_ahead_and_holds_few_messages(emulate) -> None:
    """Without the bound every message of the step stays allocated."""
    schedule = lower(make_schedule("1f1b", pp=2, vpp=1, num_microbatches=24))
    bounded, free = World(2, seed=7), World(2, seed=7)
    assert emulate(bounded, schedule).equals(expected(schedule))
    assert emulate(free, schedule, paced=False).equals(expected(schedule))
    assert bounded.gpus[0].most_held * 4 <= free.gpus[0].most_held


def test_forwards_and_backwards_never_wait_for_the_device(emulate) -> None:
    world = World(3, seed=8)
    emulate(world, CASES["1f1b-3-3"])
    assert [dict(gpu.waits) for gpu in world.gpus] == [{"at the end": 1}] * 3


V = Schedule(
    "v",
    Placement("v", 2, 4),
    2,
    tuple(
        tuple(Action.parse(cell) for cell in row.split())
        for row in ("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")
    ),
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("modes", [Modes(), Modes(batched=True), Modes(variable=True)], ids=str)
def test_a_v_runs_in_every_mode(emulate, modes, seed) -> None:
    schedule = lower(V, batched=modes.batched)
    assert emulate(World(2, seed), schedule, modes=modes).equals(expected(schedule))
