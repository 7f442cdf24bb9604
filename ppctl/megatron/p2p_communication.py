"""Megatron's methods for messages between the ranks of one pipeline.

On NCCL, messages are fused by torch's batch_isend_irecv on the pipeline's own process group, and waited for together
(decision 79). On gloo, and with `transport="channels"`, every directed edge has a channel of its own for activations
and one for gradients, so that neither the two directions between two ranks nor a posted receive and a send can get in
each other's way, even if both neighbours are the same rank (pp = 2). On gloo a channel is a tag; on NCCL it is a
connection of its two ends, with its own communicator and stream (`ppctl.comm.connections`). With batch_p2p_comm
neighbouring messages are waited for together; on NCCL that is the plain transport.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.communicator import Communicator
from ppctl.comm.modes import Modes
from ppctl.errors import ConfigError, Problem
from ppctl.megatron.exchange import NeighbourExchange, Sends, is_single_shape, shapes_in
from ppctl.megatron.models import timed
from ppctl.schedule.action import Channel

Shape = list[int] | torch.Size
"""The shape of one tensor, as the methods take it (a tuple of ints does as well)."""

Tensors = torch.Tensor | list[torch.Tensor] | list[torch.Tensor | None]


class P2PCommunicator(Communicator):
    """Megatron's methods for the messages between the ranks of one pipeline, beside what the engine uses.

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
            message = f"P2PCommunicator is made over the pipeline's process group, and got {pp_group!r}"
            raise ConfigError(Problem("PP-E396", message, "P2PCommunicator(torch.distributed.group.WORLD, config)"))
        super().__init__(pp_group, modes, channels=channels, device=device, connect=connect, transport=transport)
        self.config = config
        self.ran: set[str] = set()
        """The functions that have run over it: on a GPU the first call of each is lowered differently."""
        self._exchange = NeighbourExchange(self)

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
        """Global rank of the previous rank of the pipeline; the first one's is the last."""
        return dist.get_global_rank(self.pp_group, (self.pp_rank - 1) % self.pp)

    @property
    def next_rank(self) -> int:
        """Global rank of the next rank of the pipeline; the last one's is the first."""
        return dist.get_global_rank(self.pp_group, (self.pp_rank + 1) % self.pp)

    def recv_forward(self, tensor_shapes: Shape | list[Shape], is_first_stage: bool) -> Any:
        """Receive activations from the previous rank: a tensor for one shape, a list for a list; None on the first."""
        return self._receive("recv_prev", "forward-recv", tensor_shapes, is_first_stage)

    def recv_backward(self, tensor_shapes: Shape | list[Shape], is_last_stage: bool) -> Any:
        """Receive gradients from the next rank: a tensor for one shape, a list for a list; None on the last."""
        return self._receive("recv_next", "backward-recv", tensor_shapes, is_last_stage)

    def send_forward(self, output_tensors: Tensors, is_last_stage: bool) -> None:
        """Send one activation, or a list of them, to the next rank, and wait for delivery; nothing on the last."""
        if not is_last_stage:
            self._send(output_tensors, "send_next", "forward-send", "an activation")

    def send_backward(self, input_tensor_grads: Tensors, is_first_stage: bool) -> None:
        """Send one gradient, or a list of them, to the previous rank, and wait for delivery; nothing on the first."""
        if not is_first_stage:
            self._send(input_tensor_grads, "send_prev", "backward-send", "a gradient")

    def send_forward_recv_backward(
        self, output_tensors: Tensors, tensor_shapes: Shape | list[Shape], is_last_stage: bool
    ) -> Any:
        """Send activations to the next rank and receive the gradients of earlier ones; None on the last stage.

        A list of tensors goes with a list of as many shapes and gives a list; one tensor gives one.
        """
        if is_last_stage:
            return _nothing(output_tensors, tensor_shapes)
        moves = ("send_next", "recv_next", "forward-send-backward-recv")
        return self._swap(output_tensors, tensor_shapes, *moves, "an activation")

    def send_backward_recv_forward(
        self, input_tensor_grads: Tensors, tensor_shapes: Shape | list[Shape], is_first_stage: bool
    ) -> Any:
        """Send gradients to the previous rank and receive later activations from it; None on the first stage.

        A list of tensors goes with a list of as many shapes and gives a list; one tensor gives one.
        """
        if is_first_stage:
            return _nothing(input_tensor_grads, tensor_shapes)
        moves = ("send_prev", "recv_prev", "backward-send-forward-recv")
        return self._swap(input_tensor_grads, tensor_shapes, *moves, "a gradient")

    def send_forward_recv_forward(
        self, output_tensor: torch.Tensor | None, recv_prev: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send an activation on and receive the next one. With overlap nothing is waited for: (tensor, handles)."""
        moves = ({"send_next": output_tensor}, "recv_prev", recv_prev, "forward-send-forward-recv")
        return self._pass_on(*moves, tensor_shape, overlap_p2p_comm)

    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Send a gradient back and receive the next one. With overlap nothing is waited for: (tensor, handles)."""
        moves = ({"send_prev": input_tensor_grad}, "recv_next", recv_next, "backward-send-backward-recv")
        return self._pass_on(*moves, tensor_shape, overlap_p2p_comm)

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor_grad: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """All four at once: (activation from the previous rank, gradient from the next), None if not received."""
        sends = {"send_next": output_tensor, "send_prev": input_tensor_grad}
        receives = {"recv_prev": recv_prev, "recv_next": recv_next}
        with timed(self.config, "forward-backward-send-forward-backward-recv"):
            got, _ = self._exchange(sends, receives, tensor_shape)
        return got.get("recv_prev"), got.get("recv_next")

    def _send(self, tensors: Tensors, send: str, timer: str, what: str) -> None:
        for tensor in self._exchange.listed(tensors, what):
            with timed(self.config, timer):
                self._exchange({send: tensor}, {}, None)

    def _pass_on(self, sends: Sends, receive: str, comes: bool, timer: str, shape: Shape, overlap: bool) -> Any:
        """Send to one neighbour and receive from the other neighbour."""
        with timed(self.config, timer):
            got, handles = self._exchange(sends, {receive: comes}, shape, wait=not overlap)
        return (got.get(receive), handles) if overlap else got.get(receive)

    def _receive(self, name: str, timer: str, shapes: Any, at_the_end: bool) -> Any:
        wanted: list[Any] = [shapes] if is_single_shape(shapes) else list(shapes)
        got: list[torch.Tensor | None] = []
        for shape in wanted:
            if at_the_end:
                got.append(None)
                continue
            with timed(self.config, timer):
                got.append(self._exchange({}, {name: True}, shape)[0][name])
        return got[0] if is_single_shape(shapes) else got

    def _swap(self, sent: Tensors, shapes: Any, send: str, receive: str, timer: str, what: str) -> Any:
        """Send one tensor or several, and receive one for each from the same rank: one for one, a list for a list."""
        got = []
        for tensor, shape in self._exchange.paired(sent, shapes, receive, what):
            with timed(self.config, timer):
                got.append(self._exchange({send: tensor}, {receive: True}, shape)[0][receive])
        return got if isinstance(sent, list) else got[0]


def _nothing(sent: Any, shapes: Any) -> Any:
    """The result of a call if there is no neighbour: None, or as many as there would have been."""
    return [None] * min(len(sent), len(shapes_in(shapes))) if isinstance(sent, list) else None
