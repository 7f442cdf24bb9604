"""Several runs, one after another, in the same ranks."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch.distributed as dist

Case = TypeVar("Case")
Result = TypeVar("Result")


def in_own_worlds(run: Callable[[Case], Result], cases: Iterable[Case]) -> list[Result]:
    """What `run` returns for each case; each has a world of its own. A collective of the ranks.

    Groups that stay cost time: each has threads that wake a hundred times a second.
    """
    store = dist.distributed_c10d._get_default_store()
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for number, case in enumerate(cases):
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"case {number}", store), rank=rank, world_size=size)
        found.append(run(case))
    return found
