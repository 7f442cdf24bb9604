"""Runs of tensors, each owned by one rank of a group: sums go to the owner, and whole tensors come from the owners.

Knows tensors, a group and who owns what. Must not know what they mean. As `shard`, with runs of any length in place of
equal parts: one `reduce` to every owner, and one `broadcast` from it, which together move what a scatter and a gather
of equal parts move, without padding. Every rank of the group makes the same calls, owners in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Runs = Mapping[int, range]
"""Rank of the group -> the elements of a tensor, read flat, that it owns; a rank that owns none is not there."""


class ReducedSums(NamedTuple):
    """Sums that are being computed."""

    works: list[dist.Work | None]
    flats: dict[int, Tensor]
    """By owner, what is summed; it is held until the sums are there, whatever the backend holds."""
    own: Tensor
    """Where this rank's sums arrive."""
    widths: list[int]

    def wait(self) -> list[Tensor]:
        """Waits for the sums; returns for each tensor the sum of the run that this rank owns, flat."""
        _wait(self.works)
        return list(self.own.split(self.widths))


def reduce_sums(
    tensors: Iterable[Tensor],
    runs: Sequence[Runs],
    group: dist.ProcessGroup,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> ReducedSums:
    """Start summing tensors of one dtype over the group, each run on the rank that owns it.

    They are asked for one by one, and may be freed or overwritten as soon as the next one is.
    """
    flats = _flats(runs, dtype, device)
    taken = dict.fromkeys(flats, 0)
    for tensor, owned in zip(tensors, runs, strict=True):
        flat = tensor.reshape(-1)
        for rank, run in owned.items():
            flats[rank][taken[rank] : taken[rank] + len(run)] = flat[run.start : run.stop]
            taken[rank] += len(run)
    works = [dist.reduce(flats[rank], dist.get_global_rank(group, rank), group=group, async_op=True) for rank in flats]
    own = flats.get(group.rank(), torch.empty(0, dtype=dtype, device=device))
    return ReducedSums(works, flats, own, [len(owned.get(group.rank(), ())) for owned in runs])


class OwnedWholes(NamedTuple):
    """Whole tensors that are being sent by their owners."""

    works: list[dist.Work | None]
    flats: dict[int, Tensor]
    runs: Sequence[Runs]

    def into(self, wholes: Iterable[Tensor]) -> None:
        """Fill the whole tensors, one after the other."""
        _wait(self.works)
        taken = dict.fromkeys(self.flats, 0)
        for whole, owned in zip(wholes, self.runs, strict=True):
            flat = whole.view(-1)
            for rank, run in owned.items():
                flat[run.start : run.stop] = self.flats[rank][taken[rank] : taken[rank] + len(run)]
                taken[rank] += len(run)


def start_sending(
    parts: Sequence[Tensor], runs: Sequence[Runs], dtype: torch.dtype, group: dist.ProcessGroup
) -> OwnedWholes:
    """Start making tensors whole from what their owners hold, rounded to `dtype` before it travels."""
    flats = _flats(runs, dtype, parts[0].device)
    if group.rank() in flats:
        torch.cat([part.to(dtype) for part in parts], out=flats[group.rank()])
    works = [
        dist.broadcast(flats[rank], dist.get_global_rank(group, rank), group=group, async_op=True) for rank in flats
    ]
    return OwnedWholes(works, flats, runs)


def own_run(runs: Runs, group: dist.ProcessGroup) -> range:
    """The elements of a tensor that this rank owns."""
    return runs.get(group.rank(), range(0))


def _flats(runs: Sequence[Runs], dtype: torch.dtype, device: torch.device | None) -> dict[int, Tensor]:
    """Memory for what each owner has of all tensors, in the order of ranks."""
    owners = sorted({rank for owned in runs for rank in owned})
    elements = {rank: sum(len(owned.get(rank, ())) for owned in runs) for rank in owners}
    return {rank: torch.empty(size, dtype=dtype, device=device) for rank, size in elements.items()}


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
