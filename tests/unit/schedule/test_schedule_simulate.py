"""Predicted time and memory against closed forms, a published table and measured transport."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from schedule_sizes import made, sample, v_shaped

from ppctl.errors import ScheduleError
from ppctl.schedule.action import Action, Channel, Op, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import Costs, in_flight, simulate
from ppctl.schedule.trace import Span, Trace, bubble_fraction, step_time

PAPER = json.loads((Path(__file__).parents[2] / "golden" / "zero_bubble_tables.json").read_text())["rows"]


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 32])
def test_1f1b_and_gpipe_take_their_closed_form(pp: int, m: int) -> None:
    for name in ("1f1b", "gpipe"):
        schedule = make_schedule(name, pp=pp, num_microbatches=m)
        for form in (schedule, lower(schedule)):
            trace = simulate(form, Costs.uniform(pp, 1.0, 2.0))
            assert step_time(trace) == pytest.approx((m + pp - 1) * 3.0)
            assert bubble_fraction(trace) == pytest.approx((pp - 1) / (m + pp - 1))


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("vpp", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_interleaving_takes_its_closed_form(pp: int, vpp: int, rounds: int) -> None:
    m = rounds * pp
    schedule = make_schedule("interleaved_1f1b", pp=pp, vpp=vpp, num_microbatches=m)
    for form in (schedule, lower(schedule)):
        trace = simulate(form, Costs.uniform(pp * vpp, 1.0, 2.0))
        assert step_time(trace) == pytest.approx(m * vpp * 3.0 + (pp - 1) * 3.0)
        assert bubble_fraction(trace) == pytest.approx((pp - 1) / (vpp * m + pp - 1))


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_forward_only_fills_and_drains_once(pp: int) -> None:
    schedule = make_schedule("forward_only", pp=pp, vpp=3, num_microbatches=2 * pp)
    assert step_time(simulate(schedule, Costs.uniform(3 * pp))) == pytest.approx(6 * pp + pp - 1)


@pytest.mark.parametrize("row", PAPER, ids=lambda r: f"{r['model']}-p{r['p']}-m{r['m']}")
def test_1f1b_bubbles_are_the_published_ones(row: dict) -> None:
    """Zero Bubble (arXiv 2401.10241), tables 3 to 6: measured costs in, 1F1B's bubble rate out, to four decimals."""
    schedule = make_schedule("1f1b", pp=row["p"], num_microbatches=row["m"])
    costs = Costs.uniform(row["p"], row["TF"], row["TB"] + row["TW"], row["Tcomm"])
    assert round(bubble_fraction(simulate(schedule, costs)), 4) == row["bubble"]["1F1B"]


@pytest.mark.parametrize(
    ("message", "free", "blocking", "interleaved"),
    [(0.4, 0.981, 0.976, 0.989), (1, 0.953, 0.942, 0.974), (2, 0.911, 0.891, 0.949), (9, 0.693, 0.644, 0.732)],
)
def test_messages_cost_what_an_independent_model_says(
    message: float, free: float, blocking: float, interleaved: float
) -> None:
    """p=4, m=16, F=10, B=20 against a separate event model: unlimited, with sends that block, and with two chunks."""
    one = make_schedule("1f1b", pp=4, num_microbatches=16)
    two = make_schedule("interleaved_1f1b", pp=4, vpp=2, num_microbatches=16)
    whole, halves = Costs.uniform(4, 10, 20, message), Costs.uniform(8, 5, 10, message)
    assert round(19 * 30 / step_time(simulate(one, whole)), 3) == free
    assert round(19 * 30 / step_time(simulate(lower(one, capacity=1), whole)), 3) == blocking
    assert round((16 * 30 + 3 * 15) / step_time(simulate(two, halves)), 3) == interleaved


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 8, 20])
def test_activations_in_flight_of_1f1b(pp: int, m: int) -> None:
    assert in_flight(make_schedule("1f1b", pp=pp, num_microbatches=m)) == tuple(min(pp - r, m) for r in range(pp))


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("vpp", [1, 2, 4])
@pytest.mark.parametrize("group", [0, 1, 3])
def test_activations_in_flight_of_interleaving(pp: int, vpp: int, group: int) -> None:
    size = pp + group
    for m in (size, 2 * size, 3 * size):
        schedule = make_schedule("interleaved_1f1b", pp=pp, vpp=vpp, num_microbatches=m, microbatch_group_size=size)
        expected = tuple(min(2 * (pp - r - 1) + (vpp - 1) * size + 1, m * vpp) for r in range(pp))
        assert in_flight(schedule) == in_flight(lower(schedule)) == expected


