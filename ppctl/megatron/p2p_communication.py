"""Megatron's methods for messages between the ranks of one pipeline.

On NCCL, messages are fused by torch's batch_isend_irecv on the pipeline's own process group, and waited for together
(decision 79). On gloo, and with `transport="channels"`, every directed edge has a channel of its own for activations
and one for gradients. So two directions do not block each other, nor do a posted receive and a send, even if both
neighbours are the same rank (pp = 2). On gloo a channel is a tag; on NCCL it is a connection between its two ends, with
a communicator and a stream of its own (`ppctl.comm.connections`). With batch_p2p_comm neighbouring messages are waited
for together; on NCCL that is the plain transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.channels import MessageError, Pending, VariableEnd, empty_header, header, shapes_of, wait_for
from ppctl.comm.communicator import Communicator, FusedBatch
from ppctl.comm.modes import Modes
from ppctl.errors import ConfigError, Problem
from ppctl.megatron.models import timed
from ppctl.schedule.action import Channel

Shape = list[int] | torch.Size
"""The shape of one tensor, as the methods take it (a tuple of ints does as well)."""

Tensors = torch.Tensor | list[torch.Tensor] | list[torch.Tensor | None]

_MOVES = {
    "send_prev": "backward-send",
    "recv_next": "backward-recv",
    "send_next": "forward-send",
    "recv_prev": "forward-recv",
}
"""Move -> its timer's name. Both ends of a pair list what they exchange in this order, gradients first, since one rank
may be both neighbours."""
_SENT = {"send_next": "an activation", "send_prev": "a gradient"}


class _Handle(NamedTuple):
    """One move under way."""

    works: Sequence[Pending]
    channel: Channel

    def wait(self) -> bool:
        """Wait until the move is over; return True. Raises PeerLost."""
        wait_for(self.works, self.channel)
        return True


class OverlapError(ConfigError, AssertionError):
    """A message was to overlap compute in a mode that waits for its messages."""


def is_single_shape(x: Any) -> bool:
    """Whether `x` is one shape (a torch.Size, or a non-empty list or tuple of ints) and not a list of shapes."""
    if isinstance(x, torch.Size):
        return True
    return isinstance(x, list | tuple) and len(x) > 0 and all(isinstance(size, int) for size in x)


def _shapes_in(shapes: Any) -> list[Any]:
    """The list of shapes of a call that also sends, where an empty tuple is a scalar's shape."""
    single = shapes is None or shapes == () or is_single_shape(shapes)
    return [shapes] if single else list(shapes)


