"""How ranks come together before the first step: the roll call, the default process group, the first messages.

Every error names ranks and hosts. In the roll call rank 0 judges, and every rank raises rank 0's result, so that none
waits without an error.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import chain, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.communicator import Communicator
from ppctl.comm.groups import connecting_on_first_use, gather_values
from ppctl.config.quantities import seconds
from ppctl.config.schema import LaunchConfig
from ppctl.errors import ConfigError, PpctlError, Problem, TrainingError, some
from ppctl.reach.first_contact import Contact, FirstContact, TimedContact, channel_contacts, group_contacts
from ppctl.reach.hosts import CAUSES, REMEDY, DeadEdge, listen, reason_of, unreached
from ppctl.reach.store import SealedStore
from ppctl.runs.heartbeat import host_name

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


Exchanges = Mapping[str, Collection[str]]
"""Axis -> exchanges of its group other than collectives, as `group_contacts` names them."""


def join_world(store: Store, rank: int, world: int, backends: str, limit: timedelta) -> None:
    """Make the default process group on `backends` (`ppctl.host.devices`), with gloo for messages between CPUs.

    A rank connects with its neighbours in the world's ring here; with other ranks on first use. `limit` is how long
    backends wait for other ranks, in the world's group and in every group that is made later. Raises DeadEdge
    (PP-E707).

    By itself gloo connects every rank of a group with every other one: 2,047 sockets a rank in a world of 2,048, more
    than the usual limit of 1,024 files, and addresses that all go through rank 0's store (16 KiB a rank, which every
    rank reads: 69 GB). The world's messages go round a ring, or to rank 0.
    """
    # NCCL's watchdogs would end the process before it can report an error of the device, and a watchdog that waits
    # while a kernel is loaded would end it before the run's limits do.
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(math.ceil(limit.total_seconds())))
    try:
        with connecting_on_first_use():
            dist.init_process_group(backends, store=store, rank=rank, world_size=world, timeout=limit)
            dist.all_reduce(torch.zeros(1, device="cpu"))
    except RuntimeError as error:
        message = f"rank {rank} on {host_name()} could not connect to all ranks of the job: {reason_of(error)}"
        raise DeadEdge(Problem("PP-E707", message, REMEDY, CAUSES)) from error


def warm_up(
    store: SealedStore,
    launch: LaunchConfig,
    device: torch.device,
    communicator: Communicator | None,
    groups: Mapping[str, ProcessGroup],
    ties: ProcessGroup | None = None,
    exchanges: Exchanges = MappingProxyType({}),
) -> dict[str, Any] | None:
    """Use every channel of the pipeline once, this rank's `groups` (by axis), the group of tied weights and the world.
    `exchanges` are those of groups beside collectives, by axis.

    Returns the content of edges.json on rank 0, else None. A collective over the world; raises DeadEdge.
    """
    rank, limit = dist.get_rank(), float(seconds(launch.edge_limit))
    first = FirstContact(store, rank, dist.get_world_size(), host_name(), float(seconds(launch.start_limit)))
    contacts = _contacts(device, communicator, groups, ties, exchanges)
    made = first.make(contacts, limit, lambda: _enter(device))
    if communicator is not None:
        communicator.connected = True
    rows = gather_values(tuple[str, list[TimedContact]], (first.host, made))
    return _record(rows, limit) if rank == 0 else None


def _contacts(
    device: torch.device,
    communicator: Communicator | None,
    groups: Mapping[str, ProcessGroup],
    ties: ProcessGroup | None,
    exchanges: Exchanges,
) -> list[Contact]:
    """The messages to try between this rank and others, in the one order that all ranks follow."""
    contacts, channels = list[Contact](), list[Contact]()
    if communicator is not None:
        channels = channel_contacts(communicator.ends, communicator.pp_group, communicator.device)
    for axis, group in groups.items():
        by_channels = communicator is not None and bool(communicator.ends) and group is communicator.pp_group
        contacts += group_contacts(axis, group, device, ring=not by_channels, exchanges=exchanges.get(axis, ()))
    if ties is not None:
        contacts += group_contacts("ties", ties, device, ring=False)
    # NCCL needs a collective of the whole group before some of its ranks batch messages.
    contacts = [*contacts, *channels] if communicator is not None and communicator.fused else [*channels, *contacts]
    world = dist.group.WORLD
    assert world is not None  # the ranks have joined it
    # The world's messages are between CPUs.
    return contacts + group_contacts("world", world, torch.device("cpu"))


def _enter(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _record(rows: list[tuple[str, list[TimedContact]]], limit: float) -> dict[str, Any]:
    """The hosts of all ranks, and each contact once, with the longest times that any of its ranks measured."""
    times: dict[tuple[str, tuple[int, ...]], list[TimedContact]] = {}
    for _, made in rows:
        for one in made:
            times.setdefault((one.name, one.ranks), []).append(one)
    contacts = [
        {
            "name": name,
            "ranks": ranks,
            "first_s": round(max(one.first_s for one in found), 6),
            "best_s": round(max(one.best_s for one in found), 6),
        }
        for (name, ranks), found in times.items()
    ]
    return {"limit_s": limit, "hosts": [host for host, _ in rows], "contacts": contacts}


_KEY = "ppctl/roll"
_LATER = 10.0
"""Seconds by which ranks wait longer for rank 0's result than rank 0 waits for their entries."""
_SHOWN = 8

