"""Tensors of which every rank has a run of neighbours along some dims: made whole, and cut again.

Knows process groups by axis and the table's rows. Must not know stages or checkpoints. Runs are as `geometry/parts.py`
has them: equal but for the last ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ppctl.geometry.parameters import Parameter
from ppctl.geometry.parts import Parts
from ppctl.parallel.shard import all_gather


class Slices:
    """What a rank holds of the parameters that tp and etp split. `groups` are its groups by axis."""

    def __init__(self, parts: Parts, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self.parts = parts
        self.groups = groups

    @torch.no_grad()
    def whole(self, row: Parameter, own: Tensor) -> Tensor:
        """The whole of a parameter, or a tensor of its shape; a stack has the rank's own experts. A collective.

        The tensor itself where it is whole, or is a number that is the same for all.
        """
        shape = _shape(row)
        for axis, dim in self._splits(row) if own.dim() else ():
            own = gather_runs(own, dim, shape[dim], self.groups[axis])
        return own

    def own(self, row: Parameter, whole: Tensor) -> Tensor:
        """The rank's part of what `whole` returned: a view."""
        for axis, dim in self._splits(row) if whole.dim() else ():
            run = self.parts.on(axis).run(whole.shape[dim])
            whole = whole.narrow(dim, run.start, len(run))
        return whole

    def _splits(self, row: Parameter) -> list[tuple[str, int]]:
        return [(axis, dim) for axis, dim in self.parts.splits(row).items() if axis != "ep"]


def _shape(row: Parameter) -> tuple[int, ...]:
    return (row.experts, *row.shape) if row.experts else row.shape


def gather_runs(own: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """The whole, `size` long along `dim`, of the ranks' runs of it."""
    step = -(-size // group.size())
    first = own.movedim(dim, 0)
    filled = first.new_zeros(step, *first.shape[1:])
    filled[: len(first)] = first
    rows = filled.new_empty(group.size() * filled.numel())
    all_gather(rows, filled.view(-1), group=group)
    return rows.view(-1, *first.shape[1:])[:size].movedim(0, dim).contiguous()