class _NeighbourExchange:
    """Checks tensors to send and shapes to receive, then moves them through a communicator's connections to the
    neighbours."""

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
        self, sends: Mapping[str, torch.Tensor | None], receives: Mapping[str, bool], shape: Any, *, wait: bool = True
    ) -> tuple[dict[str, torch.Tensor], dict[str, _Handle]]:
        """Start the moves; return (what is received, what to wait for), both by move. With `wait` all are over. A
        tensor that is None is not sent. Raises MessageError, and OverlapError for batches without `wait`."""
        if self._batched and not wait:
            message = "overlap_p2p_comm asks for messages without a wait, but batch_p2p_comm waits for its batches"
            remedy = "parallel.batch_p2p_comm=false"
            if not self._modes.batched:
                message = "overlap_p2p_comm asks for messages without a wait, but plain ones are waited for in batches"
                remedy = "P2PCommunicator(pp_group, config, transport='channels')"
            raise OverlapError(Problem("PP-E117", message, remedy))
        moves = self._to_send(sends)
        wanted = [name for name, comes in receives.items() if comes]
        for name in wanted:
            self._check_receive(name, shape)
        shapes = self._shapes(sends, receives) if self._modes.variable else dict.fromkeys(wanted, shape)
        # New tensors, not from a pool, since the caller keeps them.
        new = partial(torch.empty, dtype=self._modes.dtype, device=self._device, requires_grad=True)
        got: dict[str, torch.Tensor] = {name: new(tuple(shapes[name])) for name in wanted}
        handles = self._start(moves | {name: tensor.detach() for name, tensor in got.items()})
        if wait:
            self._finish(handles)
        return got, handles

    def _shapes(self, sends: Mapping[str, torch.Tensor | None], receives: Mapping[str, bool]) -> dict[str, list[int]]:
        moves = {name: header((t,), self._header_device) for name, t in sends.items() if t is not None}
        received = {name: empty_header(1, self._header_device) for name, comes in receives.items() if comes}
        self._finish(self._start(moves | received, headers=True))
        return {name: shapes_of(sizes)[0] for name, sizes in received.items()}

    def listed(self, tensors: Any, send: str) -> list[torch.Tensor | None]:
        """The tensors to send, as a list; a None among them is not sent. Raises MessageError if all are None."""
        listed = tensors if isinstance(tensors, list) else [tensors]
        if listed and all(tensor is None for tensor in listed):
            given = f"pp_rank {self._group.rank()} was given None as {_SENT[send]} to send"
            message = f"{given}: the other rank would wait for it for ever"
            remedy = "let the stage's output depend on its input, so that there is a gradient"
            remedy = remedy if send == "send_prev" else ""
            raise MessageError(Problem("PP-E716", message, remedy))
        return listed

    def paired(self, tensors: Any, shapes: Any, send: str, receive: str) -> list[tuple[torch.Tensor | None, Any]]:
        """Pair every tensor to send with the shape to receive for it. Raises MessageError if the numbers differ."""
        listed, wanted = self.listed(tensors, send), _shapes_in(shapes)
        for shape in wanted:
            self._check_receive(receive, shape)
        if len(listed) != len(wanted):
            message = f"{len(listed)} tensors are sent, but {len(wanted)} shapes are received: they must be pairs"
            raise MessageError(Problem("PP-E716", message, "pass as many shapes as tensors"))
        return list(zip(listed, wanted, strict=True))

    def _to_send(self, sends: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """The tensors to send by name, contiguous. Raises MessageError (PP-E716) for a dtype that is not awaited."""
        moves = {name: tensor.detach().contiguous() for name, tensor in sends.items() if tensor is not None}
        for name, tensor in moves.items():
            if self._modes.dtype not in (None, tensor.dtype):
                wanted = f"pipeline_dtype {self._modes.dtype}"
                message = f"{name} is a tensor of {tensor.dtype}, but the other rank expects {wanted}"
                raise MessageError(Problem("PP-E716", message, "convert it before it is sent, or mend pipeline_dtype"))
        return moves

    def _check_receive(self, name: str, shape: Any) -> None:
        """Raise MessageError (PP-E716) if the shape or the dtype of what the move `name` receives is unknown."""
        if shape is None:
            message = (
                f"{name} needs the shape of what it receives (tensor_shape), as in (sequence, micro batch, hidden)"
            )
            raise MessageError(Problem("PP-E716", message))
        if self._modes.dtype is None:
            message = f"{name} needs to know what dtype it receives, but the config has no pipeline_dtype"
            raise MessageError(Problem("PP-E716", message, "parallel.pipeline_dtype=float32"))

    # --- how it moves ------------------------------------------------------------------------------------------------

    def _start(self, moves: Mapping[str, torch.Tensor], *, headers: bool = False) -> dict[str, _Handle]:
        """Start the moves, and return what to wait for, by move. Moves that go one by one start with the receives;
        fused ones are listed in the order of `_MOVES`, which both ends share, and are over on return."""
        if self._group.size() == 1:
            return {name: self._to_itself(name, moves[name], headers) for name in _MOVES if name in moves}
        if self._fused is not None:
            for name in _MOVES:
                if name in moves:
                    self._fused.add(name.startswith("send"), self._channels[name], (moves[name],))
            self._fused.settle()
            return {name: _Handle((), self._channels[name]) for name in moves}
        receives_first = sorted((name for name in _MOVES if name in moves), key=lambda name: name.startswith("send"))
        return {name: self._start_one(name, moves[name], headers) for name in receives_first}

    def _finish(self, handles: Mapping[str, _Handle]) -> None:
        for handle in handles.values():
            handle.wait()

    def _start_one(self, name: str, tensor: torch.Tensor, headers: bool) -> _Handle:
        channel = self._channels[name]
        end = self._end(channel)
        if isinstance(end, VariableEnd):
            end = end.headers if headers else end.body
        works = end.start_send((tensor,)) if name.startswith("send") else end.receive_into((tensor,))
        return _Handle(works, channel)

    def _to_itself(self, name: str, tensor: torch.Tensor, headers: bool) -> _Handle:
        """Send to, or receive from, this rank itself, its own neighbour: a sent tensor is kept until it is received."""
        channel = self._channels[name]
        kept = self._own[channel.direction, headers]
        if name.startswith("send"):
            kept.append(tensor.clone())
            return _Handle((), channel)
        if not kept:
            message = f"{name}: a pipeline of one rank is its own neighbour, but this one has sent nothing"
            raise MessageError(Problem("PP-E716", message, "send before, or in the same call"))
        if kept[0].shape != tensor.shape:
            message = f"{name}: a tensor of shape {list(kept[0].shape)} was sent, but {list(tensor.shape)} is received"
            raise MessageError(Problem("PP-E716", message, "receive what was sent"))
        tensor.copy_(kept.popleft())
        return _Handle((), channel)


class P2PCommunicator(Communicator):
    """Megatron's methods for the messages between the ranks of one pipeline, in addition to what the engine uses.

    `pp_group` holds the pipeline's ranks in pp order; `config` is a ModelParallelConfig (or anything with its fields).
    `channels`, `device`, `connect` and `transport` are `Communicator`'s. Raises ConfigError for modes that exclude each
    other or that this machine does not have.

    The methods take and return single tensors or lists of them, one shape or a list of shapes. With
    variable_seq_lengths, shapes are ignored (but None is refused), and every tensor's shape, with any number of dims,
    is sent before it. Received tensors are new leaves of `pipeline_dtype` that require a gradient. Raises
    MessageError, before anything is sent, for arguments that would leave the other rank waiting: nothing but None, a
    wrong number of tensors or shapes, a dtype other than `pipeline_dtype`. A None in a list beside tensors is not sent,
    as in Megatron: the other rank receives one less. Raises PeerLost if the other rank is gone.
    """

    def __init__(
        self,
        pp_group: ProcessGroup,
        config: Any,
        *,
        channels: Iterable[Channel] | None = None,
        device: torch.device | None = None,
        connect: bool = True,
        transport: str = "auto",
    ) -> None:
        modes = Modes.of(config)
        if not isinstance(pp_group, ProcessGroup):
            message = f"P2PCommunicator needs the pipeline's process group, but got {pp_group!r}"
            raise ConfigError(Problem("PP-E396", message, "P2PCommunicator(torch.distributed.group.WORLD, config)"))
        super().__init__(pp_group, modes, channels=channels, device=device, connect=connect, transport=transport)
        self.config = config
        self.ran: set[str] = set()
        """The schedules that have run over it: on a GPU a schedule's first run is lowered differently."""
        self._exchange = _NeighbourExchange(self)

    @property
    def current_stage(self) -> int:
        """This rank's position on the pipeline axis (its pp_rank)."""
        return self.pp_rank

    @property
    def total_stages(self) -> int:
        """How many ranks the pipeline has."""
        return self.pp

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this is the pipeline's first rank."""
        return self.pp_rank == 0

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this is the pipeline's last rank."""
        return self.pp_rank == self.pp - 1

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """The config's number of chunks per rank."""
        size: int | None = getattr(self.config, "virtual_pipeline_model_parallel_size", None)
        return size

    @property
    def prev_rank(self) -> int:
        """Global rank of the previous rank of the pipeline; for the first rank, the last."""
        return dist.get_global_rank(self.pp_group, (self.pp_rank - 1) % self.pp)

    @property
    def next_rank(self) -> int:
        """Global rank of the next rank of the pipeline; for the last rank, the first."""
        return dist.get_global_rank(self.pp_group, (self.pp_rank + 1) % self.pp)

    def recv_forward(self, tensor_shapes: Shape | list[Shape], is_first_stage: bool) -> Any:
        """Receive activations from the previous rank: a tensor for one shape, a list for a list; None on the first."""
        return self._receive("recv_prev", tensor_shapes, is_first_stage)

    def recv_backward(self, tensor_shapes: Shape | list[Shape], is_last_stage: bool) -> Any:
        """Receive gradients from the next rank: a tensor for one shape, a list for a list; None on the last."""
        return self._receive("recv_next", tensor_shapes, is_last_stage)

    def send_forward(self, output_tensors: Tensors, is_last_stage: bool) -> None:
        """Send one activation, or a list of them, to the next rank, and wait for delivery; nothing on the last."""
        if not is_last_stage:
            self._send("send_next", output_tensors)

    def send_backward(self, input_tensor_grads: Tensors, is_first_stage: bool) -> None:
        """Send one gradient, or a list of them, to the previous rank, and wait for delivery; nothing on the first."""
        if not is_first_stage:
            self._send("send_prev", input_tensor_grads)

    def send_forward_recv_backward(
        self, output_tensors: Tensors, tensor_shapes: Shape | list[Shape], is_last_stage: bool
    ) -> Any:
        """Send activations to the next rank and receive gradients of earlier activations; None on the last stage.

        A list of tensors goes with a list of as many shapes and gives a list; one tensor gives one.
        """
        return self._swap("send_next", "recv_next", output_tensors, tensor_shapes, is_last_stage)

    def send_backward_recv_forward(
        self, input_tensor_grads: Tensors, tensor_shapes: Shape | list[Shape], is_first_stage: bool
    ) -> Any:
        """Send gradients to the previous rank and receive later activations from it; None on the first stage.

        A list of tensors goes with a list of as many shapes and gives a list; one tensor gives one.
        """
        return self._swap("send_prev", "recv_prev", input_tensor_grads, tensor_shapes, is_first_stage)

    def send_forward_recv_forward(
        self, output_tensor: torch.Tensor | None, recv_prev: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send an activation on and return the next one. With overlap: return (tensor, handles to wait for) at once."""
        return self._pass_on("send_next", output_tensor, "recv_prev", recv_prev, tensor_shape, overlap_p2p_comm)

    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Send a gradient back and return the next one. With overlap: return (tensor, handles to wait for) at once."""
        return self._pass_on("send_prev", input_tensor_grad, "recv_next", recv_next, tensor_shape, overlap_p2p_comm)

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor_grad: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Make all four moves together; returns (activation from the previous rank, gradient from the next), None if
        not received."""
        sends = {"send_next": output_tensor, "send_prev": input_tensor_grad}
        receives = {"recv_prev": recv_prev, "recv_next": recv_next}
        with timed(self.config, "forward-backward-send-forward-backward-recv"):
            got, _ = self._exchange(sends, receives, tensor_shape)
        return got.get("recv_prev"), got.get("recv_next")

    def _send(self, send: str, tensors: Tensors) -> None:
        for tensor in self._exchange.listed(tensors, send):
            with timed(self.config, _MOVES[send]):
                self._exchange({send: tensor}, {}, None)

    def _pass_on(
        self, send: str, tensor: torch.Tensor | None, receive: str, comes: bool, shape: Shape, overlap: bool
    ) -> Any:
        """Send to one neighbour and receive from the other neighbour."""
        with timed(self.config, f"{_MOVES[send]}-{_MOVES[receive]}"):
            got, handles = self._exchange({send: tensor}, {receive: comes}, shape, wait=not overlap)
        return (got.get(receive), handles) if overlap else got.get(receive)

    def _receive(self, receive: str, shapes: Any, at_the_end: bool) -> Any:
        """Receive a tensor of each shape from a neighbour; at the pipeline's end there is none, so None for each."""
        got: list[torch.Tensor | None] = []
        for shape in [shapes] if is_single_shape(shapes) else shapes:
            if at_the_end:
                got.append(None)
                continue
            with timed(self.config, _MOVES[receive]):
                got.append(self._exchange({}, {receive: True}, shape)[0][receive])
        return got[0] if is_single_shape(shapes) else got

    def _swap(self, send: str, receive: str, sent: Tensors, shapes: Any, at_the_end: bool) -> Any:
        """Send one tensor or several, and receive one for each from the same rank: a tensor for a tensor, a list for a
        list. At the pipeline's end nothing is sent, and None stands for each tensor to receive."""
        if at_the_end:
            return [None] * min(len(sent), len(_shapes_in(shapes))) if isinstance(sent, list) else None
        got = []
        for tensor, shape in self._exchange.paired(sent, shapes, send, receive):
            with timed(self.config, f"{_MOVES[send]}-{_MOVES[receive]}"):
                got.append(self._exchange({send: tensor}, {receive: True}, shape)[0][receive])
        return got if isinstance(sent, list) else got[0]
