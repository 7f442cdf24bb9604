"""How one rank's ends of a pipeline's channels are made: which channels there are, and what carries each.

Knows the channels of a loop, gloo's tags and threads, and that on a GPU a channel has a connection of its own. Must not
know what is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.channels import DirectEnd, PinnedEnd, Transport
from ppctl.comm.connections import Connections, connections_of, device_backend, moves_on_device
from ppctl.comm.variable_shapes import VariableEnd
from ppctl.schedule.action import Channel

TAGS = {"F": 1, "B": 2}
"""What tells the channels between two ranks apart on a backend with tags."""
HEADER_TAGS = {"F": 3, "B": 4}
"""The same for the headers of messages of variable shape."""

_CPU = torch.device("cpu")


def loop_channels(size: int) -> tuple[Channel, ...]:
    """The channels of a loop placement: activations to the next rank, gradients to the previous one, wrapping round."""
    edges = [(rank, (rank + 1) % size) for rank in range(size)] if size > 1 else []
    return tuple(sorted({Channel(a, b, "F") for a, b in edges} | {Channel(b, a, "B") for a, b in edges}))


def make_ends(
    pp_group: ProcessGroup,
    device: torch.device,
    channels: Iterable[Channel],
    *,
    variable: bool = False,
    connect: bool = True,
) -> dict[Channel, DirectEnd]:
    """This rank's ends of the channels. On NCCL all ranks make them in one order, so that none waits in a circle.

    Tensors of a `device` that the group's backend does not move go through pinned host memory. `variable` ends learn
    the shapes of their messages from headers. Without `connect` NCCL connects on each end's first message.
    """
    rank = pp_group.rank()
    own = [channel for channel in sorted(channels) if rank in channel[:2]]
    if device.type == "cuda" and moves_on_device(pp_group):
        kind = device_backend(pp_group)
        assert kind is not None  # or nothing would move on the device
        return _pair_ends(connections_of(pp_group), kind, device, own, variable=variable, connect=connect)
    connections = _host_connections(pp_group)
    end_type = DirectEnd if device.type == "cpu" else PinnedEnd
    ends: dict[Channel, DirectEnd] = {
        c: end_type(c, connections[c.direction], other_end(c, rank), TAGS[c.direction]) for c in own
    }
    if not variable:
        return ends
    headers = {c: DirectEnd(c, connections[c.direction], other_end(c, rank), HEADER_TAGS[c.direction]) for c in own}
    return {c: VariableEnd(ends[c], headers[c], device, _CPU) for c in own}


def _host_connections(pp_group: ProcessGroup) -> dict[str, Transport]:
    """What carries messages of the host by direction: on gloo, connections of their own for each.

    A thread that sends or posts holds gloo's lock on the connection for the whole system call. If a message comes over
    the same connection meanwhile, gloo's own thread asks for the lock again and again, on a core that the lock's holder
    may be waiting for (decision 9). What is sent one way and what comes the other way then must not share a connection.
    """
    backend = cast(Transport, pp_group._get_backend(_CPU))
    if pp_group.size() == 1 or pp_group._get_backend(_CPU).name() != "gloo":
        return dict.fromkeys("FB", backend)
    return {"F": backend, "B": connections_of(pp_group).of_all("gloo", "gradients")}


def other_end(channel: Channel, rank: int) -> int:
    """The rank that a channel connects `rank` with."""
    return channel.target if channel.source == rank else channel.source


def warm_up(pp_group: ProcessGroup, device: torch.device) -> None:
    """Let all ranks of a group meet once: NCCL wants that before messages between some of them are batched."""
    dist.all_reduce(torch.zeros(1, device=device), group=pp_group)
    torch.cuda.synchronize(device)


def _pair_ends(
    connections: Connections, kind: str, device: torch.device, own: list[Channel], *, variable: bool, connect: bool
) -> dict[Channel, DirectEnd]:
    """A connection of its two ends for every channel (and for its headers, where shapes vary)."""

    def end(channel: Channel, part: str) -> DirectEnd:
        peer = sorted(channel[:2]).index(other_end(channel, connections.rank))
        made = DirectEnd(channel, connections.of_pair(kind, channel, part), peer, 0)
        if connect:
            _connect(made, connections.rank, device)
        return made

    if not variable:
        return {channel: end(channel, "body") for channel in own}
    return {c: VariableEnd(end(c, "body"), end(c, "header"), device, device) for c in own}


def _connect(end: DirectEnd, rank: int, device: torch.device) -> None:
    """Send a first message, so that connecting is in no step."""
    probe = (torch.zeros(1, device=device),)
    for work in end.start_send(probe) if end.channel.source == rank else end.receive_into(probe):
        work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
