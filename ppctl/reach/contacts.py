"""What the first contact tries: the channels of a pipeline, and the members of a process group.

Knows channel ends and backends. Must not know what an axis means, nor what happens when a contact fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.channel_ends import other_end
from ppctl.comm.channels import DirectEnd, Pending, Transport
from ppctl.comm.shapes import VariableEnd
from ppctl.reach.first_contact import Contact
from ppctl.schedule.action import Channel

_TAG = 5
"""Of messages round a group; channels have 1 to 4."""
_CPU = torch.device("cpu")


def channel_contacts(ends: Sequence[DirectEnd], pp_group: ProcessGroup, device: torch.device) -> list[Contact]:
    """This rank's channels, in the order that all ranks of the pipeline follow."""
    rank, ranks = pp_group.rank(), dist.get_process_group_ranks(pp_group)
    contacts = []
    for end in sorted(ends, key=lambda end: (_turn(end.channel, len(ranks)), end.channel)):
        name, between = f"channel {end.channel}", (ranks[end.channel.source], ranks[end.channel.target])
        if isinstance(end, VariableEnd):
            contacts.append(Contact(name, between, _message(end.headers, end.header_device, rank)))
            contacts.append(Contact(name, between, _message(end.body, device, rank)))
        else:
            contacts.append(Contact(name, between, _message(end, device, rank)))
    return contacts


def group_contacts(name: str, group: ProcessGroup, device: torch.device, *, ring: bool = True) -> list[Contact]:
    """A group's contacts: on gloo a message over every edge of its ring, then a collective on each of its backends."""
    size, rank, ranks = group.size(), group.rank(), tuple(dist.get_process_group_ranks(group))
    if size == 1:
        return []
    contacts = []
    gloo = _gloo(group)
    if ring and gloo is not None:
        edges = [Channel(source, (source + 1) % size, "F") for source in range(size)]
        for edge in sorted((edge for edge in edges if rank in edge[:2]), key=lambda edge: _turn(edge, size)):
            end = DirectEnd(edge, gloo, other_end(edge, rank), _TAG)
            between = (ranks[edge.source], ranks[edge.target])
            contacts.append(Contact(f"edge of group {name}", between, _message(end, _CPU, rank)))
    devices = [_CPU] * (gloo is not None) + [device] * (gloo is None or device != _CPU)
    return contacts + [Contact(f"group {name} ({on.type})", ranks, _collective(group, on)) for on in devices]


def _gloo(group: ProcessGroup) -> Transport | None:
    """The group's gloo backend; None where CPUs have none, or another one."""
    try:
        backend = group._get_backend(_CPU)
    except RuntimeError:
        return None
    return cast(Transport, backend) if backend.name() == "gloo" else None


def _turn(edge: Channel, size: int) -> tuple[int, int]:
    """The place of a ring's edge in the order: first every second edge, then the others; the last of an odd ring alone.

    Thus no two edges of one rank have the same turn.
    """
    index = edge.source if edge.target == (edge.source + 1) % size else edge.target
    return (2 if size % 2 and index == size - 1 else index % 2), index


def _message(end: DirectEnd, device: torch.device, rank: int) -> Callable[[], None]:
    def send_or_receive() -> None:
        number = (torch.zeros(1, device=device),)
        works: Sequence[Pending] = end.start_send(number) if end.channel.source == rank else end.receive_into(number)
        for work in works:
            work.wait()
        _synchronize(device)

    return send_or_receive


def _collective(group: ProcessGroup, device: torch.device) -> Callable[[], None]:
    def all_reduce() -> None:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _synchronize(device)

    return all_reduce


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
