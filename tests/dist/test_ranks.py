"""The harness itself: results in rank order, failures named, nothing left behind."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, run_ranks


def total(number):
    value = torch.tensor([float(dist.get_rank() + number)])
    dist.all_reduce(value)
    return dist.get_rank(), value.item(), torch.get_num_threads()


def raise_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("boom")
    dist.barrier()


def die_on_rank_0():
    if dist.get_rank() == 0:
        os._exit(9)
    dist.barrier()


def hang_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(1000)


def test_results_come_back_in_rank_order():
    assert run_ranks(total, 3, 10) == [(r, 33.0, 1) for r in range(3)]


def test_the_first_failure_is_named_with_its_rank_and_traceback():
    with pytest.raises(RanksFailed, match=r"rank 1 failed first: ValueError: boom[\s\S]*in raise_on_rank_1") as caught:
        run_ranks(raise_on_rank_1, 3)
    assert [f.kind for f in caught.value.failures[:1]] == ["ValueError"]
    assert sorted(f.rank for f in caught.value.failures) == [0, 1, 2]


def test_a_rank_that_dies_is_named():
    with pytest.raises(RanksFailed, match=r"rank 0 failed first: died: .*exit code 9"):
        run_ranks(die_on_rank_0, 2)


def test_a_rank_that_hangs_is_killed_at_the_deadline():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 failed first: late"):
        run_ranks(hang_on_rank_1, 2, timeout=1)
    assert time.monotonic() - start < 10


def where_it_lies(seed):
    drawn = torch.randn(2, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    return os.getpid(), drawn.requires_grad, drawn.tolist()


def test_ranks_may_be_started_anew_as_those_on_a_gpu_are():
    same = torch.randn(2, generator=torch.Generator().manual_seed(3)).tolist()
    (first, *one), (second, *other) = run_ranks(where_it_lies, 2, 3, over="spawn")
    assert one == other == [True, same]
    assert first != second
    with pytest.raises(RanksFailed, match="rank 1 failed first: ValueError: boom"):
        run_ranks(raise_on_rank_1, 2, over="spawn")
