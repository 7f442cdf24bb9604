"""The first contact: every channel and group is touched and timed; what is dead is named, alike on every rank."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from axis_runs import config_of
from command import FAULTS
from pipeline import P2P_MODES
from ranks import RanksFailed, run_ranks
from stores import sealed_store

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.parallel.axis_groups import AxisGroups
from ppctl.plan.build import build_plan
from ppctl.reach.first_contact import FirstContact, channel_contacts, group_contacts
from ppctl.reach.hosts import DeadEdge
from ppctl.reach.start import warm_up
from ppctl.topology import ParallelSizes
from ppctl.train.session import build_session

CPU = torch.device("cpu")
LIMIT = 4.0


def contacts(mode="channels"):
    config = SimpleNamespace(pipeline_dtype=torch.float32, virtual_pipeline_model_parallel_size=2, **P2P_MODES[mode])
    p2p = P2PCommunicator(dist.group.WORLD, config)
    return [*channel_contacts(p2p.ends, p2p.pp_group, CPU), *group_contacts("pp", p2p.pp_group, CPU)]


def first_contact():
    rank = dist.get_rank()
    return FirstContact(sealed_store(), rank, dist.get_world_size(), f"host{rank}", 60.0)


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
    assert channels == lanes


def axes_of_a_session(mapping):
    """What rank 0 writes into edges.json, of a session with these axes."""
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config), dist.get_rank(), CPU)
    record = warm_up(
        sealed_store(),
        config.launch,
        CPU,
        session.pipeline.communicator,
        session.groups,
        exchanges=session.groups.exchanges(config.model.cp_comm_type),
    )
    session.pipeline.close()
    return record


def test_the_groups_of_every_axis_are_touched_and_timed():
    """tp 2, cp 4 in two levels, ep 2, etp 2 and so edp 2, of 8 ranks."""
    config = config_of("experts", tp=2, sp=True, cp=4, ep=2, ways="a2a+p2p", levels=[2, 2])
    record, *_ = run_ranks(axes_of_a_session, 8, to_mapping(config), timeout=90)
    touched = {}
    for contact in record["contacts"]:
        assert 0 < contact["best_s"] <= contact["first_s"]
        if contact["name"].startswith("group "):
            touched.setdefault(contact["name"], set()).add(contact["ranks"])
    pairs = {(rank, rank + 1) for rank in range(0, 8, 2)}
    fours = {(0, 2, 4, 6), (1, 3, 5, 7)}
    assert touched == {
        "group tp (cpu)": pairs,
        "group etp (cpu)": pairs,
        "group cp (cpu)": fours,
        "group cp-dp (cpu)": fours,
        "group cp-inner (cpu)": {(0, 2), (4, 6), (1, 3), (5, 7)},
        "group cp-outer (cpu)": {(0, 4), (2, 6), (1, 5), (3, 7)},
        "group ep (cpu)": {(0, 2), (1, 3), (4, 6), (5, 7)},
        "group edp (cpu)": {(0, 4), (1, 5), (2, 6), (3, 7)},
        "group world (cpu)": {tuple(range(8))},
        "group cp-inner (cpu), all to all": {(0, 2), (4, 6), (1, 3), (5, 7)},
        "group cp-outer (cpu), round": {(0, 4), (2, 6), (1, 5), (3, 7)},
        "group ep (cpu), all to all": {(0, 2), (1, 3), (4, 6), (5, 7)},
        "group etp (cpu), all to all": pairs,
    }


def groups_of_axes(*axes):
    """Contacts of tp 2 x dp 2."""
    sizes = ParallelSizes(4, tp=2, dp=2, edp=4)
    groups = AxisGroups.make(sizes, dist.get_rank(), experts=False, sequence_parallel=False, inner={})
    return [contact for axis in axes for contact in group_contacts(axis, groups[axis], CPU)]


def with_one_in_trouble(kind, rank, peer, axes=()):
    """`kind` strikes `rank` when all have arrived, before the first touch."""
    sys.path.insert(0, str(FAULTS))
    from connections import go_deaf, hear_no_newcomer

    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    wanted = groups_of_axes(*axes) if axes else contacts()

    def strike():
        if kind == "cut off" and dist.get_rank() in (rank, peer):  # whichever of the two connects
            assert hear_no_newcomer() > 0
            store = sealed_store().plain
            store.add("deaf", 1)
            while store.add("deaf", 0) < 2:  # else one may have connected before the other heard nobody
                time.sleep(0.01)
        if dist.get_rank() != rank:
            return
        if kind == "deaf":
            assert go_deaf(pids[peer]) > 0
        elif kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":  # for longer than the others have patience
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


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp")])
def test_a_dead_edge_of_a_tensor_parallel_group_is_named_with_both_hosts(axes):
    """Also by those that wait in another axis' group for one of its ranks."""
    found = run_ranks(with_one_in_trouble, 4, "deaf", 2, 3, axes)
    assert any(found)
    for problem in filter(None, found):
        assert problem.code == "PP-E707"
        assert problem.message in (
            "rank 2 on host2 does not reach rank 3 on host3: edge of group tp took longer than 4 s, and both are alive",
            "rank 3 on host3 does not reach rank 2 on host2: edge of group tp took longer than 4 s, and both are alive",
        )
    assert found[2] is not None


@pytest.mark.whole
@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp")])
def test_ranks_along_dp_that_cannot_connect_on_first_use_are_named_in_time(axes):
    """Their group was made without any message between them; all others wait for one of the two."""
    began = time.monotonic()
    found = run_ranks(with_one_in_trouble, 4, "cut off", 1, 3, axes)
    assert time.monotonic() - began < 3 * LIMIT
    assert found[1] is not None and found[3] is not None
    for problem in filter(None, found):
        assert problem.code == "PP-E707"
        assert "edge of group dp" in problem.message and problem.message.endswith("and both are alive")
        assert "rank 1 on host1" in problem.message and "rank 3 on host3" in problem.message


def raising(*words):
    problem = with_one_in_trouble(*words)
    if problem is not None:
        raise DeadEdge(problem)


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["stop", "kill"])
def test_a_rank_that_is_lost_between_the_making_of_groups_and_their_first_use_is_named_in_time(kind):
    """`kill` breaks what is connected; along dp nothing is yet."""
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(raising, 4, kind, 3, None, ("dp", "tp"))
    assert time.monotonic() - began < 20
    told = {failure.rank: failure.message for failure in caught.value.failures if failure.kind == "DeadEdge"}
    assert told[1].startswith("PP-E707: rank 3 on host3 does not answer: edge of group dp ")
    assert all("rank 3 on host3 does not answer" in message for message in told.values())


def test_a_rank_that_answers_nobody_is_named_alone():
    told = run_ranks(with_one_in_trouble, 3, "stop", 1, None)
    for problem in (told[0], told[2]):
        assert problem.message.startswith("rank 1 on host1 does not answer: channel ")
