"""Groups in the order of their ranks, also with a torch that sorts them (before 2.13)."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ranks import run_ranks

from ppctl.comm.groups import make_group


def of_an_older_torch(*groups):
    """The ranks of this rank's group where `new_group` has no `sort_ranks`; or the error's text."""
    new_group = dist.new_group

    def older(ranks=None, timeout=None, backend=None, use_local_synchronization=False):
        return new_group(ranks, timeout, backend, use_local_synchronization=use_local_synchronization)

    dist.new_group = older
    try:
        return dist.get_process_group_ranks(make_group(groups))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("groups", [[(0, 1), (2, 3)], [(0, 2), (1, 3)]])
def test_ranks_in_order_make_a_group_with_a_torch_that_sorts(groups: list[tuple[int, ...]]) -> None:
    found = run_ranks(of_an_older_torch, 4, *groups)
    assert [tuple(ranks) for ranks in found] == [next(each for each in groups if rank in each) for rank in range(4)]


def test_a_torch_that_sorts_is_refused_ranks_in_another_order() -> None:
    assert all("would sort the group (1, 0)" in text for text in run_ranks(of_an_older_torch, 2, (1, 0)))
