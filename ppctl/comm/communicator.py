"""The messages of one pipeline as the engine uses them: channels, receive buffers and batches, from one rank's view.

Messages of a batch start together and are waited for together; the caller says when a batch is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.buffers import BufferPool, Message, Shelf
from ppctl.comm.channels import Arrival, DirectEnd, Pending, end_with, wait_for
from ppctl.comm.connections import Connections, connections_of, loop_channels, make_ends, moves_on_device
from ppctl.comm.modes import Modes
from ppctl.errors import ConfigError, Problem, ScheduleError
from ppctl.host.devices import QUEUES, why_one_queue_blocks
from ppctl.schedule.action import Channel


class LooseBatch:
    """Messages that each start on their channel as soon as they are added; with `one_by_one`, each is over before the
    next starts, as messages of variable shape on the pipeline's own group need. Their receives can start only when the
    header has been read, and only their order tells messages on one group apart. All ranks' lists have them in one
    order (`batch_messages`), so the first unfinished message can always go on. On CUDA the host waits only for headers.
    """

    def __init__(self, *, one_by_one: bool = False) -> None:
        self.one_by_one = one_by_one
        self._arrivals: list[Arrival] = []
        self._sends: list[tuple[Channel, Sequence[Pending], Message]] = []

    def send(self, end: DirectEnd, message: Message) -> None:
        """Start sending; with `one_by_one`, also wait."""
        self._sends.append((end.channel, end.start_send(message), message))
        if self.one_by_one:
            self.settle()

    def post(self, end: DirectEnd, shelf: Shelf) -> Arrival:
        """Start receiving; with `one_by_one`, also wait."""
        arrival = end.post(shelf)
        self._arrivals.append(arrival)
        if self.one_by_one:
            self.settle()
        return arrival

    def settle(self) -> None:
        """Wait for the receives, then for the sends, which end only when messages of unknown shape are received."""
        for arrival in self._arrivals:
            arrival.wait()
        for channel, works, _ in self._sends:
            wait_for(works, channel)
        self._arrivals.clear()
        self._sends.clear()


class GroupTransport:
    """A process group as the backend of a channel's end: every tensor is a batch_isend_irecv of its own.

    torch then uses the group's communicator, as for larger batches, and makes none for the two ranks.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        """Start sending one tensor."""
        return self._start(dist.isend, tensors[0], dst)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        """Start receiving into one tensor."""
        return self._start(dist.irecv, tensors[0], src)

    def get_error(self) -> object:
        """The fault that NCCL's watchdog has found; raises on gloo, which has no watchdog."""
        return self._group._get_backend(self._device).get_error()

    def _start(self, op: Callable[..., object], tensor: torch.Tensor, peer: int) -> dist.Work:
        (work,) = dist.batch_isend_irecv([dist.P2POp(op, tensor, group=self._group, group_peer=peer)])
        return work


class FusedBatch:
    """Messages that all start in one `batch_isend_irecv`, on the pipeline's own group and without tags.

    Between two ranks only the order tells messages apart, activations from gradients too: both ends must add them in
    the same order, as batched schedules do.
    """

    def __init__(self, group: ProcessGroup, *, sync: torch.device | None = None) -> None:
        self._group = group
        self._sync = sync
        self._ops: list[dist.P2POp] = []
        self._channels: list[Channel] = []

    def send(self, end: DirectEnd, message: Message) -> None:
        """Add contiguous tensors to send."""
        self.add(True, end.channel, message)

    def post(self, end: DirectEnd, shelf: Shelf) -> Arrival:
        """Add a message to receive."""
        message = shelf.take()
        self.add(False, end.channel, message)
        return Arrival(message, shelf=shelf)

    def settle(self) -> None:
        """Start the batch and wait for it; then, with `sync`, wait for the whole device. Raises PeerLost."""
        try:
            for work in dist.batch_isend_irecv(self._ops) if self._ops else ():
                work.wait()
        except RuntimeError as error:
            end_with(self._channels[0], error)
        self._ops.clear()
        self._channels.clear()
        if self._sync is not None:
            torch.cuda.synchronize(self._sync)

    def add(self, sends: bool, channel: Channel, message: Message) -> None:
        """Add tensors to send over a channel; without `sends`, tensors to receive into."""
        op, peer = (dist.isend, channel.target) if sends else (dist.irecv, channel.source)
        self._ops += [dist.P2POp(op, tensor, group=self._group, group_peer=peer) for tensor in message]
        self._channels.append(channel)


MessageBatch = LooseBatch | FusedBatch
"""Messages that are added one by one, until `settle` waits for all of them."""


