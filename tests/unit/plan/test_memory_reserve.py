"""What a plan leaves free of a device for CUDA's context and communicators, and how little is called tight."""

from __future__ import annotations

import json

import pytest
from unit_plan import config_values, plan

from ppctl.cli.console import prose
from ppctl.cli.plan_text import limit_line
from ppctl.plan import Plan
from ppctl.plan.memory_limit import CONTEXT, GIB, MIB, PAIR, RING, communicators, memory_violations, reserve_bytes
from ppctl.plan.types import DeviceLimit, RankCost
from ppctl.topology import ParallelSizes

ONE = ParallelSizes(1)
CARD = 80 * GIB.size


def codes(peak: int, **launch: object) -> list[str]:
    """The problems of one rank that needs `peak` bytes."""
    values = config_values(**{f"launch__{key}": value for key, value in launch.items()})
    return [found.code for found in memory_violations(values, ONE, lambda: [RankCost(0, 1, 0, 0, 0, 0, peak, 1)])]


@pytest.mark.parametrize(
    ("share", "launch", "expected"),
    [
        (0.999, {}, ["PP-E801"]),
        (0.979, {}, []),
        (0.999, {"device": "cpu"}, []),
        (0.999, {"memory_reserve": "0B"}, []),
        (0.979, {"memory_reserve": "2GiB"}, ["PP-E801"]),
        (0.979, {"device": "any"}, []),
        (0.999, {"device": "any"}, ["PP-E801"]),
    ],
)
def test_a_plan_that_fills_a_card_leaves_no_room_for_what_torch_does_not_allocate(share, launch, expected) -> None:
    assert codes(int(share * CARD), device_memory="80GiB", **launch) == expected


def test_the_reserve_is_the_last_byte_that_decides() -> None:
    assert codes(CARD - CONTEXT, device_memory="80GiB") == []
    assert codes(CARD - CONTEXT + 1, device_memory="80GiB") == ["PP-E801"]


MESSAGES = 8 * 4 * 12 * MIB
CHANNELS = {"launch__transport": "channels"}


TO_A_PEER = 32 * 12 * MIB
NETWORK = 512 * MIB
EXPERTS = {"model__num_moe_experts": 16}


@pytest.mark.parametrize(
    ("sizes", "typed", "expected"),
    [
        (ONE, {}, 0),
        (ParallelSizes(2, dp=2, edp=2), {}, PAIR),
        # Plain messages go to both neighbours over the pipeline's own group, whatever its size.
        (ParallelSizes(2, pp=2), {}, PAIR + TO_A_PEER),
        (ParallelSizes(8, pp=4, vpp=3, dp=2, edp=2), {}, RING + PAIR + 2 * TO_A_PEER),
        (ParallelSizes(2, pp=2), CHANNELS, PAIR + MESSAGES),
        (ParallelSizes(8, pp=4, vpp=3, dp=2, edp=2), CHANNELS, RING + PAIR + MESSAGES),
        # Tied weights, and those of MTP modules, have a group of the ranks that hold them.
        (ParallelSizes(2, pp=2), {"model__share_embeddings_and_output_weights": True}, 2 * PAIR + TO_A_PEER),
        (ParallelSizes(2, pp=2), {"model__mtp_num_layers": 1}, 2 * PAIR + TO_A_PEER),
        # dp, ep and edp; rows to experts go to every rank of ep.
        (ParallelSizes(4, dp=4, ep=4), EXPERTS, 2 * RING + 3 * TO_A_PEER),
        (ParallelSizes(8, dp=8, ep=8), EXPERTS, 2 * RING + 7 * TO_A_PEER),
        (ParallelSizes(32, dp=32, ep=16, edp=2), EXPERTS, 2 * RING + PAIR + 7 * TO_A_PEER + NETWORK),
        # dp, cp and both together.
        (ParallelSizes(8, dp=4, cp=2, edp=8), {}, RING + PAIR + RING + TO_A_PEER),
        (ParallelSizes(4, cp=4, edp=4), {}, 2 * RING + 2 * TO_A_PEER),
        (ParallelSizes(4, cp=4, edp=4), {"model__cp_comm_type": "a2a"}, 2 * RING + 3 * TO_A_PEER),
        (ParallelSizes(4, cp=4, edp=4), {"model__cp_comm_type": "all_gather"}, 2 * RING),
        (
            ParallelSizes(4, cp=4, edp=4),
            {"model__cp_comm_type": "a2a+p2p", "parallel__hierarchical_context_parallel_sizes": [2, 2]},
            2 * RING + 2 * PAIR + 2 * TO_A_PEER,
        ),
        # A dense model has no groups of experts, whatever their sizes are.
        (ParallelSizes(8, tp=8, etp=8), {}, RING),
        # tp and etp; between ranks that divide experts, rows go to every one.
        (ParallelSizes(4, tp=4, etp=4), EXPERTS, 2 * RING + 3 * TO_A_PEER),
        (ParallelSizes(4, tp=4, edp=4), EXPERTS, 2 * RING),
    ],
)
def test_every_group_of_several_ranks_takes_its_buffers(sizes: ParallelSizes, typed, expected: int) -> None:
    assert communicators(config_values(**typed).config, sizes) == expected