def test_activations_in_flight_of_the_others() -> None:
    assert in_flight(make_schedule("gpipe", pp=3, vpp=2, num_microbatches=5)) == (10, 10, 10)
    assert in_flight(make_schedule("forward_only", pp=3, vpp=2, num_microbatches=5)) == (1, 1, 1)
    assert in_flight(v_shaped()) == (4, 4)
    assert in_flight(Schedule.from_csv("0F0,0I0,0F1,0W0,0I1,0W1\n")) == (2,)  # the first lives until its W


def test_in_flight_counts_what_a_walk_through_time_counts() -> None:
    for sizes in sample(40):
        schedule = made(sizes)
        trace = simulate(schedule, Costs.uniform(schedule.placement.num_stages, 1.0, 2.0, 0.3))
        ends = {(s.action.stage, s.action.mb): s.end for s in trace.spans if s.action.op is Op.B}
        for pp_rank, most in enumerate(in_flight(schedule)):
            forwards = [s for s in trace.spans if s.pp_rank == pp_rank and s.action.op is Op.F]
            lives = [(s.start, ends.get((s.action.stage, s.action.mb), s.end)) for s in forwards]
            assert most == max(sum(start <= now < end for start, end in lives) for now, _ in lives)


def test_stages_channels_and_halves_have_their_own_prices() -> None:
    schedule = Schedule.from_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    costs = Costs(
        [1, 2],
        [4, 6],
        weight_gradient=[0.5, 0.25],
        reduce_grad=[7, 8],
        messages={Channel(0, 1, "F"): 10, Channel(1, 0, "B"): 20},
    )
    spans = {str(action): (start, end) for _, action, start, end in simulate(lower(schedule), costs).spans}
    assert spans == {
        "0F0": (0, 1),
        "1F0": (11, 13),
        "1I0": (13, 16),
        "1W0": (16, 16.25),
        "1REDUCE_GRAD": (16.25, 24.25),
        "0I0": (36, 38),
        "0W0": (38, 38.5),
        "0REDUCE_GRAD": (38.5, 45.5),
    }


def test_waiting_is_not_work() -> None:
    trace = simulate(make_schedule("1f1b", pp=2, num_microbatches=1), Costs.uniform(2, 1.0, 2.0, 3.0))
    assert step_time(trace) == 12.0
    assert bubble_fraction(trace) == pytest.approx(1 - 6 / 24)


def test_a_hang_is_an_error_and_not_a_trace() -> None:
    with pytest.raises(ScheduleError, match="rank 0 at 2SEND_F0, rank 1 at 1SEND_F1"):
        simulate(lower(made(("interleaved_1f1b", 2, 2, 2, 2)), capacity=1), Costs.uniform(4))


def test_an_empty_trace_has_no_bubble() -> None:
    assert (step_time(Trace(2, ())), bubble_fraction(Trace(2, ()))) == (0.0, 0.0)


def test_pipeline_time_runs_from_the_first_start_to_the_last_end() -> None:
    spans = (Span(0, Action(Op.F, 0, 0), 5.0, 6.0), Span(1, Action(Op.B, 1, 0), 7.0, 8.0))
    assert step_time(Trace(2, spans)) == 3.0
    assert bubble_fraction(Trace(2, spans)) == pytest.approx(1 - 2 / 6)


def test_the_messages_of_a_channel_go_one_after_another() -> None:
    """Three forwards of 1 s end at 1, 2 and 3; their messages of 3 s arrive at 4, 7 and 10."""
    schedule = make_schedule("forward_only", pp=2, num_microbatches=3)
    for form in (schedule, lower(schedule, capacity=6)):
        spans = simulate(form, Costs.uniform(2, message=3.0)).spans
        assert [span.start for span in spans if span.pp_rank == 1] == [4.0, 7.0, 10.0]
