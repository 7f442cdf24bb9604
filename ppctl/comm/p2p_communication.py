"""Point-to-point messages between the ranks of one pipeline: the communicator, its channels, and Megatron's methods.

Knows process groups and lanes. Must not know schedules or stages.

Every directed edge has a channel of its own for activations and one for gradients, so that neither the two directions
between two ranks nor a posted receive and a send can get in each other's way, also where both neighbours are the same
rank (pp = 2). On gloo a channel is a tag; on NCCL it is a two-rank group, with its own communicator and stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.buffers import BufferPool
from ppctl.comm.channels import Lane, Transport
from ppctl.errors import ConfigError, Problem
from ppctl.schedule.action import Channel

Shape = list[int] | torch.Size
"""The shape of one tensor, as the methods take it (a tuple of ints does as well)."""

_TAGS = {"F": 1, "B": 2}


def is_single_shape(x: Any) -> bool:
    """Whether `x` is one shape (a torch.Size, or a non-empty list or tuple of ints) and not a list of shapes."""
    if isinstance(x, torch.Size):
        return True
    return isinstance(x, list | tuple) and len(x) > 0 and all(isinstance(size, int) for size in x)


def loop_channels(size: int) -> tuple[Channel, ...]:
    """The channels of a loop placement: activations to the next rank, gradients to the previous one, wrapping round."""
    edges = [(rank, (rank + 1) % size) for rank in range(size)] if size > 1 else []
    return tuple(sorted({Channel(a, b, "F") for a, b in edges} | {Channel(b, a, "B") for a, b in edges}))


class P2PCommunicator:
    """The channels between the ranks of one pipeline, from one rank's point of view.

    `pp_group` holds the pipeline's ranks in pp order; `config` is a ModelParallelConfig (or anything with its fields).
    All ranks of the group construct it together. `channels` are the ones to make, by default those of a loop; a V
    placement gives its own. Raises ConfigError for message modes that this version does not have.
    """

    def __init__(self, pp_group: ProcessGroup, config: Any, *, channels: Iterable[Channel] | None = None) -> None:
        _refuse_unbuilt_modes(config)
        self.pp_group = pp_group
        self.config = config
        self._rank = pp_group.rank()
        self._size = pp_group.size()
        on_cuda = "nccl" in dist.get_backend(pp_group)
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        self.pool = BufferPool(self.device)
        self._lanes = self._make_lanes(loop_channels(self._size) if channels is None else tuple(channels))

    @property
    def current_stage(self) -> int:
        """This rank's position on the pipeline axis (its pp_rank)."""
        return self._rank

    @property
    def total_stages(self) -> int:
        """How many ranks the pipeline has."""
        return self._size

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this is the pipeline's first rank."""
        return self._rank == 0

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this is the pipeline's last rank."""
        return self._rank == self._size - 1

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """The config's number of chunks per rank."""
        size: int | None = getattr(self.config, "virtual_pipeline_model_parallel_size", None)
        return size

    @property
    def prev_rank(self) -> int:
        """Global rank of the previous rank of the pipeline; the first one's is the last."""
        return dist.get_global_rank(self.pp_group, (self._rank - 1) % self._size)

    @property
    def next_rank(self) -> int:
        """Global rank of the next rank of the pipeline; the last one's is the first."""
        return dist.get_global_rank(self.pp_group, (self._rank + 1) % self._size)

    def lane(self, channel: Channel) -> Lane:
        """This rank's end of a channel. Raises KeyError for a channel that was not made."""
        return self._lanes[channel]

    def _make_lanes(self, channels: tuple[Channel, ...]) -> dict[Channel, Lane]:
        """This rank's ends of the channels, made in one global order on all ranks."""
        own = [channel for channel in sorted(channels) if self._rank in channel[:2]]
        if self.device.type == "cpu":
            backend = cast(Transport, self.pp_group._get_backend(self.device))
            return {c: Lane(c, backend, self._peer(c), _TAGS[c.direction]) for c in own}
        return {channel: self._make_nccl_lane(channel) for channel in own}

    def _peer(self, channel: Channel) -> int:
        return channel.target if channel.source == self._rank else channel.source

    def _make_nccl_lane(self, channel: Channel) -> Lane:
        """A group of the two ends, warmed up: NCCL connects on the first message, which must not be in a step."""
        ends = sorted(channel[:2])
        ranks = [dist.get_global_rank(self.pp_group, end) for end in ends]
        group = dist.new_group(ranks, backend="nccl", use_local_synchronization=True, sort_ranks=False)
        assert isinstance(group, ProcessGroup)  # this rank is one of its ends
        backend = cast(Transport, group._get_backend(self.device))
        lane = Lane(channel, backend, ends.index(self._peer(channel)), 0)
        probe = (torch.zeros(1, device=self.device),)
        works = lane.start_send(probe) if channel.source == self._rank else lane.receive_into(probe)
        for work in works:
            work.wait()
        torch.cuda.synchronize(self.device)
        return lane


def _refuse_unbuilt_modes(config: Any) -> None:
    problems = [
        Problem(
            "PP-E190",
            f"parallel.{name}={getattr(config, name)} is not built yet: messages travel on channels of their own",
            f"parallel.{name}={off}",
        )
        for name, off in (
            ("batch_p2p_comm", "false"),
            ("use_ring_exchange_p2p", "false"),
            ("variable_seq_lengths", "false"),
        )
        if getattr(config, name, False)
    ]
    if problems:
        raise ConfigError(problems)
