"""Process groups made from lists of ranks, and what ranks exchange over them: numbers, values, and clock offsets."""

from __future__ import annotations

import ctypes
import inspect
import os
import statistics
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ppctl.host.processes import boot
from ppctl.records import wire

_ON_FIRST_USE = "TORCH_GLOO_LAZY_INIT"
_ROUNDS = 11
"""The number of readings, whose median is the offset between two hosts' clocks."""
_MOST = 2**30
"""The most bytes of one rank's share of an exchange."""

wire.AS_TEXT[torch.dtype] = lambda dtype: str(dtype).removeprefix("torch."), lambda name: getattr(torch, name, None)


def make_group(groups: Iterable[tuple[int, ...]], *, backend: str | None = None) -> ProcessGroup:
    """Make the process group of this rank among `groups` (disjoint tuples of global ranks, in group order).

    Group rank i is the i-th of the tuple. The group obeys the world's limit; torch's own defaults are 30 minutes, 10
    for NCCL. Raises ValueError if no group, or more than one, holds this rank.

    Only the members take part in making a group, and torch names it after its ranks and the number of groups that the
    process has made. So its members must have made equally many groups before, or they look for each other under
    different names. Therefore channels between neighbours are no groups (`ppctl.comm.connections`).
    """
    rank = dist.get_rank()
    own = [group for group in groups if rank in group]
    if len(own) != 1:
        raise ValueError(f"rank {rank} is in {len(own)} of the groups, but must be in exactly one")
    assert dist.group.WORLD is not None  # or there would be no rank
    group = dist.new_group(
        list(own[0]),
        backend=backend,
        timeout=limit_of(dist.group.WORLD),
        use_local_synchronization=True,
        **_in_this_order(own[0]),
    )
    assert isinstance(group, ProcessGroup)  # members get the group, other ranks a marker
    return group


def _in_this_order(ranks: tuple[int, ...]) -> dict[str, Any]:
    """The arguments that keep `new_group` from sorting ranks: pipelines are in pp order, which may not be sorted. torch
    has this switch from 2.13 on. Raises ValueError for unsorted ranks with an older torch.
    """
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return {"sort_ranks": False}
    if list(ranks) != sorted(ranks):
        raise ValueError(f"torch {torch.__version__} would sort the group {ranks}: 2.13 and later keep its order")
    return {}


@contextmanager
def connecting_on_first_use() -> Iterator[None]:
    """Let ranks of gloo groups made inside connect at their first message, unless the user has set otherwise.

    Only for groups with collectives: with this, a send waits until the other end receives instead of returning
    immediately, and no time limit ends the wait if the other end has stopped. (Seen in torch 2.13; gloo#520.)
    """
    own = os.environ.get(_ON_FIRST_USE)
    os.environ.setdefault(_ON_FIRST_USE, "1")
    try:
        yield
    finally:
        if own is None:
            del os.environ[_ON_FIRST_USE]


def nccl_version() -> tuple[int, ...] | None:
    """The version of the loaded NCCL as (2, 30, 7), perhaps not that of torch's build; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    number = ctypes.c_int()
    try:
        # Not another NCCL in the system's directories.
        ctypes.CDLL("libnccl.so.2", mode=getattr(os, "RTLD_NOLOAD", 0)).ncclGetVersion(ctypes.byref(number))
    except OSError:  # torch has NCCL linked in
        return tuple(torch.cuda.nccl.version())
    major, rest = divmod(number.value, 10_000)
    return major, *divmod(rest, 100)


def limit_of(group: ProcessGroup) -> timedelta:
    """How long the group waits for its other members before it gives up: the longest of its backends' limits."""
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    limits = [each._timeout for each in options if each is not None]
    return max(limits, default=dist.default_pg_timeout)


def send_round(sent: Tensor, group: ProcessGroup) -> tuple[list[dist.Work], Tensor]:
    """Send a tensor to the next rank of the group's ring; returns (works, the tensor from the previous rank).

    Until the works are done, `sent` must not change, and the tensor returned is not filled. Gloo's messages would read
    a GPU's memory as the host's, so this uses gloo's all_to_all, which copies through the host. A collective.
    """
    if sent.is_cuda and group._get_backend(sent.device).name() == "gloo":
        return _send_round_at_once(sent, group)
    rank, size, arriving = group.rank(), group.size(), torch.empty_like(sent)
    ops = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % size),
    ]
    return dist.batch_isend_irecv(ops), arriving


def _send_round_at_once(sent: Tensor, group: ProcessGroup) -> tuple[list[dist.Work], Tensor]:
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(sent, memory_format=torch.contiguous_format)
    there, back = [0] * size, [0] * size
    there[(rank + 1) % size] = back[(rank - 1) % size] = sent.numel()
    flat = arriving.view(-1), sent.reshape(-1)
    return [dist.all_to_all_single(*flat, back, there, group=group, async_op=True)], arriving


