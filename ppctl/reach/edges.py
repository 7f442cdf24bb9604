"""What there is to touch: the channels of a pipeline, and the members of a process group, as contacts.

Knows ends and backends. Must not know what an axis means, nor what happens when one does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.channel_ends import other_end
from ppctl.comm.channels import DirectEnd, Pending, Transport
from ppctl.comm.variable_shapes import VariableEnd
from ppctl.reach.contact import Contact
from ppctl.schedule.action import Channel

_TAG = 5
"""Of messages round a group; channels have 1 to 4."""
_CPU = torch.device("cpu")


def channel_contacts(ends: Sequence[DirectEnd], pp_group: ProcessGroup, device: torch.device) -> list[Contact]:
    """This rank's channels. Every rank of the pipeline goes through its own in one common order."""
    rank, ranks = pp_group.rank(), dist.get_process_group_ranks(pp_group)
    ordered = sorted(ends, key=lambda end: (_turn(end.channel, len(ranks)), end.channel))
    return [
        Contact(f"channel {end.channel}", (ranks[end.channel.source], ranks[end.channel.target]), _touch(part, rank))
        for end in ordered
        for part in _parts(end, device)
    ]


def group_contacts(name: str, group: ProcessGroup, device: torch.device, *, ring: bool = True) -> list[Contact]:
    """The group's own: on gloo a message over every edge of its ring, then a collective on each of its backends."""
    size, rank, ranks = group.size(), group.rank(), tuple(dist.get_process_group_ranks(group))
    if size == 1:
        return []
    contacts = []
    backend = _host_backend(group)
    if ring and backend is not None:
        edges = [Channel(source, (source + 1) % size, "F") for source in range(size)]
        for edge in sorted((edge for edge in edges if rank in edge[:2]), key=lambda edge: _turn(edge, size)):
            end = DirectEnd(edge, backend, other_end(edge, rank), _TAG)
            ends = (ranks[edge.source], ranks[edge.target])
            contacts.append(Contact(f"edge of group {name}", ends, _touch((end, _CPU), rank)))
    devices = [_CPU] * (backend is not None) + [device] * (backend is None or device != _CPU)
    return contacts + [Contact(f"group {name} ({on.type})", ranks, _collective(group, on)) for on in devices]


def _host_backend(group: ProcessGroup) -> Transport | None:
    """What carries messages of the host, where that is gloo."""
    try:
        backend = group._get_backend(_CPU)
    except RuntimeError:
        return None
    return cast(Transport, backend) if backend.name() == "gloo" else None


def _turn(edge: Channel, size: int) -> tuple[int, int]:
    """When an edge of a ring has its turn: first every other one, then those between; of an odd ring the last alone."""
    index = edge.source if edge.target == (edge.source + 1) % size else edge.target
    return (2 if size % 2 and index == size - 1 else index % 2), index


_Part = tuple[DirectEnd, torch.device]


def _parts(end: DirectEnd, device: torch.device) -> list[_Part]:
    """What carries a channel's messages, and where their tensors lie."""
    if isinstance(end, VariableEnd):
        return [(end.headers, end.header_device), (end.body, device)]
    return [(end, device)]


def _touch(part: _Part, rank: int) -> Callable[[], None]:
    end, device = part

    def touch() -> None:
        probe = (torch.zeros(1, device=device),)
        works: Sequence[Pending] = end.start_send(probe) if end.channel.source == rank else end.receive_into(probe)
        for work in works:
            work.wait()
        _settle(device)

    return touch


def _collective(group: ProcessGroup, device: torch.device) -> Callable[[], None]:
    def touch() -> None:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _settle(device)

    return touch


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
