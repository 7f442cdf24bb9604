"""The roll call: who has not come, and which host does not reach which, is told alike on every rank and before gloo."""

import math
import os
import re
import socket
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import RanksFailed, run_ranks
from stores import sealed_store

from ppctl.config.schema import RunConfig
from ppctl.errors import TrainingError
from ppctl.plan import build_plan
from ppctl.rank.rendezvous import OwnRank, SharedRun, meet
from ppctl.reach import start
from ppctl.reach.hosts import listen
from ppctl.runs.rundir import RunDir


def answer(absent=(), deaf=(), hosts=3, patience=60.0, pairs=()):
    """One rank's part: `absent` ranks do not come, of `deaf` ones the listener refuses; `pairs` exchange messages."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ["SLURMD_NODENAME"] = f"host{rank % hosts}"
    config = RunConfig()
    if rank in deaf:
        start.listen = not_listening
    try:
        if rank not in absent:
            shared = SharedRun(RunDir(Path("nowhere")), config, build_plan(config, {}))
            limits = {"edge_limit": 5.0, "patience": patience}
            return start.call_roll(sealed_store(), rank, world, shared.digest, **limits, pairs=lambda: pairs)
    finally:
        start.listen = listen
        del os.environ["SLURMD_NODENAME"]


def not_listening():
    unheard = socket.socket()
    unheard.bind(("127.0.0.1", 0))
    return unheard, unheard.getsockname()


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_ranks_that_all_come_and_reach_each_other_go_on_and_know_all_hosts(hosts):
    assert run_ranks(answer, 3, (), (), hosts) == [[f"host{number}" for number in range(hosts)]] * 3


def test_a_host_that_cannot_be_connected_to_is_named_with_who_tried_by_every_rank():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(answer, 3, (), (1,))
    assert [failure.kind for failure in caught.value.failures] == ["DeadEdge"] * 3
    for failure in caught.value.failures:
        assert "PP-E707: rank 0 on host0 does not reach rank 1 on host1 at 127.0.0.1 port" in failure.message
        assert "rank 2 on host2 does not reach rank 1 on host1" in failure.message
        assert "the connection was refused" in failure.message and "GLOO_SOCKET_IFNAME" in failure.message


@pytest.mark.whole
def test_a_host_behind_a_firewall_is_found_by_those_who_speak_to_it_and_some_others():
    """Of eight hosts those 1, 2 and 4 before it, its neighbours in the ring, rank 0's, and that of a rank with messages
    for it."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(answer, 8, (), (3,), 8, 60.0, ((3, 6),))
    for failure in caught.value.failures:
        told = re.findall(r"rank (\d) on host\1 does not reach rank 3 on host3", failure.message)
        assert (failure.kind, told) == ("DeadEdge", ["0", "1", "2", "4", "6", "7"])


@pytest.mark.parametrize("hosts", [2, 3, 7, 256])
@pytest.mark.parametrize("rank", [lambda place, hosts: 8 * place, lambda place, hosts: place], ids=["block", "cyclic"])
def test_every_host_is_tried_by_a_logarithm_of_all_and_by_those_whose_ranks_speak_to_its(rank, hosts):
    of_rank = {each: each // 8 if rank(1, hosts) == 8 else each % hosts for each in range(8 * hosts)}
    pairs = [(each, (each + 3) % len(of_rank)) for each in of_rank]
    tried = start._tried_by_host({each: {"host": f"host{host}"} for each, host in of_rank.items()}, pairs)
    first = [rank(place, hosts) for place in range(hosts)]
    assert sorted(tried) == first and tried[0] == first[1:]
    assert all(first[0] in tried[own] and own not in tried[own] for own in first[1:])
    for one, other in pairs:
        own, peer = first[of_rank[one]], first[of_rank[other]]
        assert own == peer or (peer in tried[own] and own in tried[peer])
    by = Counter(other for others in tried.values() for other in others)
    assert min(by.values()) >= math.floor(math.log2(hosts))
    assert sum(by.values()) <= hosts * (math.ceil(math.log2(hosts)) + 2 * 2 + 2)


def test_a_rank_that_does_not_come_is_named_by_all_others():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(answer, 3, (1,), (), 3, 1.0)
    assert {failure.rank for failure in caught.value.failures} == {0, 2}
    assert all("PP-E709: rank 1 has not come within 1 s" in failure.message for failure in caught.value.failures)


def test_a_store_that_is_not_reached_is_told_with_its_address(monkeypatch):
    refused, (host, port) = not_listening()
    for name, value in {"MASTER_ADDR": host, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with refused, pytest.raises(TrainingError) as caught:
        meet(OwnRank(1, 0, 2, 1), timedelta(seconds=1))
    (problem,) = caught.value.problems
    assert problem.code == "PP-E708" and "did not reach rank 0's store at 127.0.0.1 port" in problem.message
    assert problem.message.startswith("rank 1 on ")


def test_a_store_to_which_nobody_comes_says_how_many_are_there(monkeypatch):
    refused, (host, port) = not_listening()
    refused.close()
    for name, value in {"MASTER_ADDR": host, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match=r"PP-E709: only 1 of 2 ranks reached"):
        meet(OwnRank(0, 0, 2, 1), timedelta(seconds=1))