@pytest.mark.parametrize(
    ("typed", "ranks", "share"),
    [
        (dict(pp=4), 4, 20),
        (dict(pp=4, nodes=2, gpus_per_node=2), 2, 40),
        (dict(pp=4, nodes=2), 2, 40),
    ],
)
def test_ranks_that_share_a_device_share_its_memory(typed, ranks, share) -> None:
    made = plan(**typed, launch__share_gpu=True, launch__device_memory="80GiB")
    assert made.limit == DeviceLimit(share * GIB.size, CONTEXT, ranks)
    assert made.problems == ()


def test_a_remedy_for_a_shared_device_counts_every_rank() -> None:
    held = dict(pp=2, mbs=4, seq=512, launch__share_gpu=True)
    peak = max(cost.peak_bytes for cost in plan(**held).pp_ranks)
    (problem,) = plan(**held, launch__device_memory=str(2 * (peak + CONTEXT) - 2)).problems
    assert "2 ranks share" in problem.message
    assert "launch.share_gpu=false" in problem.remedy
    assert plan(**held, launch__device_memory=str(2 * (peak + CONTEXT))).problems == ()


def test_a_reserve_of_the_users_that_leaves_too_little_is_what_to_change() -> None:
    (problem,) = plan(pp=2, launch__device_memory="8GiB", launch__memory_reserve="8GiB").problems
    assert problem.remedy.splitlines()[0] == "launch.memory_reserve=auto"


def test_within_five_percent_is_tight_in_text_and_json() -> None:
    peak = max(cost.peak_bytes for cost in plan(pp=2).pp_ranks)
    for share, tight in ((0.951, True), (1.0, True), (0.949, False), (1.01, False)):
        limit = int(peak / share)
        made = plan(pp=2, launch__device_memory=str(limit + MIB), launch__memory_reserve="1MiB")
        assert made.tight is tight
        report = made.report()
        assert (report["limit_bytes"], report["reserve_bytes"], report["tight"]) == (limit + MIB, MIB, tight)
        assert ("tight" in prose(limit_line(made), 1000)) is tight
        assert f"{peak / limit:.1%} of it is used" in prose(limit_line(made), 1000)
    free = plan(pp=2)
    assert (free.tight, free.report()["limit_bytes"], limit_line(free)) == (False, None, [])


def test_a_limit_is_no_part_of_what_is_run_and_a_plan_without_one_is_read() -> None:
    made, other = (plan(pp=2, launch__device_memory=size) for size in ("80GiB", "90GiB"))
    assert made.digest == other.digest
    data = made.to_json()
    assert Plan.from_json(json.loads(json.dumps(data))) == made
    for key in ("limit_bytes", "reserve_bytes", "ranks_per_device", "tight"):
        del data[key]
    assert Plan.from_json(data).limit is None


def test_what_is_no_amount_of_memory_is_refused_by_name() -> None:
    assert [problem.code for problem in plan(launch__memory_reserve="some", launch__device_memory="1TiB").problems] == [
        "PP-E103"
    ]
    assert reserve_bytes(config_values(launch__memory_reserve="1.5GiB").config, ONE) == 3 * 2**29
    assert RING > PAIR
