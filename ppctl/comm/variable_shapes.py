"""Messages whose shapes only the sender knows: sizes travel before the tensors, in a header of fixed length.

Knows headers and when a receive can be posted. Must not know schedules or stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from ppctl.comm.buffers import Message, MessageSpec, Shelf
from ppctl.comm.channels import Arrival, DirectEnd, Pending, wait_for
from ppctl.errors import Problem, TrainingError
from ppctl.schedule.action import Channel

MOST_DIMS = 8
"""The most dimensions of one tensor in a message of variable shape."""


class MessageError(TrainingError, ValueError, RuntimeError):
    """A message that the other rank would wait for in vain, or would receive wrongly."""


def header(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """[tensors, 1 + MOST_DIMS] int64: each one's number of dims, then its sizes. Raises MessageError for too many.

    To a GPU it goes from pinned memory, which torch keeps until it is copied: the host does not wait for the device.
    """
    rows = []
    for tensor in tensors:
        if tensor.dim() > MOST_DIMS:
            message = f"a tensor of shape {list(tensor.shape)} has more than {MOST_DIMS} dims"
            raise MessageError(Problem("PP-E715", message, "flatten it before it is sent"))
        rows.append([tensor.dim(), *tensor.shape, *[0] * (MOST_DIMS - tensor.dim())])
    on_gpu = device.type == "cuda"
    sizes = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=on_gpu).view(-1, 1 + MOST_DIMS)
    return sizes.to(device, non_blocking=on_gpu)


def empty_header(count: int, device: torch.device) -> torch.Tensor:
    """A buffer to receive the header of `count` tensors into."""
    return torch.empty(count, 1 + MOST_DIMS, dtype=torch.int64, device=device)


def shapes_of(received: torch.Tensor) -> list[list[int]]:
    """The shapes in a header. Of one on a GPU the host waits for all that is enqueued before."""
    return [sizes[:dims] for dims, *sizes in received.tolist()]


class VariableEnd(DirectEnd):
    """An end of a channel for messages of variable shape: `body` carries the tensors, `headers` their shapes.

    Posting receives a header ahead of need. The tensors' receive follows when the message is waited for, in the order
    of the sends. Until then the send is not over, so that the sender gets the whole capacity as slots: message n then
    waits for the use of message n - capacity to begin, where with known shapes it waits for that use to end. So what is
    free of deadlock with known shapes is free of it with variable ones.
    """

    __slots__ = ("_device", "_reading", "_unopened", "body", "header_device", "headers")

    def __init__(self, body: DirectEnd, headers: DirectEnd, device: torch.device, header_device: torch.device) -> None:
        super().__init__(body.channel, *body.backend)
        self.body = body
        self.headers = headers
        self._device = device
        self.header_device = header_device
        self._unopened: deque[_Announced] = deque()
        on_gpu = header_device.type == "cuda"
        self._reading = torch.cuda.Stream(header_device) if on_gpu else None

    def reserve(self, capacity: int) -> None:
        """Take the whole capacity."""
        self.send_slots = capacity

    def check(self) -> None:
        """Raise PeerLost if one of the two connections was ended."""
        self.headers.check()
        self.body.check()

    def start_send(self, message: Message) -> Sequence[Pending]:
        """Start sending the header, then the tensors."""
        sizes = header(message, self.header_device)
        return [*self.headers.start_send((sizes,)), *self.body.start_send(message)]

    def receive_into(self, message: Iterable[torch.Tensor]) -> Sequence[Pending]:
        """Start receiving tensors whose shapes are known by now."""
        return self.body.receive_into(message)

    def post(self, shelf: Shelf) -> Arrival:
        """Post the receive of the next message's header; never blocks. Tensors are made when it is there."""
        sizes = empty_header(len(shelf.spec), self.header_device)
        arrival = _Announced(self, sizes, self.headers.receive_into((sizes,)), shelf.spec, self.channel)
        self._unopened.append(arrival)
        return arrival

    def read_header(self, sizes: torch.Tensor, works: Sequence[Pending]) -> list[list[int]]:
        """The shapes in a header that is on its way.

        Of a GPU the host waits for the header alone, on a stream of its own, and not for what is enqueued to compute.
        """
        if self._reading is None:
            wait_for(works, self.channel)
            return shapes_of(sizes)
        with torch.cuda.stream(self._reading):
            wait_for(works, self.channel)
            on_host = torch.empty(sizes.shape, dtype=sizes.dtype, device="cpu", pin_memory=True).copy_(
                sizes, non_blocking=True
            )
        self._reading.synchronize()
        return shapes_of(on_host)

    def open_up_to(self, arrival: _Announced) -> None:
        """Post the receives of all announced messages up to this one: on a connection they come in order."""
        while not arrival.opened:
            self._unopened.popleft().open(self._device)


class _Announced(Arrival):
    """A message of which the header is on its way."""

    __slots__ = ("_announced", "_end", "_sizes", "_spec", "opened")

    def __init__(
        self, end: VariableEnd, sizes: torch.Tensor, works: Sequence[Pending], spec: MessageSpec, channel: Channel
    ) -> None:
        super().__init__((), channel=channel)
        self._end = end
        self._sizes = sizes
        self._announced = works
        self._spec = spec
        self.opened = False

    def open(self, device: torch.device) -> None:
        """Wait for the header, make tensors, post their receive."""
        self.opened = True
        self.message = self._spec.make(device, self._end.read_header(self._sizes, self._announced))
        self._works = self._end.receive_into(self.message)

    def wait(self) -> Message:
        """The message, once it is there."""
        self._end.open_up_to(self)
        return super().wait()
