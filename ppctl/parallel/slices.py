"""Tensors of which every rank of a group has a run of neighbours along a dim, made whole.

Knows a process group. Must not know stages or checkpoints. Runs are as `geometry/parts.py` has them: equal but for the
last ones.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ppctl.parallel.shard import all_gather


def gather_runs(own: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """The whole, `size` long along `dim`, of the ranks' runs of it."""
    step = -(-size // group.size())
    first = own.movedim(dim, 0)
    filled = first.new_zeros(step, *first.shape[1:])
    filled[: len(first)] = first
    rows = filled.new_empty(group.size() * filled.numel())
    all_gather(rows, filled.view(-1), group=group)
    return rows.view(-1, *first.shape[1:])[:size].movedim(0, dim).contiguous()
