"""How ranks come together before the first step: the roll call, the default process group, the first messages.

Knows a pipeline's channels, a rank's groups and the limits of a run. Must not know how a contact is made, nor files.
Every error names ranks and hosts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.communicator import Communicator
from ppctl.comm.groups import connecting_on_first_use, gather_values
from ppctl.comm.sealed_store import SealedStore
from ppctl.config.quantities import seconds
from ppctl.config.schema import LaunchConfig
from ppctl.errors import Problem
from ppctl.heartbeat import host_name
from ppctl.reach.first_contact import Contact, FirstContact, TimedContact, channel_contacts, group_contacts
from ppctl.reach.hosts import CAUSES, REMEDY, DeadEdge, reason_of
from ppctl.reach.roll_call import call_roll

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["call_roll", "join_world", "warm_up"]

Exchanges = Mapping[str, Collection[str]]
"""Axis -> exchanges of its group other than collectives, as `group_contacts` names them."""


def join_world(store: Store, rank: int, world: int, backends: str, limit: timedelta) -> None:
    """Make the default process group on `backends` (`ppctl.devices`): gloo for messages between CPUs among them.

    A rank connects with its neighbours in the world's ring here; with other ranks on first use. `limit` is how long its
    backends wait for other ranks, and those of every group that is made later. Raises DeadEdge (PP-E707).

    By itself gloo connects every rank of a group with every other one: 2,047 sockets a rank in a world of 2,048, more
    than the usual limit of 1,024 files, and addresses that all go through rank 0's store (16 KiB a rank, which every
    rank reads: 69 GB). The world's messages go round a ring, or to rank 0.
    """
    # NCCL's watchdogs would end the process before it can report an error of the device, and one that waits while a
    # kernel is loaded would end it before the run's own limits do.
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(math.ceil(limit.total_seconds())))
    try:
        with connecting_on_first_use():
            dist.init_process_group(backends, store=store, rank=rank, world_size=world, timeout=limit)
            dist.all_reduce(torch.zeros(1))
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
    """Use every channel of the pipeline once, and this rank's `groups` (by axis), that of tied weights and the world.

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
    contacts: list[Contact] = []
    if communicator is not None:
        contacts += channel_contacts(communicator.ends, communicator.pp_group, communicator.device)
    for axis, group in groups.items():
        by_channels = communicator is not None and bool(communicator.ends) and group is communicator.pp_group
        contacts += group_contacts(axis, group, device, ring=not by_channels, exchanges=exchanges.get(axis, ()))
    if ties is not None:
        contacts += group_contacts("ties", ties, device, ring=False)
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
