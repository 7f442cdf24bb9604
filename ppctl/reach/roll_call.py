"""The roll call: before ranks connect, all have come and have the same run, and their hosts reach each other.

Knows the rendezvous store and what each rank writes into it. Must not know how a config was composed, nor process
groups. Rank 0 judges, and every rank raises rank 0's result: none stays behind in a wait without an error.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from ppctl.comm.sealed_store import SealedStore
from ppctl.errors import ConfigError, PpctlError, Problem, TrainingError
from ppctl.heartbeat import host_name
from ppctl.reach.hosts import CAUSES, REMEDY, DeadEdge, listen, unreached

_KEY = "ppctl/roll"
_LATER = 10.0
"""Seconds by which ranks wait longer for rank 0's result than rank 0 waits for theirs."""
_SHOWN = 8

_KINDS: Mapping[str, type[PpctlError]] = {"PP-E707": DeadEdge, "PP-E709": TrainingError, "PP-E742": ConfigError}


class _Absent(Exception):
    """Some ranks have not written in time."""


def call_roll(
    store: SealedStore, rank: int, world: int, digest: str, *, edge_limit: float, patience: float
) -> list[str]:
    """The hosts, in the order of their first ranks, once every rank has come and nothing is wrong.

    `digest` stands for the run that this rank has. All times are in seconds: ranks have `patience` to come, hosts
    `edge_limit` to reach each other. Every rank raises the same: TrainingError (PP-E709) where some did not come,
    ConfigError (PP-E742) where they have different runs, DeadEdge (PP-E707) where one host does not reach another.
    """
    server, address = listen()
    with server:
        store.set(f"{_KEY}/rank/{rank}", {"host": host_name(), "address": address, "digest": digest})
        problem, hosts = None, list[str]()
        try:
            if rank == 0:
                ranks = _read(store, "rank", range(world), patience)
                problem = _different_runs(ranks)
                first = {} if problem else _first_of_each_host(ranks)
                store.set(f"{_KEY}/hosts", [[number, each["host"], *each["address"]] for number, each in first.items()])
            hosts = _try_hosts(store, rank, edge_limit, patience + _LATER)
            if rank == 0 and len(hosts) > 1 and problem is None:
                problem = _dead_edges(ranks, _read(store, "unreached", first, edge_limit + _LATER))
        except _Absent as absent:
            problem = Problem("PP-E709", str(absent), "ppctl explain PP-E709")
            store.set(f"{_KEY}/hosts", [])
        _raise_on_every_rank(store, rank, world, problem, patience + edge_limit + 2 * _LATER)
    return hosts


def _read(store: SealedStore, what: str, ranks: Iterable[int], patience: float) -> dict[int, Any]:
    """What these ranks have written under `what`. Raises _Absent naming those that have not in `patience` seconds."""
    keys = {rank: f"{_KEY}/{what}/{rank}" for rank in ranks}
    try:
        store.wait([*keys.values()], timedelta(seconds=patience))
    except RuntimeError:
        absent = [str(rank) for rank, key in keys.items() if not store.has(key)]
        named = ", ".join(absent[:_SHOWN]) + (f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else "")
        have = "rank {} has" if len(absent) == 1 else "ranks {} have"
        raise _Absent(f"{have.format(named)} not come within {patience:g} s; all others wait") from None
    return {rank: store.get(key) for rank, key in keys.items()}


def _different_runs(ranks: Mapping[int, Any]) -> Problem | None:
    different = [rank for rank, each in ranks.items() if each["digest"] != ranks[0]["digest"]]
    if not different:
        return None
    message = f"ranks {', '.join(map(str, different))} have another config or plan than rank 0"
    remedy = "start every rank with the same version of ppctl, and let only one launch write the run directory"
    return Problem("PP-E742", message, remedy)


def _first_of_each_host(ranks: Mapping[int, Any]) -> dict[int, Any]:
    """The lowest rank of every host, and what it has written."""
    first: dict[str, int] = {}
    for rank, each in ranks.items():
        first.setdefault(each["host"], rank)
    return {rank: ranks[rank] for rank in first.values()}


def _try_hosts(store: SealedStore, rank: int, limit: float, patience: float) -> list[str]:
    """The first rank of every host tries all other hosts. Returns the hosts' names."""
    store.wait([f"{_KEY}/hosts"], timedelta(seconds=patience))
    rows = store.get(f"{_KEY}/hosts")
    addresses = {int(first): (str(host), int(port)) for first, _, host, port in rows}
    if rank in addresses and len(addresses) > 1:
        found = unreached({first: address for first, address in addresses.items() if first != rank}, limit)
        store.set(f"{_KEY}/unreached/{rank}", [[first, *addresses[first], reason] for first, reason in found.items()])
    return [str(name) for _, name, *_ in rows]


def _dead_edges(ranks: Mapping[int, Any], found: Mapping[int, Any]) -> Problem | None:
    lines = [
        f"rank {rank} on {ranks[rank]['host']} does not reach rank {other} on {ranks[other]['host']} "
        f"at {host} port {port}: {reason}"
        for rank, failures in found.items()
        for other, host, port, reason in failures
    ]
    if not lines:
        return None
    more = [f"and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
    return Problem("PP-E707", lines[0], REMEDY, "\n".join([*lines[1:_SHOWN], *more, CAUSES]))


def _raise_on_every_rank(store: SealedStore, rank: int, world: int, problem: Problem | None, patience: float) -> None:
    """Raise rank 0's `problem` on every rank. The store may be in rank 0, which stays until all others have read it."""
    if rank == 0:
        store.set(f"{_KEY}/result", None if problem is None else problem.to_json())
    store.wait([f"{_KEY}/result"], timedelta(seconds=patience))
    result = store.get(f"{_KEY}/result")
    if result is None:
        return
    readers = store.add(f"{_KEY}/readers", 1)
    deadline = time.monotonic() + _LATER
    while rank == 0 and readers < world and time.monotonic() < deadline:
        time.sleep(0.02)
        with suppress(RuntimeError):
            readers = store.add(f"{_KEY}/readers", 0)
    raise _KINDS[result["code"]](Problem(**result))
