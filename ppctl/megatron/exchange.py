"""Exchanges of single tensors between a pipeline rank and its two neighbours: Megatron's methods are built of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ppctl.comm.channels import MessageError, Pending, VariableEnd, empty_header, header, shapes_of, wait_for
from ppctl.comm.communicator import Communicator, FusedBatch
from ppctl.errors import ConfigError, Problem
from ppctl.schedule.action import Channel

MOVES = ("send_prev", "recv_next", "send_next", "recv_prev")
"""In this order both ends of a pair list what they exchange, gradients first: one rank may be both neighbours."""

Moves = Mapping[str, torch.Tensor]
"""Name of the move -> the tensor to send, or to receive into."""


class Handle(NamedTuple):
    """One move under way."""

    works: Sequence[Pending]
    channel: Channel

    def wait(self) -> bool:
        """Return when it is over. Raises PeerLost."""
        wait_for(self.works, self.channel)
        return True


Sends = Mapping[str, torch.Tensor | None]
"""Move (`send_next`, `send_prev`) -> the tensor, or None for nothing."""
Receives = Mapping[str, bool]
"""Move (`recv_prev`, `recv_next`) -> whether something is received."""


class OverlapError(ConfigError, AssertionError):
    """A message was to overlap compute in a mode that waits for its messages."""


def is_single_shape(x: Any) -> bool:
    """Whether `x` is one shape (a torch.Size, or a non-empty list or tuple of ints) and not a list of shapes."""
    if isinstance(x, torch.Size):
        return True
    return isinstance(x, list | tuple) and len(x) > 0 and all(isinstance(size, int) for size in x)


def shapes_in(shapes: Any) -> list[Any]:
    """The shapes of a call that sends as well, where an empty tuple is a scalar's."""
    single = shapes is None or shapes == () or is_single_shape(shapes)
    return [shapes] if single else list(shapes)


