"""One rank's end of a channel: posts receives, starts sends, and waits for them.

If only the sender knows the shapes of messages, sizes travel before the tensors, in a header of fixed length.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch.distributed import Work

from ppctl.comm.buffers import Message, MessageSpec, Shelf
from ppctl.errors import Problem, TrainingError
from ppctl.schedule.action import Channel, send_slots


class PeerLost(TrainingError):
    """A message could not be delivered: the other rank has ended (mostly by a failure), or the network failed."""

    def __init__(self, channel: Channel, cause: Exception) -> None:
        self.channel = channel
        super().__init__(
            Problem(
                "PP-E711",
                f"the connection on channel {channel} broke: {without_guesses(str(cause).splitlines()[0])}",
                "look for the first failure of the job: this rank most likely only noticed it",
            )
        )


def without_guesses(message: str) -> str:
    """A library's message without its source line and gloo's guesses at what has happened."""
    said, guess, _ = re.sub(r"^\[[^\]]*:\d+\] ", "", message).partition(" This is typically caused")
    return said.rstrip(".") if guess else said


class Pending(Protocol):
    """A message, or a part of one, that is under way."""

    def wait(self) -> object:
        """Return when the message is sent or received; on CUDA, when the current stream waits for that."""


def end_with(channel: Channel, error: RuntimeError) -> NoReturn:
    """Raise PeerLost for an error of a message, but a fault of this rank's own device as it is."""
    if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError):
        raise error
    raise PeerLost(channel, error) from error


def wait_for(works: Iterable[Pending], channel: Channel) -> None:
    """Wait for what is under way on a channel. Raises PeerLost."""
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        end_with(channel, error)


def check_connection(backend: object, channel: Channel) -> None:
    """Raise PeerLost if a backend's watchdog has ended the connection. Only NCCL's watchdog records this.

    If TORCH_NCCL_ASYNC_ERROR_HANDLING=2 lets the process live, NCCL's kernels then end without their messages, and the
    device computes with the buffers' old contents: nothing else raises.
    """
    try:
        error = backend.get_error()  # type: ignore[attr-defined] # only NCCL's backends have it
    except (AttributeError, RuntimeError):  # gloo has none: its works raise
        return
    if error.name != "SUCCESS":
        raise PeerLost(channel, RuntimeError(f"NCCL's watchdog ended it ({error.name})"))


@dataclass(slots=True, eq=False)
class Arrival:
    """A message that is on its way, or (between two stages of one rank) already there."""

    message: Message
    works: Sequence[Pending] | None = None
    shelf: Shelf | None = None
    channel: Channel | None = None

    def wait(self) -> Message:
        """Wait for the message and return it. On CUDA the current stream waits, not the caller. Raises PeerLost."""
        if self.works is not None:
            assert self.channel is not None  # works exist only with a channel
            wait_for(self.works, self.channel)
            self.works = None
        return self.message

    def release(self) -> None:
        """Give the buffers of the message, which is no longer needed, back to the pool."""
        message, self.message = self.message, ()
        if self.shelf is not None:
            self.shelf.give_back(message)


