"""pipeline.extra_warmup in a plan: bounded, priced, proved, and chosen where it is `auto`."""

import pytest
from unit_plan import equation, plan, refusal

from ppctl.config.schema import RunConfig
from ppctl.cost.activations import stage_activations
from ppctl.plan.memory import setting_of
from ppctl.plan.schedule_choice import CLOSE
from ppctl.schedule.simulate import in_flight
from ppctl.schedule.verify import verify


@pytest.mark.parametrize(("extra", "alive"), [(0, (4, 3, 2, 1)), (1, (5, 4, 3, 1)), (3, (7, 5, 3, 1))])
def test_the_plan_runs_and_prices_the_longer_warmup(extra: int, alive: tuple[int, ...]) -> None:
    textbook, made = plan(pp=4, gbs=16), plan(pp=4, gbs=16, pipeline__extra_warmup=extra)
    assert tuple(cost.in_flight for cost in made.pp_ranks) == alive == in_flight(made.schedule)
    assert verify(made.schedule) == []
    more = [a - b for a, b in zip(alive, (4, 3, 2, 1), strict=True)]
    grown = [
        cost.activation_bytes - before.activation_bytes
        for cost, before in zip(made.pp_ranks, textbook.pp_ranks, strict=True)
    ]
    setting = setting_of(RunConfig(), made.sizes, 1)
    one = [stage_activations(RunConfig().model, stage.layers, setting).kept for stage in made.stages]
    assert grown == [a * b for a, b in zip(more, one, strict=True)]


@pytest.mark.parametrize(
    "values",
    [
        dict(pp=4, pipeline__extra_warmup=4),
        dict(pp=4, pipeline__extra_warmup=-1),
        dict(pp=4, pipeline__extra_warmup=True),
        dict(pp=4, pipeline__extra_warmup="much"),
        dict(pp=1, pipeline__extra_warmup=1),
        dict(pp=4, pipeline__extra_warmup=1, pipeline__pp_schedule="gpipe"),
    ],
)
def test_what_cannot_take_effect_is_refused(values: dict[str, object]) -> None:
    assert refusal(**values) == ["PP-E215"]


LONG_MESSAGES = dict(
    pp=4, gbs=16, seq=32, launch__device="cpu", model__num_attention_heads=2, model__hidden_size=32,
    model__ffn_hidden_size=32, model__vocab_size=64, parallel__overlap_p2p_comm=True, parallel__batch_p2p_comm=False,
    parallel__batch_p2p_sync=False,
)  # fmt: skip
"""A narrow model: a message takes about as long as the layers between, and overlaps with them."""


def test_auto_takes_what_hides_the_messages_and_says_what_it_tried() -> None:
    made = plan(**LONG_MESSAGES, pipeline__extra_warmup="auto")
    text = equation(made, "extra_warmup")
    assert "0: " in text and "3: " in text and "messages of up to" in text
    chosen = next(d.value for d in made.derived if d.key == "extra_warmup")
    assert made.pp_ranks[0].in_flight == 4 + chosen > 4


def test_auto_spends_no_memory_where_messages_are_short_beside_compute() -> None:
    slow = plan(pp=4, gbs=16, pipeline__extra_warmup="auto", launch__device="cpu", seq=1024)
    assert [cost.in_flight for cost in slow.pp_ranks] == [4, 3, 2, 1]


def test_auto_stays_within_the_devices_memory() -> None:
    sizes = dict(LONG_MESSAGES, pipeline__extra_warmup="auto", launch__memory_reserve="3GiB")
    free = plan(**sizes)
    textbook = plan(**sizes | {"pipeline__extra_warmup": 0})
    limit = textbook.pp_ranks[0].peak_bytes + 1
    held = plan(**sizes, launch__device_memory=f"{limit + 3 * 2**30}B")
    assert max(cost.peak_bytes for cost in free.pp_ranks) > limit >= max(cost.peak_bytes for cost in held.pp_ranks)
    assert held.pp_ranks == textbook.pp_ranks
    assert held.problems == ()


@pytest.mark.parametrize("overlap", [False, True])
def test_auto_chooses_by_the_seconds_of_the_schedule_that_runs(overlap: bool) -> None:
    sizes = dict(LONG_MESSAGES, parallel__overlap_p2p_comm=overlap, parallel__batch_p2p_comm=not overlap)
    sizes["parallel__batch_p2p_sync"] = not overlap
    steps = [plan(**sizes, pipeline__extra_warmup=extra).step_time_s for extra in (0, 1, 2, 3)]
    assert plan(**sizes, pipeline__extra_warmup="auto").step_time_s <= CLOSE * min(steps)


def test_auto_counts_the_receives_that_are_posted_ahead() -> None:
    sizes = dict(LONG_MESSAGES, pipeline__extra_warmup="auto", launch__memory_reserve="3GiB")
    most = max(cost.peak_bytes for cost in plan(**sizes).pp_ranks)
    assert plan(**sizes, launch__device_memory=f"{most - 1 + 3 * 2**30}B").problems == ()


def test_auto_leaves_a_schedule_without_a_warmup_alone() -> None:
    made = plan(pp=4, pipeline__extra_warmup="auto", pipeline__pp_schedule="gpipe")
    assert equation(made, "extra_warmup").startswith("extra_warmup 0")


def test_a_warmup_that_hangs_is_told_with_the_ranks_that_wait_and_a_way_out() -> None:
    made = plan(pp=4, vpp=2, pipeline__extra_warmup=3)
    (problem,) = made.problems
    assert (problem.code, problem.remedy) == ("PP-E317", "pipeline.extra_warmup=auto")
    assert problem.place.count("<-- here") == 4
    assert plan(pp=4, vpp=2, pipeline__extra_warmup="auto").problems == ()
    assert plan(pp=4, vpp=2, pipeline__extra_warmup=3, pipeline__p2p_capacity=2).problems != ()
