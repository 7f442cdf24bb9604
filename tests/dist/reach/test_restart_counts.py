"""What a start asks and opens grows with the number of ranks; hosts try a logarithm of their number (decision 28)."""

from __future__ import annotations

import math
import resource
from collections import Counter

import pytest
from restart_counts import agent_counts, group_counts, mesh, phases, rendezvous_counts, ring

from ppctl.rank.own_process import raise_file_limit

PER_NODE, PP = 2, 4  # many hosts of few ranks


def most_tried(hosts: int, pp: int) -> int:
    """The most connections of all hosts: each tries those of its pipelines, its neighbours along dp, those 1, 2, 4, 8
    and so on after it, and rank 0's, which tries all."""
    return (hosts - 1) * (pp - 1 + 2 + math.ceil(math.log2(hosts)) + 1) + hosts - 1


def test_four_times_as_many_ranks_ask_and_open_four_times_as_much() -> None:
    few, many = phases(64, PER_NODE, PP), phases(256, PER_NODE, PP)
    grown = {(name, key) for name in few for key in ("requests", "connections", "most_requests", "most_connections")
             if getattr(many[name], key) > 4.6 * max(8, getattr(few[name], key))}  # fmt: skip
    assert grown <= {("roll call", "connections")}, "only these with a logarithm"
    hosts = 256 // PER_NODE
    assert many["roll call"].connections <= most_tried(hosts, PP) < hosts * (hosts - 1) / 8
    assert many["roll call"].most_connections == hosts - 1, "rank 0's host"
    assert many["first messages"].connections == 255


def test_a_rank_asks_for_a_constant_number_of_values_whatever_the_number_of_ranks() -> None:
    for name, each in rendezvous_counts(128, 8).items():
        without_looks = [Counter({key: number for key, number in one.items() if key != "check"}) for one in each]
        others = {
            one.total() - one["bytes"] - one["connections"] for one in without_looks[8:] if not one["connections"]
        }
        assert max(others) <= 7, name


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_group_of_gloo_is_a_mesh_and_one_that_connects_on_first_use_a_ring(ranks: int) -> None:
    each, connections = group_counts(ranks)
    expected = mesh(ranks)
    assert connections == ranks * (ranks - 1) // 2
    assert all(one[key] == expected[key] for one in each for key in ("set", "get", "wait", "bytes"))
    each, connections = group_counts(ranks, lazily=True)
    expected = ring(ranks)
    assert connections == (ranks if ranks > 2 else 1)
    assert all(one[key] == expected[key] for one in each for key in ("set", "get", "wait", "bytes"))


def test_torchs_agents_ask_more_often_the_more_they_are_only_where_they_write_at_once() -> None:
    few, many = (sum(agent_counts(hosts), Counter()) for hosts in (4, 16))
    assert many["get"] <= 5 * few["get"] and many["compare_set"] <= 8 * few["compare_set"]


def assert_a_start_asks_little(ranks: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    found = phases(ranks)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found["roll call"].most_requests < 2 * ranks
    assert found["roll call"].connections <= most_tried(ranks // 8, 16)
    assert found["groups"].most_requests < 80
    assert found["rendezvous"].requests + found["the run"].requests + found["roll call"].requests < 16 * ranks


@pytest.mark.whole
def test_a_start_of_512_ranks() -> None:
    assert_a_start_asks_little(512)


@pytest.mark.soak
@pytest.mark.timeout(480)
def test_a_start_of_2048_ranks() -> None:
    """A thread each: five minutes of a core."""
    assert_a_start_asks_little(2048)
