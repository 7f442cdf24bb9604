"""Megatron's warm-up counts under their public name (the tables' vectors are unit/schedule's)."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppctl import get_pp_rank_microbatches
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.sync_events import forwards_in_flight

RECORDS = json.loads((Path(__file__).parents[2] / "golden" / "schedule.json").read_text())["records"]


def of(name):
    return [record for record in RECORDS if record["fn"] == name and record["ok"]]


def communicator(rank, size, vpp):
    """All that the function may read of a communicator."""
    group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    return SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=vpp)


def test_every_rank_counts_its_warmup_as_the_original():
    for record in of("get_pp_rank_microbatches"):
        arguments = dict(record["args"])
        size, vpp = arguments.pop("pp_size"), arguments.pop("virtual_pipeline_model_parallel_size")
        got = [
            list(get_pp_rank_microbatches(**arguments, p2p_communicator=communicator(rank, size, vpp)))
            for rank in range(size)
        ]
        assert got == record["result_per_pp_rank[total,all_in_warmup,num_warmup,num_remaining]"], record["args"]


def test_without_a_communicator_and_a_world_there_is_one_rank():
    assert get_pp_rank_microbatches(6, 2, 2) == (12, False, 0, 12)
    assert get_pp_rank_microbatches(6, 2, 2, True) == (12, True, 12, 0)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_the_first_backward_ends_the_warmup_whether_it_is_split_or_whole(name):
    schedule = make_schedule(name, pp=4, num_microbatches=8)
    assert [forwards_in_flight(row) for row in schedule.actions] == [4, 3, 2, 1]
