"""How many connections a rank has: few in a world of many, and as many files as the machine allows."""

import os
import resource
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command import STARTED, TINY, alive, environment, only_run
from dense_runs import config_of
from ranks import run_ranks
from stores import sealed_store

from ppctl.comm.groups import gather_rows, make_group
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.parallel.axis_groups import AxisGroups
from ppctl.parallel.shard import reduce_sums, start_sending
from ppctl.plan.build import build_plan
from ppctl.rank.own_process import raise_file_limit
from ppctl.reach.first_contact import group_contacts
from ppctl.reach.start import join_world, warm_up
from ppctl.topology import ParallelSizes
from ppctl.train.session import build_session

CPU = torch.device("cpu")
_ESTABLISHED = "01"


def connections() -> int:
    """This process's TCP connections, as the kernel lists them: a line may come twice while others come and go."""
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return len({row[9] for row in rows if row[3] == _ESTABLISHED} & own)


def join():
    """Leave the test's own world, of which every rank knows every other one, and join one as a worker does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    before = connections()
    store = dist.PrefixStore("worker", store)
    join_world(store, rank, world, "gloo", timedelta(seconds=60))
    return store, before


def counted(mapping):
    """Connections of a rank more than at first: in the world, and after the warm-up of a session."""
    _, before = join()
    joined = connections() - before
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), CPU)
    warm_up(
        sealed_store(), config.launch, CPU, session.pipeline.communicator, session.groups, session.replica.ties.group
    )
    return joined, connections() - before


def test_a_rank_is_connected_with_its_neighbours_and_its_groups_but_not_with_the_world(tmp_path):
    (tmp_path / "corpus.txt").write_text("a stage and a rank " * 50)
    pp, dp = 2, 4
    mapping = to_mapping(config_of(tmp_path / "corpus.txt", pp=pp, vpp=1, m=2, dp=dp))
    told = run_ranks(counted, pp * dp, mapping)
    assert [joined for joined, _ in told] == [2] * 8, "the ring"
    ring = 2  # along dp
    groups = 2 * (pp - 1) + ring  # a pipeline's messages have connections of their own each way
    # Those beside rank 0 in the ring have that connection already. Rank 0 itself gathers from all.
    assert [after - groups for _, after in told] == [7, 2, 3, 3, 3, 3, 3, 2]


def opened_in_a_step(shards):
    """Connections that a rank opens along dp after the first messages: for the sums of gradients, and for the whole
    weights of shards."""
    join()
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = ParallelSizes(size, dp=size, edp=size)
    groups = AxisGroups.make(sizes, rank, experts=False, sequence_parallel=False, inner={})
    made = connections()
    for contact in group_contacts("dp", groups["dp"], CPU, exchanges=groups.exchanges("p2p", whole_rings=shards)["dp"]):
        contact.run()
    first = connections()
    whole, own = torch.ones(4 * size), [{each: range(4 * each, 4 * each + 4) for each in range(size)}]
    if shards:
        part = reduce_sums([whole], own, groups["dp"])()
        start_sending(part, own, torch.float32, groups["dp"])([whole])
    else:
        dist.all_reduce(whole, group=groups["dp"])
    assert whole.tolist() == [size] * 4 * size
    gather_rows([1.0], rank, [groups["dp"]])
    return first - made, connections() - first


@pytest.mark.whole
@pytest.mark.parametrize(("shards", "first"), [(False, 2), (True, 4)])
def test_a_step_opens_no_connection_along_dp_that_first_messages_have_not_tried(shards, first):
    """In training a rank that does not answer a new connection has no limit of gloo's. Shards need all of the group."""
    assert run_ranks(opened_in_a_step, 5, shards) == [(first, 0)] * 5


def sent_before_the_other_end_turns(groups):
    """Rank 1 turns to rank 0 only when rank 0 has gone on. In which groups a send would wait is a matter of chance."""
    store, _ = join()
    for number in range(groups):
        group = make_group([(0, 1)])
        if dist.get_rank() == 0:
            work = dist.isend(torch.ones(1), 1, group=group)
            store.set(f"sent {number}", "1")
            work.wait()
        else:
            store.wait([f"sent {number}"])
            dist.recv(torch.empty(1), 0, group=group)


def test_a_send_in_a_pipelines_group_does_not_wait_for_the_other_end():
    """The schedule sends and goes on computing: a group that connects on first use would hold the first send."""
    run_ranks(sent_before_the_other_end_turns, 2, 8, timeout=20)


def limits_before_and_after():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    raise_file_limit()
    return resource.getrlimit(resource.RLIMIT_NOFILE), hard


def test_the_limit_of_files_rises_to_the_hard_one():
    ((soft, hard), was), *_ = run_ranks(limits_before_and_after, 1)
    assert soft == hard == was


@pytest.mark.timeout(120)
def test_a_rank_starts_with_as_many_files_as_it_may_have(tmp_path):
    (tmp_path / "corpus.txt").write_text("one stage hands its bubble to the next " * 200)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    lower = f"import os, resource as r, sys; r.setrlimit(r.RLIMIT_NOFILE, (256, {hard}))"
    train = ("train", "+recipe=quickstart", *TINY, "pp=2", "vpp=1", "data.path=corpus.txt", "steps=100000")
    process = subprocess.Popen(
        [sys.executable, "-c", f"{lower}; os.execv(sys.argv[1], sys.argv[1:])", sys.executable, "-m", "ppctl", *train],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    STARTED.append(process)
    while not list(tmp_path.glob("runs/*/*/metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.1)
    ranks = alive(tmp_path)
    assert len(ranks) == 2
    for pid in ranks:
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)
    process.send_signal(signal.SIGTERM)
    process.wait()
    assert only_run(tmp_path)
