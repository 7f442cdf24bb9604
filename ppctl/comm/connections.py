"""The connections of one pipeline's messages, and this rank's ends of the channels over them.

Process groups do not work here. `torch.distributed.new_group` either needs every rank of the world, or
(use_local_synchronization) names the group after its ranks and the number of groups that this process has made. The two
ends of a channel have made different numbers of groups: they would look for each other under different keys of the
store, and wait for ever. So a connection is a bare backend over the store that all ranks share, below a prefix made of
the pipeline's ranks and the channel alone. It is called directly: `dist.isend` refuses a backend that is in no group.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup

from ppctl.comm.channels import DirectEnd, PinnedEnd, Transport, VariableEnd
from ppctl.comm.groups import limit_of
from ppctl.schedule.action import Channel

MAX_CTAS = 4
"""The most thread blocks of a message on a GPU. A posted receive keeps them busy until it has come: NCCL's default
(up to 32) would take a good part of the device's multiprocessors from the stages' own kernels."""

Maker = Callable[[Store, int, Sequence[int], str, timedelta], Any]
"""`(store, own position, global ranks, name, limit)` -> a backend. All of these ranks call it."""


def _nccl(store: Store, position: int, ranks: Sequence[int], name: str, limit: timedelta) -> Any:
    """NCCL with few thread blocks. Its kernels go before the stages' kernels: they are short if both ends are ready."""
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MAX_CTAS
    options._timeout = limit
    options.global_ranks_in_group = list(ranks)
    options.group_name = name
    backend = dist.ProcessGroupNCCL(store, position, len(ranks), options)
    backend._set_sequence_number_for_group()
    return backend


def _gloo(store: Store, position: int, ranks: Sequence[int], name: str, limit: timedelta) -> Any:
    backend: Any = dist.ProcessGroupGloo(store, position, len(ranks), timeout=limit)
    backend.options.global_ranks_in_group = list(ranks)
    backend.options.group_name = name
    backend._set_sequence_number_for_group()
    return backend


MAKERS: Mapping[str, Maker] = {
    "nccl": _nccl,
    "ucc": lambda store, position, ranks, _, limit: dist.ProcessGroupUCC(store, position, len(ranks), timeout=limit),
    "gloo": _gloo,
}
"""A backend's name -> the function that makes it."""


def connection_name(ranks: Sequence[int], number: int, what: str) -> str:
    """The name of one connection of a pipeline: equal at all its ends, and different for every other connection.

    `ranks` are the pipeline's global ranks in pp order. `number` counts the sets of connections that were made over
    exactly these ranks, one after the other. All ranks count alike, because they make and close communicators together.
    """
    pipeline = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    return f"ppctl/messages/{pipeline}.{number}/{what}"


_numbers: Counter[tuple[int, ...]] = Counter()


def _take_number(ranks: tuple[int, ...]) -> int:
    number = _numbers[ranks]
    _numbers[ranks] += 1
    return number


class Connections:
    """The connections of one pipeline's process group. Each is made once, when it is first asked for."""

    def __init__(self, pp_group: ProcessGroup) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(pp_group))
        self.rank = pp_group.rank()
        self.limit = limit_of(pp_group)
        self.number = _take_number(self.ranks)
        self._made: dict[str, Any] = {}
        self._users = 0

    def enter(self) -> None:
        """Count one more communicator over the connections. All ranks of the pipeline call this together."""
        self._users += 1

    def leave(self) -> None:
        """Count one communicator less; the last one ends all connections. All ranks of the pipeline call this together,
        with no message under way."""
        self._users -= 1
        if self._users == 0:
            self.close()

    def of_pair(self, kind: str, channel: Channel, part: str) -> Transport:
        """The transport of a channel's `part` (`body`, `header`). NCCL connects on the first message."""
        ends = sorted(channel[:2])
        return self._get(kind, f"{channel.source}-{channel.target}-{channel.direction}/{part}", ends)

    def of_all(self, kind: str, what: str) -> Transport:
        """The transport between all ranks of the pipeline, for one purpose. All ranks ask for it together."""
        return self._get(kind, what, range(len(self.ranks)))

    def close(self) -> None:
        """End all connections. All ranks of the pipeline call it, with nothing under way.

        Ending a connection of NCCL waits for its other end: both ends close shared connections in the order of names.
        """
        for name in sorted(self._made):
            self._made.pop(name).shutdown()
        # The store keeps the values of old names: addresses that are closed by now.
        self.number = _take_number(self.ranks)

    def _get(self, kind: str, what: str, members: Sequence[int]) -> Transport:
        name = connection_name(self.ranks, self.number, what)
        if name not in self._made:
            # A private name of torch's: no public one gives the store of the rendezvous.
            store = PrefixStore(f"{name}/", dist.distributed_c10d._get_default_store())
            ranks = [self.ranks[member] for member in members]
            self._made[name] = MAKERS[kind](store, list(members).index(self.rank), ranks, name, self.limit)
        return cast(Transport, self._made[name])


_CONNECTIONS: WeakKeyDictionary[ProcessGroup, Connections] = WeakKeyDictionary()


