"""The roll call: before ranks connect, all are there, hold one run, and their hosts reach each other.

Knows the store and what a rank says of itself in it. Must not know how a config was composed, nor process groups. Rank
0 judges, and all ranks raise what it found alike: nobody is left behind in a wait that says nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ppctl.errors import ConfigError, PpctlError, Problem, TrainingError
from ppctl.heartbeat import host_name
from ppctl.reach.contact import DeadEdge
from ppctl.reach.hosts import LIKELY, WAY_OUT, listen, unreached

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_KEY = "ppctl/roll"
_LATER = 10.0
"""Seconds by which ranks wait longer for rank 0's judgement than rank 0 for what it judges."""
_SHOWN = 8

_KINDS: Mapping[str, type[PpctlError]] = {"PP-E707": DeadEdge, "PP-E709": TrainingError, "PP-E742": ConfigError}


class _Absent(Exception):
    """Ranks that have not said their word in time."""


def call_roll(store: Store, rank: int, world: int, digest: str, *, edge_limit: float, patience: float) -> list[str]:
    """The hosts, in the order of their first ranks, when every rank has come and nothing is wrong with any.

    `digest` stands for the run that this rank holds. All times are in seconds: ranks have `patience` to come, hosts
    `edge_limit` to reach each other. Raises on every rank alike: TrainingError (PP-E709) where some did not come,
    ConfigError (PP-E742) where they hold different runs, DeadEdge (PP-E707) where one host does not reach another.
    """
    server, address = listen()
    with server:
        own = {"host": host_name(), "address": address, "digest": digest}
        _say(store, f"word/{rank}", own)
        problem, hosts = None, list[str]()
        try:
            if rank == 0:
                words = _hear(store, "word", range(world), patience)
                problem = _wrong_run(words)
                first = {} if problem else _first_of_each_host(words)
                _say(store, "hosts", [[number, word["host"], *word["address"]] for number, word in first.items()])
            hosts = _try_hosts(store, rank, edge_limit, patience + _LATER)
            if rank == 0 and len(hosts) > 1 and problem is None:
                found = _hear(store, "found", first, edge_limit + _LATER)
                problem = _dead_edges(words, found)
        except _Absent as absent:
            problem = Problem("PP-E709", str(absent), "ppctl explain PP-E709")
            _say(store, "hosts", [])
        _agree(store, rank, world, problem, patience + edge_limit + 2 * _LATER)
    return hosts


def _say(store: Store, key: str, word: Any) -> None:
    store.set(f"{_KEY}/{key}", json.dumps(word))


def _hear(store: Store, what: str, ranks: Any, patience: float) -> dict[int, Any]:
    """What these ranks have said under `what`. Raises _Absent naming those that have not after `patience` seconds."""
    keys = {rank: f"{_KEY}/{what}/{rank}" for rank in ranks}
    try:
        store.wait(list(keys.values()), timedelta(seconds=patience))
    except RuntimeError:
        absent = [str(rank) for rank, key in keys.items() if not store.check([key])]
        named = ", ".join(absent[:_SHOWN]) + (f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else "")
        have = "rank {} has" if len(absent) == 1 else "ranks {} have"
        raise _Absent(f"{have.format(named)} not come within {patience:g} s; all others wait") from None
    return {rank: json.loads(store.get(key)) for rank, key in keys.items()}


def _wrong_run(words: Mapping[int, Any]) -> Problem | None:
    different = [rank for rank, word in words.items() if word["digest"] != words[0]["digest"]]
    if not different:
        return None
    message = f"ranks {', '.join(map(str, different))} hold another config or plan than rank 0"
    remedy = "start every rank with the same version of ppctl, and let only one launch write the run directory"
    return Problem("PP-E742", message, remedy)


def _first_of_each_host(words: Mapping[int, Any]) -> dict[int, Any]:
    """What the lowest rank of every host has said."""
    first: dict[str, int] = {}
    for rank, word in words.items():
        first.setdefault(word["host"], rank)
    return {rank: words[rank] for rank in first.values()}


def _try_hosts(store: Store, rank: int, limit: float, patience: float) -> list[str]:
    """Let the first rank of every host try all others; the hosts' names."""
    store.wait([f"{_KEY}/hosts"], timedelta(seconds=patience))
    rows = json.loads(store.get(f"{_KEY}/hosts"))
    addresses = {int(other): (str(host), int(port)) for other, _, host, port in rows}
    if rank in addresses and len(addresses) > 1:
        others = {other: address for other, address in addresses.items() if other != rank}
        found = unreached(others, limit)
        _say(store, f"found/{rank}", [[other, *addresses[other], why] for other, why in found.items()])
    return [str(name) for _, name, *_ in rows]


def _dead_edges(words: Mapping[int, Any], found: Mapping[int, Any]) -> Problem | None:
    lines = [
        f"rank {rank} on {words[rank]['host']} does not reach rank {other} on {words[other]['host']} "
        f"at {host} port {port}: {why}"
        for rank, failures in found.items()
        for other, host, port, why in failures
    ]
    if not lines:
        return None
    more = [f"and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
    return Problem("PP-E707", lines[0], WAY_OUT, "\n".join([*lines[1:_SHOWN], *more, LIKELY]))


def _agree(store: Store, rank: int, world: int, problem: Problem | None, patience: float) -> None:
    """Raise on every rank what rank 0 has found. It may hold the store, and stays until the others have read it."""
    if rank == 0:
        _say(store, "judgement", None if problem is None else problem.to_json())
    store.wait([f"{_KEY}/judgement"], timedelta(seconds=patience))
    judged = json.loads(store.get(f"{_KEY}/judgement"))
    if judged is None:
        return
    heard = store.add(f"{_KEY}/heard", 1)
    deadline = time.monotonic() + _LATER
    while rank == 0 and heard < world and time.monotonic() < deadline:
        time.sleep(0.02)
        with suppress(RuntimeError):
            heard = store.add(f"{_KEY}/heard", 0)
    raise _KINDS[judged["code"]](Problem(**judged))
