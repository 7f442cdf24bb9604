"""The policies against what Megatron-core does (its traces: test_sync.py), and against their own promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ppctl.config.keys import docstring, text_keys
from ppctl.errors import ScheduleError
from ppctl.schedule.action import BACKWARDS, Op
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import POLICIES, Policy, make_schedule
from ppctl.schedule.schedule_table import convert_schedule_table_to_order, get_schedule_table, warmup_counts
from ppctl.schedule.simulate import Costs, in_flight, simulate
from ppctl.schedule.trace import step_time
from ppctl.schedule.verify import verify

GOLDEN = Path(__file__).parents[2] / "golden"
RECORDS = json.loads((GOLDEN / "schedule.json").read_text())["records"]


def _of(function: str) -> list[dict]:
    return [record for record in RECORDS if record["fn"] == function]


def test_every_golden_record_is_looked_at() -> None:
    looked_at = {"get_schedule_table", "convert_schedule_table_to_order", "get_pp_rank_microbatches"}
    assert {record["fn"] for record in RECORDS} == looked_at


def test_schedule_tables_are_megatrons() -> None:
    for record in _of("get_schedule_table"):
        table = get_schedule_table(**record["args"])
        assert [mb for mb, _ in table] == record["result"]["microbatch_id"], record["args"]
        assert [chunk for _, chunk in table] == record["result"]["model_chunk_id"], record["args"]


def test_orders_are_megatrons() -> None:
    for record in _of("convert_schedule_table_to_order"):
        args = dict(record["args"])
        table = get_schedule_table(**args.pop("schedule_table_of"))
        assert convert_schedule_table_to_order(**args, schedule_table=table) == record["result"], record["args"]


def test_warmup_counts_are_megatrons() -> None:
    for record in _of("get_pp_rank_microbatches"):
        args = dict(record["args"])
        pp, virtual = args.pop("pp_size"), args.pop("virtual_pipeline_model_parallel_size")
        counts = [list(warmup_counts(pp, rank, **args, interleaved=virtual is not None)) for rank in range(pp)]
        assert counts == record["result_per_pp_rank[total,all_in_warmup,num_warmup,num_remaining]"], record["args"]


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("vpp", [1, 2, 3, 4])
def test_where_megatron_runs_the_order_is_its_formula(pp: int, vpp: int) -> None:
    for m in range(pp, 4 * pp + 1):
        for group in (g for g in range(pp, m + 1) if m % g == 0 or m % g >= pp):
            schedule = make_schedule(
                "interleaved_1f1b", pp=pp, vpp=vpp, num_microbatches=m, microbatch_group_size=group
            )
            table = get_schedule_table(m, vpp, group)
            for rank, row in enumerate(schedule.actions):
                warmup = min(2 * (pp - rank - 1) + (vpp - 1) * group, m * vpp)
                forwards = [("F", chunk * pp + rank, mb) for mb, chunk in table]
                backwards = [("B", (vpp - 1 - chunk) * pp + rank, mb) for mb, chunk in table]
                order = forwards[:warmup]
                for number in range(m * vpp - warmup):
                    order += [forwards[warmup + number], backwards[number]]
                assert list(row) == order + backwards[m * vpp - warmup :]


@pytest.mark.parametrize("name", [policy.name for policy in POLICIES.values() if not policy.splits])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_one_rank_is_a_pipeline_too(name: str, m: int) -> None:
    for vpp in (1,) if name == "1f1b" else (1, 2, 3):
        schedule = make_schedule(name, pp=1, vpp=vpp, num_microbatches=m)
        assert verify(schedule) == []


def test_few_microbatches_make_a_short_1f1b() -> None:
    rows = make_schedule("1f1b", pp=4, num_microbatches=2).to_csv().splitlines()
    assert rows == ["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1", "2F0,2F1,2B0,2B1", "3F0,3B0,3F1,3B1"]


@pytest.mark.parametrize(("pp", "vpp", "m", "group"), [(16, 2, 120, 16), (4, 3, 5, 4), (3, 2, 4, 3), (5, 4, 13, 6)])
def test_a_short_last_group_is_a_full_one_less_what_does_not_exist(pp: int, vpp: int, m: int, group: int) -> None:
    filled = m - m % group + pp
    short = make_schedule("interleaved_1f1b", pp=pp, vpp=vpp, num_microbatches=m, microbatch_group_size=group)
    full = make_schedule("interleaved_1f1b", pp=pp, vpp=vpp, num_microbatches=filled, microbatch_group_size=group)
    assert short.actions == tuple(tuple(action for action in row if action.mb < m) for row in full.actions)
    assert verify(short) == []


def test_backwards_of_a_stage_run_in_microbatch_order() -> None:
    for name in ("gpipe", "1f1b", "interleaved_1f1b"):
        schedule = make_schedule(name, pp=4, vpp=1 if name == "1f1b" else 3, num_microbatches=9)
        for row in schedule.actions:
            for stage in {action.stage for action in row}:
                backwards = [action.mb for action in row if action.op is Op.B and action.stage == stage]
                assert backwards == list(range(9))


@pytest.mark.parametrize(
    ("name", "sizes", "codes"),
    [
        ("1f1b", {"pp": 0, "num_microbatches": 0}, ["PP-E304", "PP-E304"]),
        ("zigzag", {"pp": 2, "num_microbatches": 4}, ["PP-E304"]),
        ("1f1b", {"pp": 2, "vpp": 2, "num_microbatches": 4}, ["PP-E305"]),
        ("zb_h1", {"pp": 2, "vpp": 2, "num_microbatches": 4}, ["PP-E305"]),
        ("zbv_zero_bubble", {"pp": 2, "vpp": 3, "num_microbatches": 4}, ["PP-E305"]),
        ("interleaved_1f1b", {"pp": 4, "vpp": 2, "num_microbatches": 8, "microbatch_group_size": 3}, ["PP-E306"]),
        ("interleaved_1f1b", {"pp": 4, "vpp": 2, "num_microbatches": 8, "microbatch_group_size": -1}, ["PP-E304"]),
    ],
)
def test_impossible_sizes_are_refused(name: str, sizes: dict[str, int], codes: list[str]) -> None:
    with pytest.raises(ScheduleError) as caught:
        make_schedule(name, **sizes)
    assert [problem.code for problem in caught.value.problems] == codes


def test_every_row_tells_what_its_policy_does() -> None:
    for name, policy in POLICIES.items():
        schedule = make_schedule(name, pp=3, vpp=policy.chunks, num_microbatches=9)
        ops = {action.op for row in schedule.actions for action in row}
        assert (schedule.name, schedule.placement.kind) == (name, policy.placement)
        assert (bool(ops & BACKWARDS), bool(schedule.split)) == (policy.trains, policy.splits)
        for vpp in range(1, 5):
            try:
                assert make_schedule(name, pp=3, vpp=vpp, num_microbatches=9).placement.num_stages == 3 * vpp
                assert policy.runs(vpp)
            except ScheduleError as refusal:
                assert not policy.runs(vpp)
                assert [problem.code for problem in refusal.problems] == ["PP-E305"]
                for_more = policy.for_more_chunks
                assert not for_more or POLICIES[for_more].runs(vpp)
        try:
            longer = make_schedule(name, pp=3, vpp=policy.chunks, num_microbatches=9, extra_warmup=1)
            assert policy.extra_warmup
            assert longer.actions != schedule.actions
        except ScheduleError:
            assert not policy.extra_warmup
        many = make_schedule(name, pp=3, vpp=policy.chunks, num_microbatches=36)
        assert not policy.settles or in_flight(many) == in_flight(schedule)


def test_no_two_policies_have_a_name_in_common() -> None:
    names = [each.lower() for policy in POLICIES.values() for each in (policy.name, *policy.other_names)]
    assert len(names) == len({*names})


def test_a_misspelt_name_gets_the_near_one() -> None:
    with pytest.raises(ScheduleError, match=r"pipeline\.pp_schedule=interleaved_1f1b"):
        make_schedule("interleaved1f1b", pp=2, num_microbatches=2)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_an_extra_warmup_runs_that_many_more_forwards_ahead_but_one_per_rank_behind_at_most(pp: int) -> None:
    for m in (1, pp, 3 * pp):
        plain = in_flight(make_schedule("1f1b", pp=pp, num_microbatches=m))
        for extra in range(pp):
            schedule = make_schedule("1f1b", pp=pp, num_microbatches=m, extra_warmup=extra)
            assert verify(schedule) == [] == verify(lower(schedule))
            assert in_flight(schedule) == tuple(
                min(m, count + min(extra, pp - 1 - r)) if m >= pp else count for r, count in enumerate(plain)
            )


@pytest.mark.parametrize(
    ("message", "textbook", "eager"),
    [
        (0.4, 0.981, 0.996),
        (0.6, 0.971, 0.994),
        (1, 0.953, 0.990),
        (2, 0.911, 0.979),
        (6.5, 0.758, 0.936),
        (9, 0.693, 0.913),
    ],
)
def test_an_extra_warmup_hides_messages_as_an_event_model_says(message: float, textbook: float, eager: float) -> None:
    """Efficiency against (m + p - 1)(tf + tb), p = 4, m = 16, tf = 10, tb = 20."""
    costs = Costs.uniform(4, 10, 20, message)
    for extra, expected in ((0, textbook), (3, eager)):
        schedule = lower(make_schedule("1f1b", pp=4, num_microbatches=16, extra_warmup=extra))
        assert 19 * 30 / step_time(simulate(schedule, costs)) == pytest.approx(expected, abs=0.0006)


@pytest.mark.parametrize("group", [4, 5, 8])
@pytest.mark.parametrize("m", [4, 5, 9, 16])
def test_an_interleaved_pipeline_has_room_for_one_more(m: int, group: int) -> None:
    for extra in (1, 2):
        schedule = make_schedule(
            "interleaved_1f1b", pp=4, vpp=2, num_microbatches=m, microbatch_group_size=group, extra_warmup=extra
        )
        assert verify(lower(schedule)) == []


@pytest.mark.parametrize(("name", "extra"), [("1f1b", 4), ("1f1b", -1), ("gpipe", 1), ("forward_only", 1)])
def test_an_extra_warmup_that_no_rank_can_use_is_refused(name: str, extra: int) -> None:
    with pytest.raises(ScheduleError, match="extra_warmup"):
        make_schedule(name, pp=4, num_microbatches=8, extra_warmup=extra)


def test_an_empty_table_has_no_order():
    with pytest.raises(ValueError, match="PP-E304: an empty schedule table"):
        convert_schedule_table_to_order(0, 1, [])


@pytest.mark.parametrize(
    "policy", [policy for policy in POLICIES.values() if policy.trains], ids=lambda each: each.name
)
def test_the_key_names_every_schedule_that_a_run_may_ask_for(policy: Policy) -> None:
    whole, _, split = docstring(text_keys()["pipeline.pp_schedule"]).partition("split")
    assert re.search(rf"\b{policy.name}\b", split if policy.splits else whole)
