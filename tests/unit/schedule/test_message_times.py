"""Message times read off a step are those that the step was run with."""

from __future__ import annotations

import pytest

from ppctl.schedule.action import Action, Channel, Op
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import Span, message_times


@pytest.mark.parametrize(("name", "vpp"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv_zero_bubble", 2)])
def test_messages_that_somebody_waits_for_are_read_off_a_step(name: str, vpp: int) -> None:
    schedule = lower(make_schedule(name, pp=4, vpp=vpp, num_microbatches=16))
    wanted = {channel: 0.1 + 0.01 * number for number, channel in enumerate(sorted(schedule.capacities))}
    costs = Costs((1.0,) * 4 * vpp, (2.0,) * 4 * vpp, messages=wanted)
    found = message_times([simulate(schedule, costs).spans])
    assert len(found) > len(wanted) / 2
    assert found == pytest.approx({channel: wanted[channel] for channel in found})


def test_a_message_that_lies_ready_and_the_start_of_a_rank_say_nothing() -> None:
    spans = [
        Span(0, Action(Op.F, 0, 0), 0.0, 1.0),
        Span(0, Action(Op.F, 0, 1), 1.0, 2.0),
        Span(1, Action(Op.F, 1, 0), 5.0, 8.0),  # its first action: the rank may have come late
        Span(1, Action(Op.F, 1, 1), 8.0, 9.0),  # the message was there long before
        Span(1, Action(Op.B, 1, 0), 9.0, 10.0),  # of this rank's own
        Span(0, Action(Op.B, 0, 0), 10.25, 11.0),
    ]
    assert message_times([spans]) == {Channel(1, 0, "B"): 0.25}


def test_several_steps_give_a_median() -> None:
    steps = [
        [
            Span(0, Action(Op.F, 0, 0), 0.0, 1.0),
            Span(1, Action(Op.B, 1, 0), 1.0, 2.0),
            Span(0, Action(Op.B, 0, 0), 2.0 + seconds, 5.0),
        ]
        for seconds in (0.25, 0.75, 0.5)
    ]
    assert message_times(steps) == {Channel(1, 0, "B"): 0.5}
