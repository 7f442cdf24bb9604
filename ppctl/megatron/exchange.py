"""One exchange with the two neighbours of a rank: checks of what is sent and received, then the exchange.

Knows shapes, dtypes and what would leave the other rank waiting. Must not know how bytes travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ppctl.comm.modes import Modes
from ppctl.comm.variable_shapes import MessageError, empty_header, header, shapes_of
from ppctl.errors import ConfigError, Problem
from ppctl.megatron.neighbours import Handle, Neighbours

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
    """Checks, then moves. Headers of variable shapes live on `header_device`."""

    def __init__(self, neighbours: Neighbours, modes: Modes, device: torch.device, header_device: torch.device) -> None:
        self._neighbours = neighbours
        self._modes = modes
        self._device = device
        self._header_device = header_device

    def __call__(
        self, sends: Sends, receives: Receives, shape: Any, *, wait: bool = True
    ) -> tuple[dict[str, torch.Tensor], dict[str, Handle]]:
        """What was received (or, without `wait`, will be) and what to wait for, both by move. Raises MessageError."""
        if self._modes.batched and not wait:
            message = "overlap_p2p_comm asks for messages that nobody waits for; batch_p2p_comm waits for its batches"
            raise OverlapError(Problem("PP-E117", message, "parallel.batch_p2p_comm=false"))
        moves = self._to_send(sends)
        wanted = [name for name, comes in receives.items() if comes]
        for name in wanted:
            self._check_receive(name, shape)
        shapes = self.shapes(sends, receives) if self._modes.variable else dict.fromkeys(wanted, shape)
        got = {name: self._empty(shapes[name]) for name in wanted}
        handles = self._neighbours.start(moves | {name: tensor.detach() for name, tensor in got.items()})
        if wait:
            self._neighbours.finish(handles)
        return got, handles

    def shapes(self, sends: Sends, receives: Receives) -> dict[str, list[int]]:
        """Exchange shapes alone: those of what comes, by move."""
        moves = {name: header((t,), self._header_device) for name, t in sends.items() if t is not None}
        received = {name: empty_header(1, self._header_device) for name, comes in receives.items() if comes}
        self._neighbours.finish(self._neighbours.start(moves | received, headers=True))
        return {name: shapes_of(sizes)[0] for name, sizes in received.items()}

    def listed(self, tensors: Any, what: str) -> list[torch.Tensor | None]:
        """The tensors to send, as a list; a None among them is not sent. Raises MessageError where all are None."""
        listed = tensors if isinstance(tensors, list) else [tensors]
        if listed and all(tensor is None for tensor in listed):
            rank = self._neighbours.pp_rank
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
                message = (
                    f"{name}: a tensor of {tensor.dtype}; the other rank receives pipeline_dtype {self._modes.dtype}"
                )
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

    def _empty(self, shape: Sequence[int]) -> torch.Tensor:
        """A new tensor to receive into: the caller keeps it, so that it cannot come from a pool."""
        return torch.empty(tuple(shape), dtype=self._modes.dtype, device=self._device, requires_grad=True)