_AS_DECLARED = Modes()
"""The default: single messages, of the shapes that the stages declare."""


def goes_by_group(pp_group: ProcessGroup, transport: str = "auto") -> bool:
    """Whether messages travel over the pipeline's process group alone, in batches (decision 79): with `plain`, and with
    `auto` if the group's backend moves a GPU's tensors. Raises ConfigError (PP-E103) for other values."""
    if transport not in ("auto", "plain", "channels"):
        message = f"transport={transport!r} is none of auto, plain, channels"
        raise ConfigError(Problem("PP-E103", message, "transport='auto'"))
    return transport == "plain" or (transport == "auto" and moves_on_device(pp_group))


class Communicator:
    """This rank's ends of a pipeline's channels, and the pool that their messages are received into.

    `pp_group` has the pipeline's ranks in pp order; all of them construct the communicator together. `channels` are the
    channels to make, by default the channels of a loop; for a V, pass the V's channels. `modes` say how messages are
    sent. `transport` is `plain`, `channels` or `auto` (`goes_by_group`); `batched` says whether schedules must be
    lowered for batches. `device` is where tensors live: by default a GPU if the group's backend sends GPU tensors, else
    torch's default device. GPU tensors on a gloo group go through pinned host memory. Without `connect`, NCCL connects
    on first messages; if shapes vary, that must happen before the engine's messages (`ppctl.reach` then sets
    `connected`), or the engine refuses to run. `ends` are this rank's ends of all channels, if the caller has made
    them. Raises ConfigError (PP-E608) if channels and kernels of a GPU would share one hardware queue.
    """

    def __init__(
        self,
        pp_group: ProcessGroup,
        modes: Modes = _AS_DECLARED,
        *,
        channels: Iterable[Channel] | None = None,
        device: torch.device | None = None,
        connect: bool = True,
        transport: str = "auto",
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
        by_group = goes_by_group(pp_group, transport) or (modes.batched and on_device)
        self.fused = by_group and not self.staged and ends is None
        """Whether batches are fused by batch_isend_irecv on the pipeline's group, and nothing travels beside it."""
        self.sync = self.device if modes.sync and self.device.type == "cuda" else None
        """The device to synchronise after each fused batch (batch_p2p_sync)."""
        self.pool = BufferPool(self.device)
        self.connected = connect or ends is not None or not on_device
        """Whether all channels are connected before the engine's messages."""
        self._ends: dict[Channel, DirectEnd] = dict(ends or {})
        if ends is None:
            if on_device and not self.fused and (message := why_one_queue_blocks(self.pp, os.environ.get(QUEUES))):
                raise ConfigError(Problem("PP-E608", message, f"unset {QUEUES}", "environment"))
            wanted = loop_channels(self.pp) if channels is None else channels
            group = GroupTransport(pp_group, self.device) if self.fused else None
            self._ends = make_ends(pp_group, self.device, wanted, over=group, variable=modes.variable, connect=connect)
        self._connections: Connections | None = connections_of(pp_group)
        self._connections.enter()

    @property
    def batched(self) -> bool:
        """Whether schedules that run here must be lowered with `batched=True`."""
        return self.modes.batched or self.fused

    @property
    def ends(self) -> tuple[DirectEnd, ...]:
        """This rank's ends of all channels, for messages one by one."""
        return tuple(self._ends.values())

    def close(self) -> None:
        """End this communicator; the last communicator over the process group also ends the shared connections.

        All ranks of the pipeline call it, with nothing under way, before the group is destroyed. Only NCCL needs it:
        connections that are open at the end of a process are aborted.
        """
        self._ends.clear()
        if self._connections is not None:
            self._connections.leave()
            self._connections = None

    def batch(self) -> MessageBatch:
        """A new batch. Messages whose shapes are not known in advance start one by one, as each becomes known."""
        if self.fused and self.modes.variable:
            return LooseBatch(one_by_one=True)
        return FusedBatch(self.pp_group, sync=self.sync) if self.fused else LooseBatch()

    def end_in(self, channel: Channel) -> DirectEnd:
        """This rank's end of a channel, for the messages of a schedule.

        Raises ScheduleError if shapes vary and channels are not connected yet: one host would wait for the other to
        connect, and the other for a header that the first one has not enqueued.
        """
        if self.modes.variable and not self.connected:
            message = (
                f"the channels of pp_rank {self.pp_rank} would connect on messages of variable shape, and two ranks "
                "that read each other's headers would wait for each other"
            )
            raise ScheduleError(Problem("PP-E390", message, "Communicator(pp_group, modes, connect=True)"))
        return self.end(channel)

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
