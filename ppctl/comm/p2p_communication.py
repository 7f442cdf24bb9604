"""Point-to-point messages between the ranks of one pipeline: the communicator, its channels, and Megatron's methods.

Knows process groups and lanes. Must not know schedules or stages.

Every directed edge has a channel of its own for activations and one for gradients, so that neither the two directions
between two ranks nor a posted receive and a send can get in each other's way, also where both neighbours are the same
rank (pp = 2). On gloo a channel is a tag; on NCCL it is a two-rank group, with its own communicator and stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from ppctl.comm.buffers import BufferPool, Message
from ppctl.comm.channels import Lane
from ppctl.comm.wiring import loop_channels, make_lanes
from ppctl.errors import ConfigError, Problem, ScheduleError
from ppctl.schedule.action import Channel

Shape = list[int] | torch.Size
"""The shape of one tensor, as the methods take it (a tuple of ints does as well)."""

Tensors = torch.Tensor | list[torch.Tensor]


def is_single_shape(x: Any) -> bool:
    """Whether `x` is one shape (a torch.Size, or a non-empty list or tuple of ints) and not a list of shapes."""
    if isinstance(x, torch.Size):
        return True
    return isinstance(x, list | tuple) and len(x) > 0 and all(isinstance(size, int) for size in x)


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
        self._lanes = make_lanes(pp_group, self.device, loop_channels(self._size) if channels is None else channels)

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
        """This rank's end of a channel. Raises ScheduleError for a channel that was not made."""
        if channel not in self._lanes:
            raise ScheduleError(
                Problem(
                    "PP-E390",
                    f"the communicator of pp_rank {self._rank} has no channel {channel}: unless it is given others, "
                    "it has the channels of a loop",
                    "P2PCommunicator(pp_group, config, channels=schedule.capacities)",
                )
            )
        return self._lanes[channel]

    def recv_forward(self, tensor_shapes: Shape | list[Shape], is_first_stage: bool) -> Any:
        """Receive activations from the previous rank: a tensor for one shape, a list for a list; None on the first."""
        return self._receive("recv_prev", tensor_shapes, is_first_stage)

    def recv_backward(self, tensor_shapes: Shape | list[Shape], is_last_stage: bool) -> Any:
        """Receive gradients from the next rank: a tensor for one shape, a list for a list; None on the last."""
        return self._receive("recv_next", tensor_shapes, is_last_stage)

    def send_forward(self, output_tensors: Tensors, is_last_stage: bool) -> None:
        """Send one activation, or a list of them, to the next rank, and wait for delivery; nothing on the last."""
        if not is_last_stage:
            self._exchange(send_next=_as_list(output_tensors))

    def send_backward(self, input_tensor_grads: Tensors, is_first_stage: bool) -> None:
        """Send one gradient, or a list of them, to the previous rank, and wait for delivery; nothing on the first."""
        if not is_first_stage:
            self._exchange(send_prev=_as_list(input_tensor_grads))

    def send_forward_recv_backward(
        self, output_tensors: Tensors, tensor_shapes: Shape | list[Shape], is_last_stage: bool
    ) -> Any:
        """Send activations to the next rank and receive the gradients of earlier ones; None on the last stage."""
        shapes = None if is_last_stage else _as_shapes(tensor_shapes)
        got = {} if shapes is None else self._exchange(send_next=_as_list(output_tensors), recv_next=shapes)
        return _like(output_tensors, got.get("recv_next"))

    def send_backward_recv_forward(
        self, input_tensor_grads: Tensors, tensor_shapes: Shape | list[Shape], is_first_stage: bool
    ) -> Any:
        """Send gradients to the previous rank and receive later activations from it; None on the first stage."""
        shapes = None if is_first_stage else _as_shapes(tensor_shapes)
        got = {} if shapes is None else self._exchange(send_prev=_as_list(input_tensor_grads), recv_prev=shapes)
        return _like(input_tensor_grads, got.get("recv_prev"))

    def send_forward_recv_forward(
        self, output_tensor: torch.Tensor | None, recv_prev: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send an activation on and receive the next one. With overlap nothing is waited for: (tensor, handles)."""
        return self._pass_on("recv_prev", recv_prev, tensor_shape, overlap_p2p_comm, send_next=output_tensor)

    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Send a gradient back and receive the next one. With overlap nothing is waited for: (tensor, handles)."""
        return self._pass_on("recv_next", recv_next, tensor_shape, overlap_p2p_comm, send_prev=input_tensor_grad)

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor_grad: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """All four at once: (activation from the previous rank, gradient from the next), None where not received."""
        got = self._exchange(
            send_next=_as_list(output_tensor, optional=True),
            send_prev=_as_list(input_tensor_grad, optional=True),
            recv_prev=[tensor_shape] if recv_prev else [],
            recv_next=[tensor_shape] if recv_next else [],
        )
        return next(iter(got["recv_prev"]), None), next(iter(got["recv_next"]), None)

    def _receive(self, name: str, shapes: Shape | list[Shape], at_the_end: bool) -> Any:
        wanted: list[Any] = _as_shapes(shapes)
        got: list[Any] = [None] * len(wanted) if at_the_end else self._exchange(**{name: wanted})[name]
        return got[0] if is_single_shape(shapes) else got

    def _pass_on(
        self, name: str, receive: bool, shape: Shape, overlap: bool, **sends: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor | None, dict[str, Work]] | None:
        lists: dict[str, Any] = {key: _as_list(tensor, optional=True) for key, tensor in sends.items()}
        lists[name] = [shape] if receive else []
        got, works = self._start(**lists)
        if overlap:
            return next(iter(got[name]), None), {key: started[0] for key, started in works.items()}
        _wait(works)
        return next(iter(got[name]), None)

    def _exchange(self, **what: Any) -> dict[str, list[torch.Tensor]]:
        got, works = self._start(**what)
        _wait(works)
        return got

    def _start(
        self,
        *,
        send_next: Sequence[torch.Tensor] = (),
        send_prev: Sequence[torch.Tensor] = (),
        recv_prev: Sequence[Shape] = (),
        recv_next: Sequence[Shape] = (),
    ) -> tuple[dict[str, list[torch.Tensor]], dict[str, list[Work]]]:
        """Post the receives, then start the sends. Returns the receiving tensors and the works, by what they do."""
        before, me, after = (self._rank - 1) % self._size, self._rank, (self._rank + 1) % self._size
        got = {"recv_prev": self._empty("recv_prev", recv_prev), "recv_next": self._empty("recv_next", recv_next)}
        works = {
            "recv_prev": self.lane(Channel(before, me, "F")).receive_into(t.detach() for t in got["recv_prev"]),
            "recv_next": self.lane(Channel(after, me, "B")).receive_into(t.detach() for t in got["recv_next"]),
            "send_next": self.lane(Channel(me, after, "F")).start_send(
                tuple(t.detach().contiguous() for t in send_next)
            ),
            "send_prev": self.lane(Channel(me, before, "B")).start_send(
                tuple(t.detach().contiguous() for t in send_prev)
            ),
        }
        return got, {name: started for name, started in works.items() if started}

    def _empty(self, name: str, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """Fresh tensors to receive into: these methods give them away, so that they cannot come from the pool."""
        dtype = getattr(self.config, "pipeline_dtype", None)
        if shapes and not isinstance(dtype, torch.dtype):
            raise RuntimeError(f"{name} needs pipeline_dtype in the config: a torch.dtype, here {dtype!r}")
        if any(shape is None for shape in shapes):
            raise RuntimeError(f"{name} needs the shape of what it receives: (sequence, micro batch, hidden)")
        return [torch.empty(tuple(s), dtype=dtype, device=self.device, requires_grad=True) for s in shapes]


def _as_shapes(shapes: Any) -> list[Shape]:
    return [shapes] if is_single_shape(shapes) else list(shapes)


def _as_list(tensors: Tensors | None, *, optional: bool = False) -> list[torch.Tensor]:
    if tensors is None and optional:
        return []
    given = tensors if isinstance(tensors, list) else [tensors]
    if any(tensor is None for tensor in given):
        raise ValueError("None cannot be sent: the other rank would wait for it for ever")
    return [tensor for tensor in given if tensor is not None]


def _plain(tensors: Sequence[torch.Tensor]) -> Message:
    return tuple(tensor.detach().contiguous() for tensor in tensors)


def _like(sent: Any, received: list[torch.Tensor] | None) -> Any:
    """A list for who sent a list, a tensor for who sent a tensor, None (or a list of it) where nothing came."""
    if isinstance(sent, list):
        return [None] * len(sent) if received is None else received
    return None if received is None else received[0]


def _wait(works: dict[str, list[Work]]) -> None:
    for started in works.values():
        for work in started:
            work.wait()


def _refuse_unbuilt_modes(config: Any) -> None:
    problems = [
        Problem(
            "PP-E110",
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
