"""Counts what ranks ask of the store, and which connections they open, while they start: with ppctl's own code, every
rank a thread of this process, and no message sent.

Groups are counted with real ones of gloo, of a few ranks: what one asks of the store and opens depends on its number of
ranks alone.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from ppctl.comm.groups import connecting_on_first_use
from ppctl.rank import rendezvous
from ppctl.rank.rendezvous import OwnRank
from ppctl.reach import start
from ppctl.topology import ParallelSizes, pairs_with_messages

LIMIT = timedelta(minutes=5)


class Counting(dist.Store):
    """A rank's view of the store `below`: requests, and values that come back, by kind of request."""

    def __init__(self, below: dist.Store) -> None:
        super().__init__()
        self.below, self.counts, self.read = below, Counter[str](), 0

    def set(self, key: str, value: Any) -> None:
        self.counts["set"] += 1
        self.below.set(key, value)

    def get(self, key: str) -> bytes:
        self.counts["get"] += 1
        value: bytes = self.below.get(key)
        self.read += len(value)
        return value

    def add(self, key: str, number: int) -> int:
        self.counts["add"] += 1
        total = int(self.below.add(key, number))
        self.below.set("added", "")  # torch's HashStore wakes nobody after `add`
        return total

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        self.counts["compare_set"] += 1
        value: bytes = self.below.compare_set(key, expected, wanted)
        self.read += len(value)
        return value

    def check(self, keys: list[str]) -> bool:
        self.counts["check"] += 1
        return bool(self.below.check(keys))

    def wait(self, keys: list[str], limit: timedelta = LIMIT) -> None:
        self.counts["wait"] += 1
        self.below.wait(keys, limit)


