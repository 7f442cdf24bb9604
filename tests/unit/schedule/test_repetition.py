"""What a schedule of many rounds is taken to be, of fewer rounds, is what it is as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

import pytest

from ppctl.cost.state import peaks
from ppctl.errors import ScheduleError
from ppctl.schedule.action import Channel, Schedule
from ppctl.schedule.batching import (
    _lists,
    _tried,
    batch_messages,
    place_gradient_sync,
    repetition,
    rounds,
    shorter,
    stretched,
)
from ppctl.schedule.executor import order_of
from ppctl.schedule.passes import run_weights_sooner, without_frozen
from ppctl.schedule.policies import POLICIES, make_schedule
from ppctl.schedule.simulate import Costs, attempted, bubble_of, computing, in_flight, timed, traced
from ppctl.schedule.trace import bubble_fraction, busy_time, step_time
from ppctl.schedule.verify import verify

NAMES = tuple(POLICIES)


def grid(name: str, most: int = 600) -> Iterator[Schedule]:
    """pp x vpp x m, and for what splits backwards also a limit on what is put off."""
    policy = POLICIES[name]
    for pp in (2, 3, 4, 8, 16)[: 4 + (most > 600)]:
        for vpp in (policy.chunks,) if policy.fixed else (1, 2, 3):
            for m in (2 * pp, 3 * pp + 1, 4 * pp, 6 * pp + 1, 9 * pp):
                if pp * vpp * m > most:
                    continue
                schedule = make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m)
                yield schedule
                if policy.splits:
                    yield run_weights_sooner(schedule, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_batched_by_its_rounds_is_the_one_batched_as_a_whole(name: str) -> None:
    for plain in grid(name):
        whole = _lists(place_gradient_sync(min(_tried(replace(plain, pairs=frozenset())), key=itemgetter(0))[1]))
        batched = batch_messages(plain)
        size = plain.placement, plain.num_microbatches
        assert batched == whole, size
        assert list(batched.capacities.items()) == list(whole.capacities.items()), size


def irregular(stages: int) -> Costs:
    """Seconds of which no two stages have the same, and whose sums are rounded."""
    prices = [[0.1 + (7 * stage + 3 * kind) % 11 / 7 for stage in range(stages)] for kind in range(5)]
    channels = {Channel(a, b, way): (a + 2 * b) % 5 / 9 for a in range(16) for b in range(16) for way in "FB"}
    return Costs(*prices, messages=channels)


@pytest.mark.parametrize(
    ("name", "most"),
    [(name, 150) for name in NAMES] + [pytest.param(name, 2500, marks=pytest.mark.whole) for name in NAMES],
)
def test_times_along_the_order_of_events_are_those_of_ranks_that_wait_to_the_last_bit(name: str, most: int) -> None:
    for plain in grid(name, most):
        costs = irregular(plain.placement.num_stages)
        for batched in (batch_messages(plain), without_frozen(batch_messages(plain), 1)):
            assert order_of(batched) is not None and order_of(replace(batched)) is None
            run = attempted(batched, costs)
            assert run == attempted(replace(batched), costs)
            trace = traced(batched, run)
            computed = computing(timed(batched), run)
            assert (run.seconds, bubble_of(computed, run)) == (step_time(trace), bubble_fraction(trace))
            assert [sum(row) for row in computed] == [busy_time(row) for row in trace.rows()]


def test_a_list_that_was_changed_follows_no_order_and_is_run_as_it_is() -> None:
    batched = batch_messages(make_schedule("1f1b", pp=2, num_microbatches=4))
    first, *others = batched.actions
    assert attempted(replace(batched, actions=(first[::-1], *others)), irregular(2)).stuck


def shortened(name: str) -> list[Schedule]:
    return [batched for batched in map(batch_messages, grid(name)) if shorter(batched) is not None]


@pytest.mark.parametrize(
    "name", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "v_half", "dualpipev"]
)
def test_the_proof_and_the_memory_of_the_rounds_are_those_of_the_whole(name: str) -> None:
    found = shortened(name)
    assert found
    for batched in found:
        for schedule in (batched, without_frozen(batched, 1)):
            assert verify(replace(schedule)) == verify(schedule) == []
            short = shorter(schedule)
            assert short is not None
            assert in_flight(short) == in_flight(schedule)
            kept = [1 + 7 * stage % 5 for stage in range(schedule.placement.num_stages)]
            for few, all_ in zip(short.actions, schedule.actions, strict=True):
                assert peaks(few, kept, kept) == peaks(all_, kept, kept)


def test_another_list_has_no_shorter_one_and_is_judged_as_it_is() -> None:
    batched = shortened("dualpipev")[0]
    row = batched.actions[0]
    wrong = replace(batched, actions=(row[::-1], *batched.actions[1:]))
    assert shorter(wrong) is None and verify(wrong)
    assert not verify(batched)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1", "v_min", "dualpipev"])
def test_rounds_can_be_left_out_and_put_in_again(name: str) -> None:
    for paired in grid(name):
        plain = replace(paired, pairs=frozenset())
        for size in {1, plain.placement.pp}:
            if (count := rounds(repetition(plain, size))) > 2:
                fewer = stretched(plain, size, 2 - count)
                assert fewer.num_microbatches == plain.num_microbatches - size * (count - 2)
                assert not verify(fewer)
                assert rounds(repetition(fewer, size)) != 2 or stretched(fewer, size, count - 2) == plain


def test_a_schedule_that_hangs_is_refused() -> None:
    plain = make_schedule("1f1b", pp=2, num_microbatches=16)
    with pytest.raises(ScheduleError, match="hangs"):
        batch_messages(replace(plain, actions=(plain.actions[0][::-1], plain.actions[1])))