class Transport(Protocol):
    """The methods of a backend object that an end calls (torch's stubs lack both)."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        """Start sending one tensor."""

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        """Start receiving into one tensor."""


class DirectEnd:
    """A channel, at one of its ends. Messages keep their order.

    `backend` is the backend object of a process group that holds both ends, `peer` the other end's rank in it. Backend
    objects are called directly: torch's own isend and irecv check and dispatch for longer than a small message takes.
    """

    __slots__ = ("_backend", "_peer", "_pending", "_tag", "channel", "send_slots")

    def __init__(self, channel: Channel, backend: Transport, peer: int, tag: int) -> None:
        self.channel = channel
        self._backend = backend
        self._peer = peer
        self._tag = tag
        self.send_slots = 0
        """How many sends may be outstanding; 0 waits for every send."""
        self._pending: deque[tuple[Sequence[Pending], Message]] = deque()

    @property
    def backend(self) -> tuple[Transport, int, int]:
        """(backend, peer, tag)."""
        return self._backend, self._peer, self._tag

    def reserve(self, capacity: int) -> None:
        """Let as many sends be outstanding as the sender's share of the channel's capacity."""
        self.send_slots = send_slots(capacity)

    def post(self, shelf: Shelf) -> Arrival:
        """Post the receive of the next message into pooled buffers; never blocks. Raises PeerLost."""
        message = shelf.take()
        return Arrival(message, self.receive_into(message), shelf, self.channel)

    def receive_into(self, message: Iterable[torch.Tensor]) -> Sequence[Pending]:
        """Start receiving into these buffers. Raises PeerLost."""
        try:
            return [self._backend.recv([tensor], self._peer, self._tag) for tensor in message]
        except RuntimeError as error:
            end_with(self.channel, error)

    def send(self, message: Message) -> None:
        """Start sending contiguous tensors, which stay referenced until sent; waits only if the slots are used up.

        The oldest send is waited for, never polled: gloo reports a send as done only in a wait. Raises PeerLost.
        """
        self._pending.append((self.start_send(message), message))
        while len(self._pending) > self.send_slots:
            self._wait_for_oldest()

    def start_send(self, message: Message) -> Sequence[Pending]:
        """Start sending; the caller must wait, and keep the tensors alive until then. Raises PeerLost."""
        try:
            return [self._backend.send([tensor], self._peer, self._tag) for tensor in message]
        except RuntimeError as error:
            end_with(self.channel, error)

    def flush(self) -> None:
        """Wait until every send is delivered. Raises PeerLost."""
        while self._pending:
            self._wait_for_oldest()

    def check(self) -> None:
        """Raise PeerLost if the connection was ended while it had messages."""
        check_connection(self._backend, self.channel)

    def _wait_for_oldest(self) -> None:
        works, _ = self._pending.popleft()
        wait_for(works, self.channel)


class PinnedEnd(DirectEnd):
    """A channel's end for CUDA tensors on a backend that moves host memory only: messages go through pinned buffers.

    Slower than NCCL by two copies, and a send waits for the device. In return several ranks can share one GPU, which
    NCCL allows only in its newest versions. Torch's pool reuses a pinned buffer only after its copies.
    """

    __slots__ = ()

    def start_send(self, message: Message) -> Sequence[Pending]:
        """Copy to the host, wait for the copies, start sending them."""
        copies = tuple(_pinned(tensor).copy_(tensor, non_blocking=True) for tensor in message)
        torch.cuda.current_stream().synchronize()
        return super().start_send(copies)

    def receive_into(self, message: Iterable[torch.Tensor]) -> Sequence[Pending]:
        """Start receiving on the host; waiting for the message starts the copy to the device."""
        targets = list(message)
        copies = [_pinned(tensor) for tensor in targets]
        works = super().receive_into(copies)
        return [_Upload(*parts) for parts in zip(works, copies, targets, strict=True)]


class _Upload(NamedTuple):
    """A receive on the host that ends on the device."""

    work: Pending
    copy: torch.Tensor
    target: torch.Tensor

    def wait(self) -> None:
        """Wait for the host's tensor, then enqueue the copy to the device on the current stream."""
        self.work.wait()
        self.target.copy_(self.copy, non_blocking=True)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


MOST_DIMS = 8
"""The most dimensions of one tensor in a message of variable shape."""


class MessageError(TrainingError, ValueError, RuntimeError):
    """A message that the other rank would wait for in vain, or would receive wrongly."""


def header(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The header, [tensors, 1 + MOST_DIMS] int64: each tensor's number of dims, then its sizes. Raises MessageError for
    too many dims.

    It is copied to a GPU from pinned memory, which torch keeps until then: the host does not wait for the device.
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
    """The shapes in a header. If it is on a GPU, the host waits for all work enqueued before."""
    return [sizes[:dims] for dims, *sizes in received.tolist()]


class VariableEnd(DirectEnd):
    """An end of a channel for messages of variable shape: `body` carries the tensors, `headers` their shapes.

    Posting receives a header ahead of need. The receive of the tensors is posted when the message is waited for, in the
    order of the sends. Until then the send is not over, so the sender gets the whole capacity as slots. The send of
    message n then waits until message n - capacity begins to be used; with known shapes, until that use ends. So a
    schedule without deadlock for known shapes has none for variable shapes.
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
        """Let as many sends be outstanding as the channel's whole capacity."""
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
        """Start receiving tensors whose shapes are known."""
        return self.body.receive_into(message)

    def post(self, shelf: Shelf) -> Arrival:
        """Post the receive of the next message's header; never blocks. Tensors are made when the header has arrived."""
        sizes = empty_header(len(shelf.spec), self.header_device)
        arrival = _Announced(self, sizes, self.headers.receive_into((sizes,)), shelf.spec, self.channel)
        self._unopened.append(arrival)
        return arrival

    def read_header(self, sizes: torch.Tensor, works: Sequence[Pending]) -> list[list[int]]:
        """The shapes in a header that is on its way.

        On a GPU the host waits for the header alone, on a separate stream, and not for enqueued computations.
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
        """Post the receives of all announced messages up to this one: a connection delivers them in order."""
        while not arrival.opened:
            self._unopened.popleft().open(self._device)


class _Announced(Arrival):
    """A message whose header is on its way."""

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
        self.opened = True
        self.message = self._spec.make(device, self._end.read_header(self._sizes, self._announced))
        self.works = self._end.receive_into(self.message)

    def wait(self) -> Message:
        """Wait for the header, post the receive, wait for the message and return it. Raises PeerLost."""
        self._end.open_up_to(self)
        return super().wait()