def connections_of(pp_group: ProcessGroup) -> Connections:
    """The group's connections, which all communicators over it share."""
    if pp_group not in _CONNECTIONS:
        _CONNECTIONS[pp_group] = Connections(pp_group)
    return _CONNECTIONS[pp_group]


def device_backend(pp_group: ProcessGroup) -> str | None:
    """The name of the group's backend for CUDA tensors, if it has one."""
    return next((name for name in ("nccl", "ucc") if name in dist.get_backend(pp_group)), None)


def moves_on_device(pp_group: ProcessGroup) -> bool:
    """Whether the group's backend moves CUDA tensors itself."""
    return torch.cuda.is_available() and device_backend(pp_group) is not None


TAGS = {"F": 1, "B": 2}
"""The tags of the channels between two ranks, on a backend with tags."""
HEADER_TAGS = {"F": 3, "B": 4}
"""The tags of the headers of messages of variable shape."""

_CPU = torch.device("cpu")


def loop_channels(size: int) -> tuple[Channel, ...]:
    """The channels of a loop placement: activations to the next rank, gradients to the previous one, wrapping round."""
    edges = [(rank, (rank + 1) % size) for rank in range(size)] if size > 1 else []
    return tuple(sorted({Channel(a, b, "F") for a, b in edges} | {Channel(b, a, "B") for a, b in edges}))


def make_ends(
    pp_group: ProcessGroup,
    device: torch.device,
    channels: Iterable[Channel],
    *,
    over: Transport | None = None,
    variable: bool = False,
    connect: bool = True,
) -> dict[Channel, DirectEnd]:
    """This rank's ends of the channels. On NCCL all ranks make them in one order, or they would wait in a circle.

    With `over`, messages of all channels use this one transport of the whole group, and the caller keeps them in order;
    else each channel has its own. Tensors that the group's backend cannot move from `device` go through pinned host
    memory. `variable` ends learn the shapes of their messages from headers. Without `connect` NCCL connects on each
    end's first message.
    """
    rank = pp_group.rank()
    own = [channel for channel in sorted(channels) if rank in channel[:2]]
    if over is not None:
        of_group = {channel: DirectEnd(channel, over, other_end(channel, rank), 0) for channel in own}
        if connect and device.type == "cuda":
            # NCCL needs a collective of the whole group before some of its ranks batch messages.
            dist.all_reduce(torch.zeros(1, device=device), group=pp_group)
            torch.cuda.synchronize(device)
            for end in of_group.values():
                first_message(end, rank, device)
        if variable:
            return {channel: VariableEnd(end, end, device, device) for channel, end in of_group.items()}
        return of_group
    if device.type == "cuda" and moves_on_device(pp_group):
        kind = device_backend(pp_group)
        assert kind is not None  # given if tensors move on the device
        return _pair_ends(connections_of(pp_group), kind, device, own, variable=variable, connect=connect)
    connections = _host_connections(pp_group)
    end_type = DirectEnd if device.type == "cpu" else PinnedEnd
    ends: dict[Channel, DirectEnd] = {
        c: end_type(c, connections[c.direction], other_end(c, rank), TAGS[c.direction]) for c in own
    }
    if not variable:
        return ends
    headers = {c: DirectEnd(c, connections[c.direction], other_end(c, rank), HEADER_TAGS[c.direction]) for c in own}
    return {c: VariableEnd(ends[c], headers[c], device, _CPU) for c in own}


def _host_connections(pp_group: ProcessGroup) -> dict[str, Transport]:
    """The transports of the host's messages by direction: on gloo, each direction has its own connections.

    A thread that sends or posts holds gloo's lock on the connection for the whole system call. If a message then comes
    over the same connection, gloo's own thread spins for the lock, on a core that the lock's holder may be waiting for
    (decision 9).
    """
    backend = cast(Transport, pp_group._get_backend(_CPU))
    if pp_group.size() == 1 or pp_group._get_backend(_CPU).name() != "gloo":
        return dict.fromkeys("FB", backend)
    return {"F": backend, "B": connections_of(pp_group).of_all("gloo", "gradients")}


def other_end(channel: Channel, rank: int) -> int:
    """The rank that a channel connects `rank` with."""
    return channel.target if channel.source == rank else channel.source


def _pair_ends(
    connections: Connections, kind: str, device: torch.device, own: list[Channel], *, variable: bool, connect: bool
) -> dict[Channel, DirectEnd]:
    """This rank's end of each channel, on a connection of two ranks (of two such if shapes vary: headers go apart).
    With `connect` both ranks of a channel exchange a message here, so they must go through channels in one order."""

    def end(channel: Channel, part: str) -> DirectEnd:
        peer = sorted(channel[:2]).index(other_end(channel, connections.rank))
        made = DirectEnd(channel, connections.of_pair(kind, channel, part), peer, 0)
        if connect:
            first_message(made, connections.rank, device)
        return made

    if not variable:
        return {channel: end(channel, "body") for channel in own}
    return {c: VariableEnd(end(c, "body"), end(c, "header"), device, device) for c in own}


def first_message(end: DirectEnd, rank: int, device: torch.device) -> None:
    """Connect a channel: send a number over it, or receive the number, and wait."""
    probe = (torch.zeros(1, device=device),)
    for work in end.start_send(probe) if end.channel.source == rank else end.receive_into(probe):
        work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
