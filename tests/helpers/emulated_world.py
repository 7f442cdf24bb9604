"""Ranks with their hosts, devices and network, in one process: one thing moves at a time, chosen by a seed.

Knows what can move. Must not know what it computes. When nothing can move and some host is not through, that is a
deadlock, found without a clock; `Deadlock` says what everybody waits for. NCCL's watchdogs are no clock either: where
they are on, one of them fires when nothing else can move.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from emulated_gpu import Gpu, HostReads, OnDevice
from emulated_hosts import Turns, current_actor
from emulated_nccl import Network


class Deadlock(Exception):
    """Nothing can move, and some host is not through."""


class Fate(NamedTuple):
    """What became of a host: its result, its failure, or what it waits for."""

    result: object
    failure: BaseException | None
    waits: str


class World:
    """Ranks with their devices. `run` gives every rank a host; the same seed gives the same interleaving.

    `queues` is how many queues a device has, `eager` up to how many bytes a send goes on without its receiver,
    `lazy_loading` whether the first launch of a kernel waits for the whole device, `connected` whether connections were
    made before (by the warm-up) or are made on their first use, and `record_streams` whether memory that a message uses
    is kept as recordStream keeps it. `full` is a device's (`Gpu`). With `watchdog` NCCL's time-outs abort
    communicators, as they do where TORCH_NCCL_ASYNC_ERROR_HANDLING=2 asks for that; by torch's default the whole
    process ends.
    """

    def __init__(
        self,
        size: int,
        seed: int = 0,
        *,
        queues: int = 32,
        eager: int = 0,
        lazy_loading: bool = False,
        connected: bool = True,
        record_streams: bool = True,
        full: str = "",
        watchdog: bool = False,
    ) -> None:
        self.connected, self.watchdog = connected, watchdog
        self.random = random.Random(seed)
        self.hosts_first = self.random.choice((0.1, 0.5, 0.9))
        """How often a host moves where a device could: hosts that lag, and hosts that run far ahead."""
        self.turns = Turns()
        self.gpus = [
            Gpu(rank, queues=queues, lazy_loading=lazy_loading, record_streams=record_streams, full=full)
            for rank in range(size)
        ]
        self.network = Network(self.gpus, eager)
        self.on_still: Callable[[], object] = lambda: None
        """Called when nothing moves any more, before a watchdog fires."""

    def run(self, host: Callable[[int], object]) -> list[object]:
        """`host(rank)` on every rank's thread; what they return. Raises Deadlock, or the first host's failure."""
        fates = self.play(host)
        for fate in fates:
            if fate.failure is not None:
                raise fate.failure
        return [fate.result for fate in fates]

    def play(self, host: Callable[[int], object], *, to_the_end: bool = False) -> list[Fate]:
        """What becomes of every host; `to_the_end` goes on after failures, until nothing moves."""

        def body(rank: int) -> object:
            self.put_on_device(rank)
            result = host(rank)
            self.gpus[rank].drain("at the end")
            return result

        hosts = [self.turns.spawn(rank, f"host {rank}", lambda rank=rank: body(rank)) for rank in range(len(self.gpus))]
        fates: list[Fate] = []
        try:
            while not all(actor.is_over for actor in hosts):
                if not to_the_end and any(actor.failure is not None for actor in hosts):
                    break
                if not self._move():
                    self.on_still()
                    if self.watchdog and self._fire():
                        continue
                    if to_the_end:
                        break
                    raise Deadlock(self.why())
            fates = [Fate(actor.result, actor.failure, "" if actor.is_over else actor.why) for actor in hosts]
        finally:
            self.turns.end()
        return fates

    def put_on_device(self, rank: int) -> None:
        """What the calling thread computes goes to the rank's device, to the thread's end."""
        OnDevice(self.gpus[rank]).__enter__()
        HostReads(self.gpus[rank]).__enter__()

    def _move(self) -> bool:
        """Let one thing that can move do so; whether there was one."""
        actors = self.turns.movable
        first = bool(actors) and self.random.random() < self.hosts_first
        moves = [] if first else self._device_moves()
        if moves:
            self.random.choice(moves)()
        elif actors:
            self.turns.give(self.random.choice(actors))
        return bool(moves or actors)

    def _device_moves(self) -> list[Callable[[], object]]:
        moves: list[Callable[[], object]] = []
        for gpu in self.gpus:
            for queue in gpu.heads:
                entry = queue[0]
                if not entry.carried:
                    moves += self.network.moves_of(entry)
                elif entry.ready():
                    moves.append(lambda gpu=gpu, queue=queue: gpu.execute(queue))
        return moves

    def _fire(self) -> bool:
        """Let some rank's watchdog abort the communicator of a message that does not end; whether there was one."""
        waiting = [(each.connection, each.owner) for each in self.network.waiting()]
        if waiting:
            self.network.abort(*self.random.choice(waiting))
        return bool(waiting)

    def why(self) -> str:
        """What everybody waits for."""
        lines = [f"{actor.name} waits {actor.why}" for actor in self.turns.actors if not actor.is_over]
        for gpu in self.gpus:
            for queue in gpu.heads:
                stuck = [str(t) for t in queue[0].transfers if not t.is_over] or [queue[0].what]
                lines.append(f"device {gpu.rank}: {', '.join(stuck)}; {len(queue) - 1} behind it")
        return "\n".join(lines)


def current_rank() -> int:
    """The rank on whose behalf the caller runs."""
    return current_actor().rank
