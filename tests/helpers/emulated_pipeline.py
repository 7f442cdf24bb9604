"""A pipeline's step on emulated devices: ppctl's engine and communicator, with the network below them exchanged.

Knows which names of torch and of ppctl stand for a device and its messages; all else is ppctl's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pipeline
import pytest
import torch
from autograd_thread import ENGINE, AutogradThread
from emulated_gpu import Mark
from emulated_hosts import HostPair, HostQueue, HostSemaphore, HostThread, current_actor, hand_over
from emulated_memory import Memory
from emulated_nccl import Backend, Dist
from emulated_world import World, current_rank
from torch.autograd.variable import Variable

from ppctl.comm import communicator
from ppctl.comm.buffers import BufferPool
from ppctl.comm.channels import DirectEnd, VariableEnd
from ppctl.comm.communicator import Communicator
from ppctl.comm.connections import Connections, _pair_ends, connection_name, other_end
from ppctl.comm.modes import Modes
from ppctl.engine import interpreter, pace, pair_runner
from ppctl.engine.dry_pass import dry_pass, reserve
from ppctl.engine.interpreter import run_schedule
from ppctl.engine.pace import Heartbeat
from ppctl.engine.stage import StageProgram
from ppctl.parallel import all_to_all
from ppctl.schedule.action import Schedule

CPU = torch.device("cpu")
CHANNELS = Modes()
"""Every message on its channel."""
WHOLE = 2
"""A microbatch of `pipeline.BATCH` rows, also where they are ragged."""


ENOUGH = 2**40
ALLOCATOR: dict[str, Callable[[Memory], object]] = {
    "memory_allocated": lambda memory: memory.in_use,
    "mem_get_info": lambda memory: (ENOUGH - memory.mapped, ENOUGH),
    "memory_stats_as_nested_dict": lambda memory: {},
    "empty_cache": lambda memory: None,
}
"""What ppctl asks torch's allocator."""


class EmulatedConnections(Connections):
    """A pipeline's connections under ppctl's own names, as backends of an emulated world."""

    def __init__(self, world: World, rank: int, pp: int) -> None:
        self.world, self.rank, self.ranks, self.number = world, rank, tuple(range(pp)), 0
        self._made = {}

    def name_of(self, what: str, members: Sequence[int]) -> str:
        return connection_name(self.ranks, self.number, what)

    def _get(self, kind: str, what: str, members: Sequence[int]) -> Backend:
        if what not in self._made:
            self._made[what] = Backend(self.world, self.rank, self.name_of(what, members), members)
        return self._made[what]


class EmulatedCommunicator(Communicator):
    """ppctl's communicator as it is on NCCL: batches are fused, every channel is a connection of its own."""

    def __init__(
        self, connections: EmulatedConnections, schedule: Schedule, modes: Modes, *, connect: bool = False
    ) -> None:
        self.modes, self.pp_rank, self.pp = modes, connections.rank, schedule.placement.pp
        self.device, self.pool = CPU, BufferPool(CPU)
        self.fused, self.sync = modes.batched, CPU if modes.sync else None
        self.pp_group = connections.of_all("nccl", "pipeline") if self.fused else None
        self.connected = connect or connections.world.connected
        own = [channel for channel in sorted(schedule.capacities) if self.pp_rank in channel[:2]]
        if self.fused:
            over = communicator.GroupTransport(self.pp_group, CPU)
            ends = {each: DirectEnd(each, over, other_end(each, self.pp_rank), 0) for each in own}
            announced = {each: VariableEnd(end, end, CPU, CPU) for each, end in ends.items()}
            self._ends = announced if modes.variable else ends
        else:
            self._ends = _pair_ends(connections, "nccl", CPU, own, variable=modes.variable, connect=connect)