class NeighbourExchange:
    """Checks what is sent and received, then moves it through a communicator's connections to the two neighbours."""

    def __init__(self, communicator: Communicator) -> None:
        self._group, self._end, self._modes = communicator.pp_group, communicator.end, communicator.modes
        self._device, self._batched = communicator.device, communicator.batched
        self._fused = FusedBatch(self._group, sync=communicator.sync) if communicator.fused else None
        self._header_device = torch.device("cpu") if communicator.staged else communicator.device
        rank, size = self._group.rank(), self._group.size()
        before, after = (rank - 1) % size, (rank + 1) % size
        self._channels = {
            "send_prev": Channel(rank, before, "B"),
            "recv_next": Channel(after, rank, "B"),
            "send_next": Channel(rank, after, "F"),
            "recv_prev": Channel(before, rank, "F"),
        }
        self._own: dict[tuple[str, bool], deque[torch.Tensor]] = {(d, h): deque() for d in "FB" for h in (True, False)}

    def __call__(
        self, sends: Sends, receives: Receives, shape: Any, *, wait: bool = True
    ) -> tuple[dict[str, torch.Tensor], dict[str, Handle]]:
        """Start the moves: what is received, with `wait` at once, and what to wait for. Raises MessageError."""
        if self._batched and not wait:
            message = "overlap_p2p_comm asks for messages that nobody waits for; batch_p2p_comm waits for its batches"
            remedy = "parallel.batch_p2p_comm=false"
            if not self._modes.batched:
                message = "overlap_p2p_comm asks for messages that nobody waits for; plain ones go in batches"
                remedy = "P2PCommunicator(pp_group, config, transport='channels')"
            raise OverlapError(Problem("PP-E117", message, remedy))
        moves = self._to_send(sends)
        wanted = [name for name, comes in receives.items() if comes]
        for name in wanted:
            self._check_receive(name, shape)
        shapes = self._shapes(sends, receives) if self._modes.variable else dict.fromkeys(wanted, shape)
        # New tensors: the caller keeps them, so that they cannot come from a pool.
        new = partial(torch.empty, dtype=self._modes.dtype, device=self._device, requires_grad=True)
        got: dict[str, torch.Tensor] = {name: new(tuple(shapes[name])) for name in wanted}
        handles = self._start(moves | {name: tensor.detach() for name, tensor in got.items()})
        if wait:
            self._finish(handles)
        return got, handles

    def _shapes(self, sends: Sends, receives: Receives) -> dict[str, list[int]]:
        moves = {name: header((t,), self._header_device) for name, t in sends.items() if t is not None}
        received = {name: empty_header(1, self._header_device) for name, comes in receives.items() if comes}
        self._finish(self._start(moves | received, headers=True))
        return {name: shapes_of(sizes)[0] for name, sizes in received.items()}

    def listed(self, tensors: Any, what: str) -> list[torch.Tensor | None]:
        """The tensors to send, as a list; a None among them is not sent. Raises MessageError if all are None."""
        listed = tensors if isinstance(tensors, list) else [tensors]
        if listed and all(tensor is None for tensor in listed):
            rank = self._group.rank()
            message = f"pp_rank {rank} was given None as {what} to send: the other rank would wait for it for ever"
            remedy = "let the stage's output depend on its input, so that there is a gradient" if "grad" in what else ""
            raise MessageError(Problem("PP-E716", message, remedy))
        return listed

    def paired(self, tensors: Any, shapes: Any, name: str, what: str) -> list[tuple[torch.Tensor | None, Any]]:
        """Every tensor to send with the shape of what `name` receives for it. Raises MessageError for odd ones."""
        listed, wanted = self.listed(tensors, what), shapes_in(shapes)
        for shape in wanted:
            self._check_receive(name, shape)
        if len(listed) != len(wanted):
            message = f"{len(listed)} tensors are sent and {len(wanted)} shapes to be received: which belong together?"
            raise MessageError(Problem("PP-E716", message, "pass as many shapes as tensors"))
        return list(zip(listed, wanted, strict=True))

    def _to_send(self, sends: Sends) -> dict[str, torch.Tensor]:
        moves = {name: tensor.detach().contiguous() for name, tensor in sends.items() if tensor is not None}
        for name, tensor in moves.items():
            if self._modes.dtype not in (None, tensor.dtype):
                wanted = f"pipeline_dtype {self._modes.dtype}"
                message = f"{name} is a tensor of {tensor.dtype}, and the other rank expects {wanted}"
                raise MessageError(Problem("PP-E716", message, "convert it before it is sent, or mend pipeline_dtype"))
        return moves

    def _check_receive(self, name: str, shape: Any) -> None:
        if shape is None:
            message = (
                f"{name} needs the shape of what it receives (tensor_shape), as in (sequence, micro batch, hidden)"
            )
            raise MessageError(Problem("PP-E716", message))
        if self._modes.dtype is None:
            message = f"{name} needs to know what dtype it receives, and the config has no pipeline_dtype"
            raise MessageError(Problem("PP-E716", message, "parallel.pipeline_dtype=float32"))

    # --- how it moves ------------------------------------------------------------------------------------------------

    def _start(self, moves: Moves, *, headers: bool = False) -> dict[str, Handle]:
        """Start the moves, receives first if each goes by itself. Returns what to wait for, by move; fused ones are
        listed in the order of `MOVES`, which both ends share, and are over."""
        if self._group.size() == 1:
            return {name: self._to_itself(name, moves[name], headers) for name in MOVES if name in moves}
        if self._fused is not None:
            for name in MOVES:
                if name in moves:
                    self._fused.add(name.startswith("send"), self._channels[name], (moves[name],))
            self._fused.settle()
            return {name: Handle((), self._channels[name]) for name in moves}
        receives_first = sorted((name for name in MOVES if name in moves), key=lambda name: name.startswith("send"))
        return {name: self._start_one(name, moves[name], headers) for name in receives_first}

    def _finish(self, handles: Mapping[str, Handle]) -> None:
        for handle in handles.values():
            handle.wait()

    def _start_one(self, name: str, tensor: torch.Tensor, headers: bool) -> Handle:
        channel = self._channels[name]
        end = self._end(channel)
        if isinstance(end, VariableEnd):
            end = end.headers if headers else end.body
        works = end.start_send((tensor,)) if name.startswith("send") else end.receive_into((tensor,))
        return Handle(works, channel)

    def _to_itself(self, name: str, tensor: torch.Tensor, headers: bool) -> Handle:
        """A pipeline of one rank is its own neighbour; what it sends is kept here until it is received."""
        channel = self._channels[name]
        kept = self._own[channel.direction, headers]
        if name.startswith("send"):
            kept.append(tensor.clone())
            return Handle((), channel)
        if not kept:
            message = f"{name}: a pipeline of one rank is its own neighbour, and this one has sent nothing"
            raise MessageError(Problem("PP-E716", message, "send before, or in the same call"))
        if kept[0].shape != tensor.shape:
            message = f"{name}: a tensor of shape {list(kept[0].shape)} was sent and {list(tensor.shape)} is received"
            raise MessageError(Problem("PP-E716", message, "receive what was sent"))
        tensor.copy_(kept.popleft())
        return Handle((), channel)
