"""The messages of one pipeline as the engine uses them: channels, receive buffers and batches, from one rank's view.

Must not know schedules, stages or Megatron's methods (`ppctl.megatron.p2p_communication` adds those).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import torch
from torch.distributed import ProcessGroup

from ppctl.comm.buffers import BufferPool
from ppctl.comm.channels import DirectEnd
from ppctl.comm.connections import Connections, connections_of, loop_channels, make_ends, meet_once, moves_on_device
from ppctl.comm.message_batches import BatchedEnd, ChannelEnd, FusedBatch, LooseBatch, MessageBatch
from ppctl.comm.modes import Modes
from ppctl.errors import ConfigError, Problem, ScheduleError
from ppctl.host.devices import QUEUES, why_one_queue_blocks
from ppctl.schedule.action import Channel

_OWN_CHANNELS = Modes()
"""Every message on its channel, of the shape that the stages declare."""


class Communicator:
    """This rank's ends of a pipeline's channels, and the pool that their messages are received into.

    `pp_group` has the pipeline's ranks in pp order; all of them construct it together. `channels` are the channels to
    make, by default those of a loop; pass those of a V. `modes` say how messages are sent, by default each on its
    channel. `device` is where tensors live: by default a GPU if the group's backend sends GPU tensors, else torch's
    default device. GPU tensors on a gloo group go through pinned host memory. Without `connect`, NCCL channels connect
    on their first message; if shapes vary, that must happen before the engine's messages (`ppctl.reach` then sets
    `connected`), or the engine refuses to run. `ends` are this rank's ends of all channels, if the caller has made
    them. Raises ConfigError (PP-E608) if channels and kernels of a GPU would share one hardware queue.
    """

    def __init__(
        self,
        pp_group: ProcessGroup,
        modes: Modes = _OWN_CHANNELS,
        *,
        channels: Iterable[Channel] | None = None,
        device: torch.device | None = None,
        connect: bool = True,
        ends: Mapping[Channel, DirectEnd] | None = None,
    ) -> None:
        self.modes = modes
        self.pp_group = pp_group
        self.pp_rank = pp_group.rank()
        self.pp = pp_group.size()
        on_device = moves_on_device(pp_group)
        usual = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.get_default_device()
        self.device = device or usual
        self.staged = self.device.type == "cuda" and not on_device
        """Whether messages go through pinned host memory."""
        self.fused = modes.batched and on_device and ends is None
        """Whether batches are fused by batch_isend_irecv: a host's backend would only start message after message."""
        self.sync = self.device if modes.sync and self.device.type == "cuda" else None
        """The device to synchronise after each fused batch (batch_p2p_sync)."""
        self.pool = BufferPool(self.device)
        self.connected = connect or ends is not None or not on_device
        """Whether no channel connects on a message of the engine's."""
        self._ends: dict[Channel, DirectEnd] = dict(ends or {})
        if self.fused and on_device:
            meet_once(pp_group, self.device)
        if ends is None and (not self.fused or modes.variable):
            if on_device:
                _refuse_one_queue(self.pp)
            wanted = loop_channels(self.pp) if channels is None else channels
            self._ends = make_ends(pp_group, self.device, wanted, variable=modes.variable, connect=connect)
        self._connections: Connections | None = connections_of(pp_group)
        self._connections.enter()

    @property
    def batched(self) -> bool:
        """Whether the schedules that run on this must be lowered with `batched=True`."""
        return self.modes.batched

    @property
    def ends(self) -> tuple[DirectEnd, ...]:
        """This rank's ends of all channels; empty where messages are fused."""
        return tuple(self._ends.values())

    def close(self) -> None:
        """End this communicator; the last one over the process group also ends their connections.

        All ranks of the pipeline call it, with nothing under way, before the group is destroyed. Only NCCL needs it:
        connections that are open at the end of a process are aborted.
        """
        self._ends.clear()
        if self._connections is not None:
            self._connections.leave()
            self._connections = None

    def batch(self) -> MessageBatch:
        """A new batch. Messages whose shapes are not known in advance start one by one, as each becomes known."""
        if self.fused and not self.modes.variable:
            return FusedBatch(self.pp_group, sync=self.sync)
        return LooseBatch(self.end)

    def end_in(self, channel: Channel, batch: MessageBatch | None = None) -> ChannelEnd:
        """This rank's end of a channel as the engine uses it: its own, or a part of `batch`.

        Raises ScheduleError if shapes vary and channels are not connected yet: one host would wait for the other to
        connect, which waits for a header that the first one has not enqueued.
        """
        if self.modes.variable and not self.connected:
            message = (
                f"the channels of pp_rank {self.pp_rank} would connect on messages of variable shape, and two ranks "
                "that read each other's headers would wait for each other"
            )
            raise ScheduleError(Problem("PP-E390", message, "Communicator(pp_group, modes, connect=True)"))
        return self.end(channel) if batch is None else BatchedEnd(channel, batch)

    def end(self, channel: Channel) -> DirectEnd:
        """This rank's end of a channel. Raises ScheduleError for a channel that was not made."""
        if channel not in self._ends:
            message = (
                f"the communicator of pp_rank {self.pp_rank} has no channel {channel}: by default it has the channels "
                "of a loop"
            )
            remedy = "P2PCommunicator(pp_group, config, channels=schedule.capacities)"
            raise ScheduleError(Problem("PP-E390", message, remedy))
        return self._ends[channel]


def _refuse_one_queue(pp: int) -> None:
    """A run's launcher and ranks have looked before; scripts and Megatron's users come here first."""
    message = why_one_queue_blocks(pp, os.environ.get(QUEUES))
    if message is not None:
        raise ConfigError(Problem("PP-E608", message, f"unset {QUEUES}", "environment"))
