"""Single tensors between a pipeline rank and its two neighbours: what Megatron's methods are made of.

Knows four moves (to and from either side), ends and fused exchanges. Must not know what shapes mean, or schedules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.channels import DirectEnd, PeerLost, Pending, wait_for
from ppctl.comm.connections import HEADER_TAGS, TAGS, other_end
from ppctl.comm.variable_shapes import MessageError, VariableEnd
from ppctl.errors import Problem
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


class Neighbours:
    """Starts moves; `headers=True` moves shapes beside the tensors, so that neither is taken for the other."""

    def __init__(
        self,
        pp_group: ProcessGroup,
        end: Callable[[Channel], DirectEnd],
        *,
        fused: bool,
        sync: torch.device | None,
    ) -> None:
        rank, size = pp_group.rank(), pp_group.size()
        before, after = (rank - 1) % size, (rank + 1) % size
        self.pp_rank = rank
        self.fused = fused
        self._group = pp_group
        self._end = end
        self._sync = sync
        self._channels = {
            "send_prev": Channel(rank, before, "B"),
            "recv_next": Channel(after, rank, "B"),
            "send_next": Channel(rank, after, "F"),
            "recv_prev": Channel(before, rank, "F"),
        }
        self._own: dict[tuple[str, bool], deque[torch.Tensor]] = {(d, h): deque() for d in "FB" for h in (True, False)}

    def start(self, moves: Moves, *, headers: bool = False) -> dict[str, Handle]:
        """Start the moves, receives first where each goes by itself. Returns what to wait for, by move."""
        if self._group.size() == 1:
            return {name: self._to_itself(name, moves[name], headers) for name in MOVES if name in moves}
        if self.fused:
            return self._fuse(moves, headers)
        receives_first = sorted((name for name in MOVES if name in moves), key=lambda name: name.startswith("send"))
        return {name: self._start_one(name, moves[name], headers) for name in receives_first}

    def finish(self, handles: Mapping[str, Handle]) -> None:
        """Wait for moves; after a fused exchange with batch_p2p_sync, for the whole device."""
        for handle in handles.values():
            handle.wait()
        if self.fused and self._sync is not None:
            torch.cuda.synchronize(self._sync)

    def _start_one(self, name: str, tensor: torch.Tensor, headers: bool) -> Handle:
        channel = self._channels[name]
        end = self._end(channel)
        if isinstance(end, VariableEnd):
            end = end.headers if headers else end.body
        works = end.start_send((tensor,)) if name.startswith("send") else end.receive_into((tensor,))
        return Handle(works, channel)

    def _fuse(self, moves: Moves, headers: bool) -> dict[str, Handle]:
        tags = HEADER_TAGS if headers else TAGS
        names = [name for name in MOVES if name in moves]
        ops = []
        for name in names:
            channel = self._channels[name]
            op = dist.isend if name.startswith("send") else dist.irecv
            peer, tag = other_end(channel, self._group.rank()), tags[channel.direction]
            ops.append(dist.P2POp(op, moves[name], group=self._group, tag=tag, group_peer=peer))
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise PeerLost(self._channels[names[0]], error) from error
        # A backend that fuses gives one work for all; waiting for it more than once does no harm.
        each = [[work] for work in works] if len(works) == len(ops) else [works] * len(ops)
        return {name: Handle(own, self._channels[name]) for name, own in zip(names, each, strict=True)}

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
