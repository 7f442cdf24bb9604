"""The first contact: every channel and group is touched and timed; what is dead is named, alike on every rank."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from command import FAULTS
from pipeline import P2P_MODES
from ranks import run_ranks

from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.reach.first_contact import FirstContact, channel_contacts, group_contacts
from ppctl.reach.hosts import DeadEdge

CPU = torch.device("cpu")
LIMIT = 4.0


def contacts(mode="channels"):
    config = SimpleNamespace(pipeline_dtype=torch.float32, virtual_pipeline_model_parallel_size=2, **P2P_MODES[mode])
    p2p = P2PCommunicator(dist.group.WORLD, config)
    return [*channel_contacts(p2p.ends, p2p.pp_group, CPU), *group_contacts("pp", p2p.pp_group, CPU)]


def first_contact():
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    return FirstContact(store, rank, dist.get_world_size(), f"host{rank}", 60.0)


def in_peace(mode):
    made = first_contact().make(contacts(mode), 30.0, lambda: None)
    assert all(0 < one.best_s <= one.first_s for one in made)
    return [(one.name, one.ranks) for one in made]


@pytest.mark.parametrize("mode", P2P_MODES)
@pytest.mark.parametrize("size", [2, 3])
def test_every_channel_and_every_group_is_touched(mode, size):
    told = run_ranks(in_peace, size, mode)
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    for name in ("edge of group pp", "group pp (cpu)"):
        assert any(name == each for each, _ in told[0])
    edges = {ranks for rows in told for name, ranks in rows if name == "edge of group pp"}
    assert edges == set(ring)
    channels = {name for rows in told for name, _ in rows if name.startswith("channel")}
    lanes = {f"channel {a}->{b} F" for a, b in ring} | {f"channel {b}->{a} B" for a, b in ring}
    assert channels == (set() if mode == "batched" else lanes)


def with_one_in_trouble(kind, rank, peer):
    """`kind` strikes `rank` when all have arrived, before the first touch."""
    sys.path.insert(0, str(FAULTS))
    from connections import go_deaf

    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    wanted = contacts()

    def strike():
        if dist.get_rank() != rank:
            return
        if kind == "deaf":
            assert go_deaf(pids[peer]) > 0
        else:  # for longer than the others have patience
            subprocess.Popen(["sh", "-c", f"sleep {LIMIT + 3}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        first_contact().make(wanted, LIMIT, strike)
    except DeadEdge as error:
        return error.problems[0]
    return None


@pytest.mark.parametrize(("rank", "peer"), [(1, 2), (0, 3)])
def test_a_dead_edge_is_named_with_both_ends(rank, peer):
    told = run_ranks(with_one_in_trouble, 4, "deaf", rank, peer)
    for problem in filter(None, told):
        assert problem.code == "PP-E707"
        assert f"rank {rank} on host{rank}" in problem.message
        assert f"rank {peer} on host{peer}" in problem.message
        assert problem.message.endswith("took longer than 4 s, and both are alive")
    assert told[rank] is not None


def test_a_rank_that_answers_nobody_is_named_alone():
    told = run_ranks(with_one_in_trouble, 3, "stop", 1, None)
    for problem in (told[0], told[2]):
        assert problem.message.startswith("rank 1 on host1 does not answer: channel ")
