"""Messages of one rank that start together and are waited for together.

Must not know which messages are neighbours in a schedule: the caller says when the batch is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.buffers import Message, MessageSpec, Shelf
from ppctl.comm.channels import Arrival, DirectEnd, PeerLost, Pending, empty_header, header, shapes_of, wait_for
from ppctl.schedule.action import Channel


class LooseBatch:
    """Messages that each start on their channel as soon as they are added."""

    def __init__(self) -> None:
        self._arrivals: list[Arrival] = []
        self._sends: list[tuple[Channel, Sequence[Pending], Message]] = []

    def send(self, end: DirectEnd, message: Message) -> None:
        """Start sending."""
        self._sends.append((end.channel, end.start_send(message), message))

    def post(self, end: DirectEnd, shelf: Shelf) -> Arrival:
        """Start receiving."""
        self._arrivals.append(end.post(shelf))
        return self._arrivals[-1]

    def settle(self) -> None:
        """Wait for the receives, then for the sends: a receive of unknown shape has yet to let its sender go on."""
        for arrival in self._arrivals:
            arrival.wait()
        for channel, works, _ in self._sends:
            wait_for(works, channel)
        self._arrivals.clear()
        self._sends.clear()


class GroupTransport:
    """A process group as the backend of a channel's end: every tensor is a batch_isend_irecv of its own.

    torch sends it on the group's communicator, as it does larger batches, and makes none for the two ranks.
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
        """What NCCL's watchdog has found; gloo has none, and raises."""
        return self._group._get_backend(self._device).get_error()

    def _start(self, op: Callable[..., object], tensor: torch.Tensor, peer: int) -> dist.Work:
        (work,) = dist.batch_isend_irecv([dist.P2POp(op, tensor, group=self._group, group_peer=peer)])
        return work


class FusedBatch:
    """Messages that all start in one `batch_isend_irecv`, on the pipeline's own group and without tags.

    Between two ranks only the order distinguishes messages, activations and gradients: both ends must add them in the
    same sequence, as batched schedules do.
    """

    def __init__(self, group: ProcessGroup, *, sync: torch.device | None = None) -> None:
        self._group = group
        self._sync = sync
        self._ops: list[dist.P2POp] = []
        self._channels: list[Channel] = []

    def send(self, end: DirectEnd, message: Message) -> None:
        """Add contiguous tensors to send."""
        self._add(dist.isend, end.channel, end.channel.target, message)

    def post(self, end: DirectEnd, shelf: Shelf) -> Arrival:
        """Add a message to receive."""
        message = shelf.take()
        self._add(dist.irecv, end.channel, end.channel.source, message)
        return Arrival(message, shelf=shelf)

    def settle(self) -> None:
        """Start the batch and wait for it; then, if asked for, for the whole device."""
        try:
            for work in dist.batch_isend_irecv(self._ops) if self._ops else ():
                work.wait()
        except RuntimeError as error:
            raise PeerLost(self._channels[0], error) from error
        self._ops.clear()
        self._channels.clear()
        if self._sync is not None:
            torch.cuda.synchronize(self._sync)

    def _add(self, op: Callable[..., object], channel: Channel, peer: int, message: Message) -> None:
        self._ops += [dist.P2POp(op, tensor, group=self._group, group_peer=peer) for tensor in message]
        self._channels.append(channel)


class AnnouncedBatch:
    """Messages of variable shape on the pipeline's own group, one message after the other, each after a header with its
    sizes.

    A receive can start only when its header has been read, and on one group nothing but their order tells messages
    apart: so each is over before the next one starts. All lists have them in one common order (`batch_messages`), and
    the first that is not over can always go on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._listed: list[Callable[[], None]] = []

    def send(self, end: DirectEnd, message: Message) -> None:
        """Add contiguous tensors to send."""
        self._listed.append(partial(self._send, end, message))

    def post(self, end: DirectEnd, shelf: Shelf) -> Arrival:
        """Add a message to receive; it has no tensors before the batch is over."""
        arrival = Arrival(())
        self._listed.append(partial(self._receive, end, arrival, shelf.spec))
        return arrival

    def settle(self) -> None:
        """Send and receive in the order in which messages were added. On CUDA the host waits for every header that it
        reads, and for nothing else."""
        for move in self._listed:
            move()
        self._listed.clear()

    def _send(self, end: DirectEnd, message: Message) -> None:
        wait_for(end.start_send((header(message, self._device),)), end.channel)
        wait_for(end.start_send(message), end.channel)

    def _receive(self, end: DirectEnd, arrival: Arrival, spec: MessageSpec) -> None:
        sizes = empty_header(len(spec), self._device)
        wait_for(end.receive_into((sizes,)), end.channel)
        arrival.message = spec.make(self._device, shapes_of(sizes))
        wait_for(end.receive_into(arrival.message), end.channel)


MessageBatch = LooseBatch | FusedBatch | AnnouncedBatch
"""Messages that are added one by one, until `settle` waits for all of them."""


class BatchedEnd:
    """A channel's end if messages travel in batches."""

    __slots__ = ("_batch", "_end", "channel", "check")

    def __init__(self, end: DirectEnd, batch: MessageBatch) -> None:
        self._end, self.channel = end, end.channel
        self._batch = batch
        self.check = end.check

    def reserve(self, capacity: int) -> None:
        """Do nothing: no send is outstanding after a batch."""

    def post(self, shelf: Shelf) -> Arrival:
        """Add the receive of the next message."""
        return self._batch.post(self._end, shelf)

    def send(self, message: Message) -> None:
        """Add a send."""
        self._batch.send(self._end, message)

    def flush(self) -> None:
        """Do nothing: no send is outstanding after a batch."""


ChannelEnd = DirectEnd | BatchedEnd
"""A channel's end as the engine uses it."""
