"""Before a run's first step: every channel and every process group is touched once, and a dead edge is named.

Knows a session's channels and groups, and the limits of a run. Must not know how a contact is made, nor files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ppctl.comm.contact import Contact, Made, Meeting
from ppctl.comm.edges import channel_contacts, group_contacts
from ppctl.config.quantities import seconds
from ppctl.config.schema import LaunchConfig
from ppctl.heartbeat import host_name
from ppctl.train.session import Session

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def warm_up(session: Session, store: Store, launch: LaunchConfig) -> dict[str, Any] | None:
    """Touch everything. On rank 0, what edges.json holds. A collective over the world; raises DeadEdge."""
    rank, limit = dist.get_rank(), float(seconds(launch.edge_limit))
    meeting = Meeting(store, rank, dist.get_world_size(), host_name(), float(seconds(launch.start_limit)))
    made = meeting.make_contact(_contacts(session), limit, lambda: _enter(session.device))
    rows: list[Any] | None = [None] * meeting.world if rank == 0 else None
    dist.gather_object((meeting.host, made), rows)
    return None if rows is None else _record(rows, limit)


def _contacts(session: Session) -> list[Contact]:
    contacts: list[Contact] = []
    p2p = session.communicator
    if p2p is not None:
        contacts += channel_contacts(p2p.lanes, p2p.pp_group, p2p.device)
    for axis, group in session.groups.items():
        touched = p2p is not None and bool(p2p.lanes) and group is p2p.pp_group
        contacts += group_contacts(axis, group, session.device, ring=not touched)
    if session.ties.group is not None:
        contacts += group_contacts("ties", session.ties.group, session.device, ring=False)
    world = dist.group.WORLD
    assert world is not None  # a session is built in one
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
