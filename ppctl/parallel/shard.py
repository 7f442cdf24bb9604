"""Tensors divided over a process group: sums go to the owner of each part, and whole tensors come from all parts.

In equal parts a tensor is read flat, padded to a multiple of the group's size n, and cut into n runs, of which rank r
holds the r-th: a reduce-scatter and an all-gather. Or it is cut into runs of any length, each of one owner: one
`reduce` to every owner and one `broadcast` from it, in the order of ranks; together these send as much, without
padding. Every rank of the group makes the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# torch renamed both in 2.13. Flat tensors: gloo takes no others of several dims.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


Sums = Callable[[], list[Tensor]]
"""A function that waits for sums; returns for each tensor the sum of this rank's part, flat."""
Wholes = Callable[[Iterable[Tensor]], None]
"""A function that waits for whole tensors, and copies them into its arguments, one after the other."""


def width(tensor: Tensor, size: int) -> int:
    """Elements of one part."""
    return -(-tensor.numel() // size)


def part_of(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part [width], a copy."""
    rows = tensor.new_empty(group.size(), width(tensor, group.size()))
    _cut(tensor, rows)
    return rows[group.rank()].clone()


def run_of(tensor: Tensor, group: dist.ProcessGroup) -> range:
    """The elements of the flat tensor that are this rank's part, without padding."""
    elements, count = width(tensor, group.size()), tensor.numel()
    return range(min(group.rank() * elements, count), min((group.rank() + 1) * elements, count))


def scatter_sums(
    tensors: Iterable[Tensor],
    widths: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Sums:
    """Start summing tensors of one dtype over the group; `widths` are the elements of a rank's part of each. Tensors
    are read one by one, and may be freed or overwritten once the next one is read."""
    flat = torch.empty(group.size(), sum(widths), dtype=dtype, device=device)
    for tensor, rows in zip(tensors, flat.split(list(widths), dim=1), strict=True):
        _cut(tensor, rows)
    own, on_cpu = flat.new_empty(flat.shape[1]), flat.device.type == "cpu"
    if on_cpu:  # gloo would also sum all of it, in a copy
        work = dist.all_reduce(flat, group=group, async_op=True)
    else:
        work = reduce_scatter(own, flat.view(-1), group=group, async_op=True)

    def summed(_: Tensor = flat) -> list[Tensor]:  # held until then, whatever the backend holds
        _wait([work])
        if on_cpu:
            own.copy_(flat[group.rank()])
        return list(own.split(list(widths)))

    return summed


def start_gather(parts: Sequence[Tensor], dtype: torch.dtype, group: dist.ProcessGroup) -> Wholes:
    """Start making tensors whole from the ranks' parts, rounded to `dtype` before they are sent."""
    own = torch.cat([part.to(dtype) for part in parts])
    flat = own.new_empty(group.size(), own.numel())
    work = all_gather(flat.view(-1), own, group=group, async_op=True)
    widths = [part.numel() for part in parts]

    def fill(wholes: Iterable[Tensor], _: Tensor = own) -> None:
        _wait([work])
        for whole, rows in zip(wholes, flat.split(widths, dim=1), strict=True):
            whole.copy_(rows.reshape(-1)[: whole.numel()].view_as(whole))

    return fill


def _cut(tensor: Tensor, rows: Tensor) -> None:
    """Write the parts of all ranks into `rows` [size, width], padded with zeros."""
    flat, columns = tensor.reshape(-1), rows.shape[1]
    full, rest = divmod(flat.numel(), columns)
    rows[:full] = flat[: full * columns].view(full, columns)
    if full < len(rows):
        rows[full:] = 0
        rows[full, :rest] = flat[full * columns :]


Runs = Mapping[int, range]
"""Rank of the group -> the elements of a tensor, read flat, that it owns; ranks that own none are left out."""


def reduce_sums(
    tensors: Iterable[Tensor],
    runs: Sequence[Runs],
    group: dist.ProcessGroup,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Sums:
    """Start summing tensors of one dtype over the group, each run on the rank that owns it. Tensors are read one by
    one, and may be freed or overwritten once the next one is read."""
    flats = _flats(runs, dtype, device)
    taken = dict.fromkeys(flats, 0)
    for tensor, owned in zip(tensors, runs, strict=True):
        flat = tensor.reshape(-1)
        for rank, run in owned.items():
            flats[rank][taken[rank] : taken[rank] + len(run)] = flat[run.start : run.stop]
            taken[rank] += len(run)
    works = [dist.reduce(flats[rank], dist.get_global_rank(group, rank), group=group, async_op=True) for rank in flats]
    own = flats.get(group.rank(), torch.empty(0, dtype=dtype, device=device))
    widths = [len(owned.get(group.rank(), ())) for owned in runs]

    def summed(_: dict[int, Tensor] = flats) -> list[Tensor]:
        _wait(works)
        return list(own.split(widths))

    return summed


def start_sending(
    parts: Sequence[Tensor], runs: Sequence[Runs], dtype: torch.dtype, group: dist.ProcessGroup
) -> Wholes:
    """Start making tensors whole from their owners' parts, rounded to `dtype` before they are sent."""
    flats = _flats(runs, dtype, parts[0].device)
    if group.rank() in flats:
        torch.cat([part.to(dtype) for part in parts], out=flats[group.rank()])
    works = [
        dist.broadcast(flats[rank], dist.get_global_rank(group, rank), group=group, async_op=True) for rank in flats
    ]

    def fill(wholes: Iterable[Tensor]) -> None:
        _wait(works)
        taken = dict.fromkeys(flats, 0)
        for whole, owned in zip(wholes, runs, strict=True):
            flat = whole.view(-1)
            for rank, run in owned.items():
                flat[run.start : run.stop] = flats[rank][taken[rank] : taken[rank] + len(run)]
                taken[rank] += len(run)

    return fill


def own_run(runs: Runs, group: dist.ProcessGroup) -> range:
    """The elements of a tensor that this rank owns."""
    return runs.get(group.rank(), range(0))


def _flats(runs: Sequence[Runs], dtype: torch.dtype, device: torch.device | None) -> dict[int, Tensor]:
    """Owner -> memory for its parts of all tensors, in the order of ranks."""
    owners = sorted({rank for owned in runs for rank in owned})
    elements = {rank: sum(len(owned.get(rank, ())) for owned in runs) for rank in owners}
    return {rank: torch.empty(size, dtype=dtype, device=device) for rank, size in elements.items()}


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
