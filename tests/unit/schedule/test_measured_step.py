"""A traced step: its file, and ledgers whose rows add up to the step."""

import json

import pytest

from ppctl.schedule.action import Schedule
from ppctl.schedule.measured_step import MeasuredStep, RankStamps, ledgers, measured_costs, stage_changes
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import step_time


def measured(schedule: Schedule, tail: float = 0.0, costs: Costs | None = None) -> MeasuredStep:
    """A simulated step as ranks would have stamped it; each of them ends `tail` seconds after the one before."""
    trace = simulate(schedule, costs or Costs.uniform(schedule.placement.num_stages, message=0.25))
    index = [{action: at for at, action in enumerate(row)} for row in schedule.actions]
    last = max(span.end for span in trace.spans)
    ranks = [
        RankStamps(
            -0.5, last + 0.1, last + 0.2, last + 1.0 + tail * rank,
            [(index[rank][span.action], span.start, span.end) for span in trace.spans if span.pp_rank == rank],
        )
        for rank in range(len(schedule.actions))
    ]  # fmt: skip
    return MeasuredStep(7, tuple(ranks))


@pytest.mark.parametrize(("name", "vpp"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv_zero_bubble", 2), ("zb_h1", 1)])
def test_the_rows_add_up_to_the_step_and_compute_is_what_was_computed(name, vpp):
    schedule = lower(make_schedule(name, pp=4, vpp=vpp, num_microbatches=8))
    step = measured(schedule, tail=0.25)
    found = ledgers(step, schedule, range(4))
    whole = max(rank.end for rank in step.ranks) + 0.5
    for pp_rank, ledger in enumerate(found):
        assert ledger.total == pytest.approx(whole, rel=1e-12)
        assert ledger.compute == pytest.approx(8 * vpp * 3.0, rel=1e-12)
        assert pp_rank not in ledger.waiting
        assert ledger.others == pytest.approx(0.25 * (3 - pp_rank))
        assert all(seconds >= 0 for seconds in ledger.rows().values())


def test_a_rank_waits_for_the_one_that_makes_what_it_needs():
    schedule = lower(make_schedule("1f1b", pp=2, vpp=1, num_microbatches=1))
    first, second = ledgers(measured(schedule), schedule, range(2))
    # 0F0 from 0 to 1, its message until 1.25; 1F0 and 1B0 until 4.25; back until 4.5; 0B0 until 6.5.
    assert first.waiting == pytest.approx({1: 3.25})
    assert (first.messages, first.host, first.drain) == pytest.approx((0.25, 0.5, 0.0))
    assert second.waiting == pytest.approx({0: 1.5})
    assert (second.messages, second.drain) == pytest.approx((0.25, 2.25))
    assert (first.agreement, first.optimizer) == pytest.approx((0.2, 0.8))


def test_the_file_has_microseconds_since_the_first_rank_began():
    schedule = lower(make_schedule("1f1b", pp=2, vpp=1, num_microbatches=2))
    step = measured(schedule)
    record = json.loads(json.dumps(step.to_json()))
    again = MeasuredStep.from_json(record)
    assert (record["version"], again.step) == (1, 7)
    assert again.ranks[0].begin == 0.0
    assert again.to_json() == record
    spans = again.trace(schedule, range(2)).spans
    assert [str(span.action) for span in spans if span.pp_rank == 1] == [
        "1F0", "1B0", "1F1", "1B1", "1REDUCE_GRAD",
    ]  # fmt: skip
    assert spans[0].end - spans[0].start == pytest.approx(1.0)


def test_a_step_simulated_from_what_was_measured_is_the_step_and_shows_what_each_stage_would_change():
    schedule = lower(make_schedule("1f1b", pp=2, vpp=1, num_microbatches=8))
    costs = Costs((1.0, 2.0), (2.0, 4.0), message=0.25)
    trace = simulate(schedule, costs)
    found = measured_costs(trace, schedule)
    assert (list(found.forward), list(found.backward)) == ([1.0, 2.0], [2.0, 4.0])
    seconds, changes = stage_changes(schedule, found)
    assert seconds == pytest.approx(step_time(trace))
    slow, fast = changes[1], changes[0]
    assert slow.faster == pytest.approx(-8 * 0.6), "all microbatches of the slow stage are in the way"
    assert slow.slower == pytest.approx(8 * 0.6)
    assert -0.31 < fast.faster < 0 < fast.slower < 0.31, "one forward and one backward of the other stage"


@pytest.mark.parametrize("name", ["zb_h1", "zbv_zero_bubble", "interleaved_1f1b"])
def test_halves_of_backwards_are_priced_apart(name):
    vpp = 1 if name == "zb_h1" else 2
    schedule = lower(make_schedule(name, pp=2, vpp=vpp, num_microbatches=4))
    stages = schedule.placement.num_stages
    costs = Costs((1.0,) * stages, (3.0,) * stages, (2.0,) * stages, (1.0,) * stages, message=0.25)
    trace = simulate(schedule, costs)
    seconds, changes = stage_changes(schedule, measured_costs(trace, schedule))
    assert seconds == pytest.approx(step_time(trace), rel=0.02)
    assert all(change.backward == pytest.approx(3.0) for change in changes)


@pytest.mark.parametrize(("name", "vpp"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1)])
def test_a_slow_stage_is_the_one_that_its_neighbours_wait_for_and_the_one_to_make_faster(name, vpp):
    schedule, slow = lower(make_schedule(name, pp=4, vpp=vpp, num_microbatches=8)), 2
    stages = schedule.placement.num_stages
    forward, split = ([each * (5 if s == slow else 1) for s in range(stages)] for each in (1.0, 1.0))
    costs = Costs(forward, [2 * each for each in split], split, split, message=0.01)
    step = measured(schedule, costs=costs)
    found = ledgers(step, schedule, range(4))
    for neighbour in (1, 3):
        assert max(found[neighbour].waiting, key=found[neighbour].waiting.__getitem__) == slow
    _, changes = stage_changes(schedule, measured_costs(step.trace(schedule, range(4)), schedule))
    assert min(changes, key=lambda change: change.faster).stage == slow
    assert max(changes, key=lambda change: change.slower).stage == slow
