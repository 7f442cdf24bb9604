"""`layout=auto`: the plan takes the fastest layout that fits, and says what it was held against."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit_plan import equation, plan

from ppctl.geometry.layers import count_of

WILD = json.loads((Path(__file__).parents[2] / "golden" / "layouts_in_the_wild.json").read_text())


def test_the_layers_that_the_loss_weighs_go_elsewhere() -> None:
    sizes = dict(pp=4, gbs=32, model__num_layers=16, model__vocab_size=6000, cost__device="cpu")
    made = plan(layout="auto", **sizes)
    counts = [count_of("decoder", stage.layers) for stage in made.stages]
    assert sum(counts) == 16
    assert counts[3] < min(counts[:3])
    told = equation(made, "layout")
    assert told.startswith(f"layout {made.layout} ")
    assert "next best" in told
    assert "even split Et*4|t*4|t*4|t*4L" in told


def test_chunks_come_from_vpp_or_from_what_the_schedule_needs() -> None:
    assert plan(layout="auto", pp=2, vpp=3).sizes.vpp == 3
    assert plan(layout="auto", pp=2, pipeline__pp_schedule="zbvzerobubble").sizes.vpp == 2
    assert plan(layout="auto", pp=1).layout == "Et*8L"


def test_it_stays_within_memory_where_a_layout_does() -> None:
    sizes = dict(pp=4, gbs=32, seq=4096, model__num_layers=16, launch__memory_reserve="10MiB")
    free = max(cost.peak_bytes for cost in plan(layout="auto", **sizes).pp_ranks)
    limit, reserve = int(0.9 * free), 10 * 2**20
    made = plan(layout="auto", launch__device_memory=str(limit + reserve), **sizes)
    assert not made.problems
    assert max(cost.peak_bytes for cost in made.pp_ranks) <= limit


COUNTED = {
    "what is computed again": dict(train__recompute_granularity="full"),
    "copies for sums": dict(dp=2),
    "weights that exist for a layer at a time": dict(
        dp=2, parallel__data_parallel_sharding="full", cost__stack="megatron", cost__device="h100"
    ),
    "hidden states of MTP layers": dict(model__mtp_num_layers=2),
}


@pytest.mark.parametrize("counted", COUNTED.values(), ids=COUNTED)
def test_it_counts_the_bytes_that_the_plan_counts(counted: dict) -> None:
    sizes = dict(counted, pp=4, gbs=8, model__num_layers=16, model__vocab_size=6000, launch__memory_reserve="0")
    free = plan(layout="auto", **sizes)
    peak = max(cost.peak_bytes for cost in free.pp_ranks)
    fitting = plan(layout="auto", launch__device_memory=str(peak), **sizes)
    smaller = plan(layout="auto", launch__device_memory=str(peak - 1), **sizes)
    assert fitting.layout == free.layout != smaller.layout
    assert not fitting.problems and not smaller.problems


def recorded() -> list[dict]:
    """Recorded layouts that Megatron accepts, one for each pipeline, of models that a plan can be made of."""
    kept = [row for row in WILD if row["checked"]["valid_mcore"] and isinstance(row["layout"], str)]
    return [row for row in kept if row["checked"]["stages"] % row["pp"] == 0]


def cases() -> list:
    """All of them, with a few that `make test` runs too."""
    named = [(f"{row['layout']}-pp{row['pp']}", row) for row in recorded()]
    return [
        pytest.param(row, id=name, marks=[] if i % 16 == 1 else [pytest.mark.whole])
        for i, (name, row) in enumerate(named)
    ]


@pytest.mark.parametrize("row", cases())
def test_no_recorded_layout_is_faster(row: dict) -> None:
    vpp = row["checked"]["stages"] // row["pp"]
    sizes = dict(
        pp=row["pp"], vpp=vpp, gbs=4 * row["pp"], mbs=1, model__num_layers=row["num_layers"],
        model__mtp_num_layers=row["mtp"], model__vocab_size=32000, seq=128,
    )  # fmt: skip
    assert plan(layout="auto", **sizes).step_time_s <= plan(layout=row["layout"], **sizes).step_time_s * (1 + 1e-9)