def gather_rows(row: Sequence[float], rank: int, groups: Sequence[ProcessGroup]) -> Tensor:
    """The rows of all ranks in rank order, from this rank's own n numbers: [ranks, n] float64 on the CPU.

    A collective. `groups` are this rank's groups along the axes of the grid, in one order for all ranks: after a gather
    along an axis each of its ranks holds the rows of all its ranks. Global ranks must be below 2^53.

    A gather over a group goes round a ring, with one hop for every other rank. First over pp, then over dp, these are
    15 + 127 hops for 2,048 ranks; every rank receives the same bytes as in a ring of the world, which has 2,047 hops.
    """
    rows = torch.tensor([[rank, *row]], dtype=torch.float64, device="cpu")
    for group in groups:
        if group.size() > 1:
            gathered = torch.empty(group.size(), *rows.shape, dtype=torch.float64, device="cpu")
            dist.all_gather(list(gathered.unbind()), rows, group=group)
            rows = gathered.flatten(0, 1)
    return rows[rows[:, 0].argsort(), 1:]


def gather_values(kind: Any, own: Any, group: ProcessGroup | None = None, *, everywhere: bool = False) -> list[Any]:
    """The values of all members of a group (None: the world) in group order, on its first member or `everywhere`.

    A collective; on other members the list is empty. Raises Malformed for a value not of the annotation `kind`.
    """
    return [wire.unpacked(kind, each) for each in gather_bytes(wire.packed(kind, own), group, everywhere=everywhere)]


def gather_bytes(own: bytes, group: ProcessGroup | None = None, *, everywhere: bool = False) -> list[bytes]:
    """Like `gather_values`, for any bytes. Raises ValueError on all members if one has more than 1 GiB.

    This replaces torch's collectives of objects, which unpickle what arrives.
    """
    group = group or dist.group.WORLD
    assert group is not None  # or there would be no rank
    device, size = _device_of(group), group.size()
    lengths = torch.empty(size, 1, dtype=torch.int64, device=device)
    dist.all_gather(list(lengths.unbind()), torch.tensor([len(own)], device=device), group=group)
    most, shares = max(1, int(lengths.max())), lengths[:, 0].tolist()
    _refuse_long(most)
    row = torch.zeros(most, dtype=torch.uint8, device="cpu")
    row[: len(own)] = _tensor(own)
    rows = torch.empty(size if everywhere or group.rank() == 0 else 0, most, dtype=torch.uint8, device=device)
    if everywhere:
        dist.all_gather(list(rows.unbind()), row.to(device), group=group)
    else:
        first = dist.get_global_rank(group, 0)
        dist.gather(row.to(device), list(rows.unbind()) or None, dst=first, group=group)
    return [each[:share].cpu().numpy().tobytes() for each, share in zip(rows, shares, strict=False)]


def broadcast_bytes(own: bytes, group: ProcessGroup | None = None) -> bytes:
    """The bytes of a group's (None: the world's) first member. A collective; raises ValueError if over 1 GiB."""
    group = group or dist.group.WORLD
    assert group is not None  # or there would be no rank
    device, first = _device_of(group), dist.get_global_rank(group, 0)
    length = torch.tensor([len(own)], device=device)
    dist.broadcast(length, first, group=group)
    _refuse_long(int(length))
    sent = _tensor(own) if group.rank() == 0 else torch.empty(int(length), dtype=torch.uint8, device="cpu")
    sent = sent.to(device)
    dist.broadcast(sent, first, group=group)
    return sent.cpu().numpy().tobytes()


def _device_of(group: ProcessGroup) -> torch.device:
    """The device of a group's messages: the CPU if the group has a backend for it, else this process's current GPU."""
    cpu = torch.device("cpu")
    return cpu if cpu in group._device_types else group._device_types[0]


def _refuse_long(length: int) -> None:
    if not 0 <= length <= _MOST:
        raise ValueError(f"a rank shares {length} bytes with others, more than {_MOST}")


def _tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def clock_offset() -> float:
    """Seconds to add to this process's perf_counter to get rank 0's. A collective over the world; once, at start-up.

    Processes of one booted host share the monotonic clock: their offset is exactly 0. Between hosts it is the median of
    several readings taken right after a barrier. Its error is about the time that a barrier takes.
    """
    # A number that processes of the same booted machine agree on.
    boots = _gather(float(zlib.crc32((boot() or str(round(time.time() - time.monotonic()))).encode())))
    readings = []
    if len(set(boots)) > 1:
        for _ in range(_ROUNDS):
            dist.barrier()
            times = _gather(time.perf_counter())
            readings.append(times[0] - times[dist.get_rank()])
    same = boots[0] == boots[dist.get_rank()]
    return 0.0 if same else statistics.median(readings)


def _gather(value: float) -> list[float]:
    assert dist.group.WORLD is not None  # or there would be no rank
    numbers: list[float] = gather_rows([value], dist.get_rank(), [dist.group.WORLD])[:, 0].tolist()
    return numbers
