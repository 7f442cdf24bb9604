"""Before a run's first step: every channel and every process group is touched once, and a dead edge is named.

Knows a pipeline's channels, a rank's groups and the limits of a run. Must not know how a contact is made, nor files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.communicator import Communicator
from ppctl.config.quantities import seconds
from ppctl.config.schema import LaunchConfig
from ppctl.heartbeat import host_name
from ppctl.reach.contact import Contact, Made, Meeting
from ppctl.reach.edges import channel_contacts, group_contacts

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def warm_up(
    store: Store,
    launch: LaunchConfig,
    device: torch.device,
    communicator: Communicator | None,
    groups: Mapping[str, ProcessGroup],
    ties: ProcessGroup | None = None,
) -> dict[str, Any] | None:
    """Touch every channel of the pipeline, every one of this rank's `groups` by axis, that of tied weights, the world.

    On rank 0, what edges.json holds. A collective over the world; raises DeadEdge.
    """
    rank, limit = dist.get_rank(), float(seconds(launch.edge_limit))
    meeting = Meeting(store, rank, dist.get_world_size(), host_name(), float(seconds(launch.start_limit)))
    contacts = _contacts(device, communicator, groups, ties)
    made = meeting.make_contact(contacts, limit, lambda: _enter(device))
    rows: list[Any] | None = [None] * meeting.world if rank == 0 else None
    dist.gather_object((meeting.host, made), rows)
    return None if rows is None else _record(rows, limit)


def _contacts(
    device: torch.device,
    communicator: Communicator | None,
    groups: Mapping[str, ProcessGroup],
    ties: ProcessGroup | None,
) -> list[Contact]:
    contacts: list[Contact] = []
    if communicator is not None:
        contacts += channel_contacts(communicator.ends, communicator.pp_group, communicator.device)
    for axis, group in groups.items():
        touched = communicator is not None and bool(communicator.ends) and group is communicator.pp_group
        contacts += group_contacts(axis, group, device, ring=not touched)
    if ties is not None:
        contacts += group_contacts("ties", ties, device, ring=False)
    world = dist.group.WORLD
    assert world is not None  # the ranks have joined it
    # What the world says to each other is said between hosts' CPUs.
    return contacts + group_contacts("world", world, torch.device("cpu"))


def _enter(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _record(rows: Iterable[tuple[str, list[Made]]], limit: float) -> dict[str, Any]:
    """All ranks' contacts, each once; of several ranks' times the longest."""
    rows = list(rows)
    hosts = [host for host, _ in rows]
    longest: dict[tuple[str, tuple[int, ...]], Made] = {}
    for _, made in rows:
        for one in made:
            known = longest.get((one.name, one.ranks), one)
            first, best = max(known.first_s, one.first_s), max(known.best_s, one.best_s)
            longest[one.name, one.ranks] = Made(one.name, one.ranks, first, best)
    return {
        "limit_s": limit,
        "hosts": hosts,
        "contacts": [
            {"name": one.name, "ranks": one.ranks, "first_s": round(one.first_s, 6), "best_s": round(one.best_s, 6)}
            for one in longest.values()
        ],
    }
