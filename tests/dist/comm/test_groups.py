"""Groups in the order of their ranks, also with a torch that sorts them (before 2.13); values that travel over them."""

from __future__ import annotations

import os
import pickle
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ppctl.comm import groups
from ppctl.comm.groups import _send_round_at_once, broadcast_bytes, gather_bytes, gather_values, make_group, send_round
from ppctl.records import wire


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


KIND = tuple[str, list[tuple[int, float]], bytes, bool | None]


def exchanged(lengths: list[int]) -> tuple[list, list, bytes]:
    """What this rank gathers and is sent, of values of these lengths by rank."""
    rank = dist.get_rank()
    own = (f"rank {rank}", [(n, 0.1 * n) for n in range(lengths[rank])], bytes(lengths[rank]), None if rank else True)
    group = make_group([tuple(range(1, dist.get_world_size())), (0,)])
    text = f"of {rank}".encode() * lengths[rank]
    return gather_values(KIND, own), gather_values(KIND, own, group, everywhere=True), broadcast_bytes(text, group)


def test_values_arrive_in_group_order_on_the_first_rank_or_on_all() -> None:
    lengths = [3, 0, 1000]
    found = run_ranks(exchanged, 3, lengths)
    values = [
        (f"rank {rank}", [(n, 0.1 * n) for n in range(length)], bytes(length), None if rank else True)
        for rank, length in enumerate(lengths)
    ]
    assert [each[0] for each in found] == [values, [], []]
    assert [each[1] for each in found] == [values[:1], values[1:], values[1:]]
    assert [each[2] for each in found] == [b"of 0" * 3, b"", b""]


def of_another_type(path: str) -> str:
    """Rank 1 sends a pickle that makes a directory; all look at what the others sent."""
    rank, harm = dist.get_rank(), pickle.dumps(MakesADirectory(path))
    try:
        return str([wire.unpacked(KIND, each) for each in gather_bytes(harm, everywhere=True)])
    except wire.Malformed as error:
        return f"{type(error).__name__} on {rank}"


class MakesADirectory(NamedTuple):
    path: str

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_what_another_rank_sends_runs_nothing(tmp_path) -> None:
    harm = tmp_path / "harm"
    assert run_ranks(of_another_type, 2, str(harm)) == ["Malformed on 0", "Malformed on 1"]
    assert not harm.exists()


def of_a_long_share(most: int) -> str:
    groups._MOST = most
    try:
        gather_bytes(bytes(most + dist.get_rank()))
    except ValueError as error:
        return str(error)
    return ""


def test_a_share_that_is_too_long_is_refused_on_all_ranks() -> None:
    assert run_ranks(of_a_long_share, 2, 1000) == ["a rank shares 1001 bytes with others, more than 1000"] * 2


def devices_of(backends: str) -> tuple[str, str]:
    group = dist.new_group(backend=backends)
    return groups._device_of(group).type, dist.distributed_c10d._get_object_coll_device(group)


@pytest.mark.parametrize("backends", ["gloo", "cpu:gloo,cuda:gloo", "cuda:gloo"])
def test_values_lie_where_torchs_collectives_of_objects_have_them(backends: str) -> None:
    """The last one stands for NCCL alone, which this build may lack."""
    ((ours, torchs),) = run_ranks(devices_of, 1, backends)
    assert ours == torchs


def sent_round() -> list[list[float]]:
    """What arrives from the rank before, by each way."""
    assert dist.group.WORLD is not None
    sent, arrived = torch.arange(6.0).view(2, 3) + 10 * dist.get_rank(), []
    for way in (send_round, _send_round_at_once):
        works, arriving = way(sent, dist.group.WORLD)
        for work in works:
            work.wait()
        arrived.append(arriving.tolist())
    return arrived


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_exchange_of_all_sends_round_a_ring_what_messages_send(ranks: int) -> None:
    for rank, (by_messages, at_once) in enumerate(run_ranks(sent_round, ranks)):
        before = (rank - 1) % ranks
        assert by_messages == at_once == (torch.arange(6.0).view(2, 3) + 10 * before).tolist()