_KINDS: Mapping[str, type[PpctlError]] = {"PP-E707": DeadEdge, "PP-E709": TrainingError, "PP-E742": ConfigError}


class _Absent(Exception):
    """Raised if ranks have not written their entries in time; the text names them."""


def call_roll(
    store: SealedStore,
    rank: int,
    world: int,
    digest: str,
    *,
    edge_limit: float,
    patience: float,
    pairs: Callable[[], Iterable[tuple[int, int]]] = tuple,
) -> list[str]:
    """Return the hosts, in the order of their first ranks, once every rank has come and nothing is wrong.

    `digest` stands for the run that this rank has. All times are in seconds: ranks have `patience` to come, hosts
    `edge_limit` to reach each other. Hosts of ranks that will exchange messages (`pairs`, asked on rank 0) try each
    other; `_tried_by_host` has what else each tries. Every rank raises the same error: TrainingError (PP-E709) if some
    did not come, ConfigError (PP-E742) if runs differ, DeadEdge (PP-E707) if a host does not reach another.
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
                for number, tried in _tried_by_host(ranks, pairs()).items() if len(first) > 1 else ():
                    store.set(f"{_KEY}/try/{number}", [[other, *ranks[other]["address"]] for other in tried])
                store.set(f"{_KEY}/hosts", [[number, each["host"]] for number, each in first.items()])
            hosts = _try_hosts(store, rank, edge_limit, patience + _LATER)
            if rank == 0 and len(hosts) > 1 and problem is None:
                problem = _dead_edges(ranks, _read(store, "unreached", first, edge_limit + _LATER))
        except _Absent as absent:
            problem = Problem("PP-E709", str(absent), "ppctl explain PP-E709")
            store.set(f"{_KEY}/hosts", [])
        _raise_on_every_rank(store, rank, world, problem, patience + edge_limit + 2 * _LATER)
    return hosts


def _read(store: SealedStore, what: str, ranks: Iterable[int], patience: float) -> dict[int, Any]:
    """The entries of these ranks under `what`. Raises _Absent naming the ranks that are silent for `patience`
    seconds."""
    keys = {rank: f"{_KEY}/{what}/{rank}" for rank in ranks}
    try:
        store.plain.wait([*keys.values()], timedelta(seconds=patience))
    except RuntimeError:
        absent = [str(rank) for rank, key in keys.items() if not store.plain.check([key])]
        named = some(absent, _SHOWN)
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
    first: dict[str, int] = {}
    for rank, each in ranks.items():
        first.setdefault(each["host"], rank)
    return {rank: ranks[rank] for rank in first.values()}


def _tried_by_host(ranks: Mapping[int, Any], pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """First rank of each host -> the first ranks of hosts that it tries.

    Hosts try each other if `pairs` or the world's ring joins them, and rank 0's host tries all and is tried by all, as
    every rank speaks to rank 0. Each also tries the hosts 1, 2, 4, 8, ... after it, so that many hosts try each host.
    """
    first = list(_first_of_each_host(ranks))
    of_host = {ranks[rank]["host"]: place for place, rank in enumerate(first)}
    place = {rank: of_host[each["host"]] for rank, each in ranks.items()}
    distances = [2**power for power in range((len(first) - 1).bit_length())]
    tried = [{(own + distance) % len(first) for distance in distances} for own in range(len(first))]
    for one, other in chain(pairs, pairwise(ranks), ((0, rank) for rank in first)):
        tried[place[one]].add(place[other])
        tried[place[other]].add(place[one])
    return {first[own]: [first[other] for other in sorted(others - {own})] for own, others in enumerate(tried)}


def _try_hosts(store: SealedStore, rank: int, limit: float, patience: float) -> list[str]:
    """Let the first rank of every host try the hosts that rank 0 names; returns the names of all hosts."""
    store.plain.wait([f"{_KEY}/hosts"], timedelta(seconds=patience))
    rows = store.get(f"{_KEY}/hosts")
    if len(rows) > 1 and rank in [first for first, _ in rows]:
        addresses = {int(other): (str(host), int(port)) for other, host, port in store.get(f"{_KEY}/try/{rank}")}
        reasons = unreached(addresses, limit)
        store.set(f"{_KEY}/unreached/{rank}", [[other, *addresses[other], reason] for other, reason in reasons.items()])
    return [str(name) for _, name in rows]


def _dead_edges(ranks: Mapping[int, Any], reported: Mapping[int, Any]) -> Problem | None:
    lines = [
        f"rank {rank} on {ranks[rank]['host']} does not reach rank {other} on {ranks[other]['host']} "
        f"at {host} port {port}: {reason}"
        for rank, failures in reported.items()
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
    store.plain.wait([f"{_KEY}/result"], timedelta(seconds=patience))
    result = store.get(f"{_KEY}/result")
    if result is None:
        return
    readers = store.plain.add(f"{_KEY}/readers", 1)
    deadline = time.monotonic() + _LATER
    while rank == 0 and readers < world and time.monotonic() < deadline:
        time.sleep(0.02)
        with suppress(RuntimeError):
            readers = store.plain.add(f"{_KEY}/readers", 0)
    raise _KINDS[result["code"]](Problem(**result))
