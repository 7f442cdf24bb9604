"""How the lanes of one pipeline rank come about: which channels there are, and what carries each.

Knows the channels of a loop, gloo's tags and NCCL's two-rank groups. Must not know what is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.channels import Lane, Transport
from ppctl.schedule.action import Channel

_TAGS = {"F": 1, "B": 2}


def loop_channels(size: int) -> tuple[Channel, ...]:
    """The channels of a loop placement: activations to the next rank, gradients to the previous one, wrapping round."""
    edges = [(rank, (rank + 1) % size) for rank in range(size)] if size > 1 else []
    return tuple(sorted({Channel(a, b, "F") for a, b in edges} | {Channel(b, a, "B") for a, b in edges}))


def make_lanes(pp_group: ProcessGroup, device: torch.device, channels: Iterable[Channel]) -> dict[Channel, Lane]:
    """This rank's ends of the channels. On NCCL all ranks make them in one order, so that none waits in a circle."""
    rank = pp_group.rank()
    own = [channel for channel in sorted(channels) if rank in channel[:2]]
    if device.type == "cpu":
        backend = cast(Transport, pp_group._get_backend(device))
        return {c: Lane(c, backend, _other_end(c, rank), _TAGS[c.direction]) for c in own}
    return {channel: _nccl_lane(pp_group, device, channel) for channel in own}


def _other_end(channel: Channel, rank: int) -> int:
    return channel.target if channel.source == rank else channel.source


def _nccl_lane(pp_group: ProcessGroup, device: torch.device, channel: Channel) -> Lane:
    """A group of the two ends, warmed up: NCCL connects on the first message, which must not fall into a step."""
    rank = pp_group.rank()
    ends = sorted(channel[:2])
    ranks = [dist.get_global_rank(pp_group, end) for end in ends]
    group = dist.new_group(ranks, backend="nccl", use_local_synchronization=True, sort_ranks=False)
    assert isinstance(group, ProcessGroup)  # this rank is one of its ends
    backend = cast(Transport, group._get_backend(device))
    lane = Lane(channel, backend, ends.index(_other_end(channel, rank)), 0)
    probe = (torch.zeros(1, device=device),)
    for work in lane.start_send(probe) if channel.source == rank else lane.receive_into(probe):
        work.wait()
    torch.cuda.synchronize(device)
    return lane
