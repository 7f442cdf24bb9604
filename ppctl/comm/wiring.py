"""How the lanes of one pipeline rank come about: which channels there are, and what carries each.

Knows the channels of a loop, gloo's tags and threads, and NCCL's two-rank groups. Must not know what is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.channels import Lane, Transport
from ppctl.comm.groups import make_group
from ppctl.comm.host import HostLane
from ppctl.comm.shapes import VariableLane
from ppctl.schedule.action import Channel

TAGS = {"F": 1, "B": 2}
"""What tells the channels between two ranks apart on a backend with tags."""
HEADER_TAGS = {"F": 3, "B": 4}
"""The same for the headers of messages of variable shape."""

_CPU = torch.device("cpu")

_OPPOSITE: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
"""Of a pipeline's group, the group that carries its gradients: made once, whatever number of communicators it has."""


def loop_channels(size: int) -> tuple[Channel, ...]:
    """The channels of a loop placement: activations to the next rank, gradients to the previous one, wrapping round."""
    edges = [(rank, (rank + 1) % size) for rank in range(size)] if size > 1 else []
    return tuple(sorted({Channel(a, b, "F") for a, b in edges} | {Channel(b, a, "B") for a, b in edges}))


def moves_on_device(pp_group: ProcessGroup) -> bool:
    """Whether the group's backend moves CUDA tensors itself."""
    return torch.cuda.is_available() and _device_backend(pp_group) is not None


def _device_backend(pp_group: ProcessGroup) -> str | None:
    return next((name for name in ("nccl", "ucc") if name in dist.get_backend(pp_group)), None)


def make_lanes(
    pp_group: ProcessGroup,
    device: torch.device,
    channels: Iterable[Channel],
    *,
    variable: bool = False,
    connect: bool = True,
) -> dict[Channel, Lane]:
    """This rank's ends of the channels. On NCCL all ranks make them in one order, so that none waits in a circle.

    Tensors of a `device` that the group's backend does not move go through pinned host memory. `variable` lanes learn
    the shapes of their messages from headers. Without `connect` NCCL connects on each lane's first message.
    """
    rank = pp_group.rank()
    own = [channel for channel in sorted(channels) if rank in channel[:2]]
    if device.type == "cuda" and moves_on_device(pp_group):
        bodies = {channel: _pair_lane(pp_group, device, channel, connect) for channel in own}
        if not variable:
            return bodies
        return {c: VariableLane(bodies[c], _pair_lane(pp_group, device, c, connect), device, device) for c in own}
    wires = _host_wires(pp_group)
    kind = Lane if device.type == "cpu" else HostLane
    lanes: dict[Channel, Lane] = {c: kind(c, wires[c.direction], other_end(c, rank), TAGS[c.direction]) for c in own}
    if not variable:
        return lanes
    headers = {c: Lane(c, wires[c.direction], other_end(c, rank), HEADER_TAGS[c.direction]) for c in own}
    return {c: VariableLane(lanes[c], headers[c], device, _CPU) for c in own}


def _host_wires(pp_group: ProcessGroup) -> dict[str, Transport]:
    """What carries messages of the host by direction: on gloo, connections of their own for each.

    A thread that sends or posts holds gloo's lock on the connection for the whole system call. If a message comes over
    the same connection meanwhile, gloo's own thread asks for the lock again and again, on a core that the lock's holder
    may be waiting for (decision 9). What is sent one way and what comes the other way then must not share a connection.
    """
    wire = pp_group._get_backend(_CPU)
    if pp_group.size() == 1 or wire.name() != "gloo":
        return dict.fromkeys("FB", cast(Transport, wire))
    if pp_group not in _OPPOSITE:
        _OPPOSITE[pp_group] = make_group([tuple(dist.get_process_group_ranks(pp_group))], backend="gloo")
    return {"F": cast(Transport, wire), "B": cast(Transport, _OPPOSITE[pp_group]._get_backend(_CPU))}


def other_end(channel: Channel, rank: int) -> int:
    """The rank that a channel connects `rank` with."""
    return channel.target if channel.source == rank else channel.source


def warm_up(pp_group: ProcessGroup, device: torch.device) -> None:
    """Let all ranks of a group meet once: NCCL wants that before messages between some of them are batched."""
    dist.all_reduce(torch.zeros(1, device=device), group=pp_group)
    torch.cuda.synchronize(device)


def _pair_lane(pp_group: ProcessGroup, device: torch.device, channel: Channel, connect: bool) -> Lane:
    """A group of the two ends. NCCL connects on the first message: `connect` sends it, so that it is in no step."""
    rank = pp_group.rank()
    ends = sorted(channel[:2])
    ranks = [dist.get_global_rank(pp_group, end) for end in ends]
    name = _device_backend(pp_group)
    group = dist.new_group(ranks, backend=name, use_local_synchronization=True, sort_ranks=False)
    assert isinstance(group, ProcessGroup)  # this rank is one of its ends
    backend = cast(Transport, group._get_backend(device))
    lane = Lane(channel, backend, ends.index(other_end(channel, rank)), 0)
    if not connect:
        return lane
    probe = (torch.zeros(1, device=device),)
    for work in lane.start_send(probe) if channel.source == rank else lane.receive_into(probe):
        work.wait()
    torch.cuda.synchronize(device)
    return lane
