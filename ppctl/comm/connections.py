"""The connections of one pipeline's messages: backends with names of their own, beside its process group.

Knows how torch makes a backend, and that both ends must derive one name. Must not know what is sent.

A process group does not work here. `torch.distributed.new_group` either has every rank of the world take part, or
(use_local_synchronization) names the group after its ranks and the number of groups that this process has made so far.
The two ends of a channel have made different numbers of groups by then: they would look for each other under different
keys of the store, and wait for ever. So a connection is a bare backend over the store that all ranks share, below a
prefix that follows from the pipeline's ranks and the channel alone. It is called directly: `dist.isend` and its like
refuse a backend that is in no group.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup

from ppctl.comm.channels import Transport
from ppctl.comm.groups import limit_of
from ppctl.schedule.action import Channel

MAX_CTAS = 4
"""Thread blocks of one message on a GPU. A posted receive keeps them busy until its message has come: NCCL's default
(up to 32) would take a good part of the device's multiprocessors from the stages' own kernels."""

Maker = Callable[[Store, int, Sequence[int], str, timedelta], Any]
"""`(store, own position, global ranks, name, limit)` -> a backend. All of `ranks` make it."""


def _nccl(store: Store, position: int, ranks: Sequence[int], name: str, limit: timedelta) -> Any:
    """NCCL with few thread blocks, and kernels that go before the stages' own: with both ends there they are short."""
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MAX_CTAS
    options._timeout = limit
    options.global_ranks_in_group = list(ranks)
    options.group_name = name
    backend = dist.ProcessGroupNCCL(store, position, len(ranks), options)
    backend._set_sequence_number_for_group()
    return backend


def _ucc(store: Store, position: int, ranks: Sequence[int], name: str, limit: timedelta) -> Any:
    return dist.ProcessGroupUCC(store, position, len(ranks), timeout=limit)


def _gloo(store: Store, position: int, ranks: Sequence[int], name: str, limit: timedelta) -> Any:
    backend: Any = dist.ProcessGroupGloo(store, position, len(ranks), timeout=limit)
    backend.options.global_ranks_in_group = list(ranks)
    backend.options.group_name = name
    backend._set_sequence_number_for_group()
    return backend


MAKERS: Mapping[str, Maker] = {"nccl": _nccl, "ucc": _ucc, "gloo": _gloo}
"""By the name of a backend, what makes it."""


def connection_name(ranks: Sequence[int], number: int, what: str) -> str:
    """The name of one connection of a pipeline: the same at all its ends, and no other pipeline's.

    `ranks` are the pipeline's global ranks in pp order. `number` counts the sets of connections that were made over
    exactly these ranks, one after the other: they make and close communicators together, so that all count the same.
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
        """Count one more communicator over the connections. All ranks of the pipeline make it together."""
        self._users += 1

    def leave(self) -> None:
        """Count one less; the last one ends all connections, with nothing under way. All ranks leave together."""
        self._users -= 1
        if self._users == 0:
            self.close()

    def of_pair(self, kind: str, channel: Channel, part: str) -> Transport:
        """What carries a channel's `part` (`body`, `header`) between its ends. NCCL connects on the first message."""
        ends = sorted(channel[:2])
        return self._get(kind, f"{channel.source}-{channel.target}-{channel.direction}/{part}", ends)

    def of_all(self, kind: str, what: str) -> Transport:
        """What connects all ranks of the pipeline, for one purpose. All ranks ask for it together."""
        return self._get(kind, what, range(len(self.ranks)))

    def close(self) -> None:
        """End all connections. All ranks of the pipeline call it, with nothing under way.

        To end a connection of NCCL waits for its other end: both go through what they share in the order of its names.
        """
        for name in sorted(self._made):
            self._made.pop(name).shutdown()
        # The store keeps what was written under the old names: addresses that are closed by now.
        self.number = _take_number(self.ranks)

    def _get(self, kind: str, what: str, members: Sequence[int]) -> Transport:
        name = connection_name(self.ranks, self.number, what)
        if name not in self._made:
            store = PrefixStore(f"{name}/", _shared_store())
            ranks = [self.ranks[member] for member in members]
            self._made[name] = MAKERS[kind](store, list(members).index(self.rank), ranks, name, self.limit)
        return cast(Transport, self._made[name])


_WIRES: WeakKeyDictionary[ProcessGroup, Connections] = WeakKeyDictionary()


def connections_of(pp_group: ProcessGroup) -> Connections:
    """The group's connections: of all communicators over it the same."""
    if pp_group not in _WIRES:
        _WIRES[pp_group] = Connections(pp_group)
    return _WIRES[pp_group]


def device_backend(pp_group: ProcessGroup) -> str | None:
    """The name of the group's backend for CUDA tensors, where it has one."""
    return next((name for name in ("nccl", "ucc") if name in dist.get_backend(pp_group)), None)


def moves_on_device(pp_group: ProcessGroup) -> bool:
    """Whether the group's backend moves CUDA tensors itself."""
    return torch.cuda.is_available() and device_backend(pp_group) is not None


def _shared_store() -> Store:
    """The store of the rendezvous: a private name of torch's, as no public one gives it."""
    return dist.distributed_c10d._get_default_store()