def together(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(rank)` of all ranks at once, each in a thread."""
    before = threading.stack_size(512 * 1024)
    try:
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(work, range(ranks)))
    finally:
        threading.stack_size(before)


def rendezvous_counts(
    ranks: int, per_node: int, run: bytes = b"x" * 10_000, pairs: Callable[[], Iterable[tuple[int, int]]] = tuple
) -> dict[str, list[Counter[str]]]:
    """Phase -> what each rank asks for as a rank that torchrun has started: the store and its start's number
    (`rendezvous`), the run from rank 0 (`the run`), and the roll call with connections to other hosts (`roll call`), of
    whose ranks `pairs` exchange messages."""
    below, own = dist.HashStore(), threading.local()

    def unreached(addresses: dict[int, Any], limit: float) -> dict[int, str]:
        own.store.counts["connections"] += len(addresses)
        return {}

    def one(rank: int) -> list[Counter[str]]:
        own.rank, own.store = rank, Counting(below)
        place, phases = OwnRank(rank, rank % per_node, ranks, per_node), []

        def phase(work: Callable[[], Any]) -> Any:
            own.store.counts, own.store.read = Counter[str](), 0
            result = work()
            phases.append(own.store.counts + Counter(bytes=own.store.read))
            return result

        number = phase(lambda: rendezvous._start(own.store, place, LIMIT))
        plain = dist.PrefixStore(f"ppctl/start/{number}/", own.store)
        sealed = rendezvous.SealedStore(plain, bytes(32), "1")
        phase(lambda: sealed.set("run", run.decode()) if rank == 0 else sealed.get("run"))
        phase(lambda: start.call_roll(sealed, rank, ranks, "digest", edge_limit=60, patience=300, pairs=pairs))
        return phases

    host = lambda: f"node-{own.rank // per_node}"  # noqa: E731
    listening = lambda: (ExitStack(), ("127.0.0.1", 1))  # noqa: E731
    with (
        mock.patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "counted"}),
        mock.patch.object(start, "host_name", host),
        mock.patch.object(start, "listen", listening),
        mock.patch.object(start, "unreached", unreached),
    ):
        found = together(ranks, one)
    return dict(zip(("rendezvous", "the run", "roll call"), map(list, zip(*found, strict=True)), strict=True))


def group_counts(ranks: int, *, lazily: bool = False) -> tuple[list[Counter[str]], int]:
    """Counts what each rank of one gloo group asks of the store until the group's first sum is done, and the
    connections of all; `lazily`: made on first use, as the world's are."""
    below, before = dist.HashStore(), _sockets()

    def one(rank: int) -> tuple[Counter[str], Any]:
        store = Counting(below)
        made = dist.ProcessGroupGloo(store, rank, ranks, timeout=LIMIT)
        made.allreduce([torch.ones(1)]).wait()
        return store.counts + Counter(bytes=store.read), made

    with connecting_on_first_use() if lazily else ExitStack():
        found = together(ranks, one)
    return [counts for counts, _ in found], (_sockets() - before - ranks) // 2


def _sockets() -> int:
    return sum(os.path.realpath(f"/proc/self/fd/{fd}").find("socket:") >= 0 for fd in os.listdir("/proc/self/fd"))


def agent_counts(hosts: int) -> list[Counter[str]]:
    """Counts what each of torch's agents asks until all have met, as under torchrun."""
    below = dist.HashStore()

    def one(host: int) -> Counter[str]:
        store = Counting(below)
        backend = C10dRendezvousBackend(store, "counted")
        handler = DynamicRendezvousHandler.from_backend("counted", store, backend, hosts, hosts, "127.0.0.1")
        handler.next_rendezvous()
        counts = store.counts + Counter(bytes=store.read)
        handler._stop_heartbeats()
        return counts

    with mock.patch.dict(os.environ, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}):
        return together(hosts, one)


class Phase(NamedTuple):
    """The requests, bytes and connections of all processes in a phase, and the most that one has."""

    requests: int
    read: int
    """Bytes that the store sends."""
    connections: int
    most_requests: int
    most_connections: int

    @classmethod
    def of(cls, each: list[Counter[str]]) -> Phase:
        """The sums and the greatest of what each process has. Looks at the store while a rank waits are left out: their
        number depends on time alone, at most two a second."""
        asked = [counts.total() - counts["bytes"] - counts["connections"] - counts["check"] for counts in each]
        connections = [counts["connections"] for counts in each]
        read = sum(counts["bytes"] for counts in each)
        return cls(sum(asked), read, sum(connections), max(asked), max(connections))


def phases(ranks: int, per_node: int = 8, pp: int = 16) -> dict[str, Phase]:
    """The phases of a start on CPUs: pp x dp ranks, of which dp grows with their number."""
    pp, dp = min(pp, ranks), ranks // min(pp, ranks)
    pairs = partial(pairs_with_messages, ParallelSizes(ranks, pp=pp, dp=dp, edp=dp))
    counted = {name: Phase.of(each) for name, each in rendezvous_counts(ranks, per_node, pairs=pairs).items()}
    each = mesh(pp) + mesh(pp) + ring(dp) + ring(ranks)  # a pipeline's gradients have connections of their own
    first = [Counter(get=ranks - 1, wait=ranks - 1, connections=ranks - 1, bytes=154 * (ranks - 1))]
    first += [Counter(get=1, wait=1, bytes=154)] * (ranks - 1)
    return counted | {"groups": Phase.of([each] * ranks), "first messages": Phase.of(first)}


def mesh(size: int) -> Counter[str]:
    """The counts of a rank of a gloo group that connects at once; a connection counts at the rank that opens it,
    half of its own."""
    if size == 1:
        return Counter(set=1)
    return Counter({"set": 1, "get": size, "wait": size, "bytes": size * (154 + 8 * size), "connections": size // 2})


def ring(size: int) -> Counter[str]:
    """The counts of a rank of a gloo group that connects on first use: with its neighbours, and it opens one of two
    connections."""
    others = min(2, size - 1)
    return Counter({"set": 1, "get": others, "wait": others, "bytes": 154 * others, "connections": 1})