@contextmanager
def emulation(world: World, *, paced: bool = True) -> Iterator[None]:
    """ppctl on the devices of a world; without `paced` hosts run ahead without bound."""

    def make_pace(device, length, heartbeat):
        beat = pace._Silence() if heartbeat is None else heartbeat
        gpu = world.gpus[current_rank()]
        return pace.DevicePace(length, beat, lambda: Mark(gpu)) if paced else pace.HostPace(length, beat)

    # Threads with modes of torch's must be over before the process is: each ends with its executor.
    with ExitStack() as threads, pytest.MonkeyPatch.context() as patch:

        def make_pair(*given: Callable) -> HostPair:
            pair = HostPair(*given)
            threads.enter_context(pair._thread)
            return pair

        for name, stand_in in (("Semaphore", HostSemaphore), ("SimpleQueue", HostQueue), ("Thread", HostThread)):
            patch.setattr(pace, name, stand_in)
        patch.setattr(interpreter, "make_pace", make_pace)
        patch.setattr(pair_runner, "Turns", make_pair)
        patch.setattr(HostPair, "enter", staticmethod(lambda: None))  # the runner brings the modes of the device
        patch.setattr(all_to_all, "hand_over", hand_over)
        patch.setattr(Variable, "_execution_engine", DeviceThreads(threads))
        patch.setattr(communicator, "dist", Dist)
        patch.setattr(all_to_all, "dist", Dist)
        for name, found in ALLOCATOR.items():
            patch.setattr(torch.cuda, name, lambda *_, found=found: found(world.gpus[current_rank()].memory))
        patch.setattr(torch.cuda, "synchronize", lambda *_: world.gpus[current_rank()].drain("torch.cuda.synchronize"))
        yield


class DeviceThreads:
    """Autograd's engine with a thread for each rank's device, which the rank's host waits for."""

    def __init__(self, until: ExitStack) -> None:
        self._until = until
        self._threads: dict[int, AutogradThread] = {}

    def run_backward(self, *args: object, **kwargs: object) -> object:
        """The engine's, in the thread of the caller's device."""
        rank = current_rank()
        if rank not in self._threads:
            self._threads[rank] = self._until.enter_context(AutogradThread(current_actor().adopt))
        return self._threads[rank].run_backward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(ENGINE, name)


Wrap = Callable[[StageProgram, int], StageProgram]
"""`wrap(program, rank)`: the program that the engine gets in its place."""


def make_step(
    world: World,
    schedule: Schedule,
    *,
    modes: Modes = CHANNELS,
    dry: bool = False,
    connect: bool = False,
    connections: Callable[[World, int, int], EmulatedConnections] = EmulatedConnections,
    wrap: Wrap = lambda program, rank: program,
    heartbeats: Sequence[Heartbeat | None] | None = None,
    peaks: Sequence[int] | None = None,
    **options: Any,
) -> Callable[[int], pipeline.Outcome]:
    """The host of every rank: a step of `schedule` through the stages of `pipeline`, with the engine's `options`.

    `peaks` are the bytes that ranks reserve before the first message.
    """
    place = schedule.placement

    def host(rank: int) -> pipeline.Outcome:
        communicator = None
        if place.pp > 1:
            communicator = EmulatedCommunicator(connections(world, rank, place.pp), schedule, modes, connect=connect)
        stages = {stage: pipeline.build(stage) for stage in place.stages_of(rank)}
        losses: dict = {}
        programs = [wrap(program, rank) for program in pipeline.programs_of(schedule, rank, stages, losses)]
        if dry:
            for program in [each for each in programs for _ in range(2)]:
                dry_pass(program, schedule, rank, WHOLE, CPU)
            losses.clear()
            for parameter in [each for weights in stages.values() for each in weights.values()]:
                parameter.grad = None
        if peaks is not None:
            assert reserve(CPU, peaks[rank], in_flight=1) == 0
        heartbeat = None if heartbeats is None else heartbeats[rank]
        run_schedule(schedule, programs, communicator, variable_shapes=modes.variable, heartbeat=heartbeat, **options)
        return pipeline.Outcome(losses, {(s, n): p.grad for s, w in stages.items() for n, p in w.items()})

    return host


def run_step(world: World, schedule: Schedule, *, paced: bool = True, **options) -> pipeline.Outcome:
    """The joined outcome of a step on every rank of a new world. Raises Deadlock, or the first host's failure."""
    with emulation(world, paced=paced):
        return pipeline.join(world.run(make_step(world, schedule, **options)))


def expected(schedule: Schedule) -> pipeline.Outcome:
    """What a plain loop makes of the same microbatches."""
    return pipeline.plain_loop(schedule.placement.num_stages, schedule.num_microbatches)
