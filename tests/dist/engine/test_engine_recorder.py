"""The engine's stamps: what they cover, what they leave out, and the figures read off them."""

import time
from dataclasses import replace

import pipeline
import pytest
import torch.distributed as dist
from ranks import run_ranks

from ppctl.engine.recorder import Recorder
from ppctl.schedule.action import MESSAGES, Action, Op
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule

NAP = 0.02


def slow_first_stage(m, offset):
    """A step whose stage 0 sleeps in F: everyone else waits for it."""
    schedule = lower(make_schedule("1f1b", pp=2, num_microbatches=m))
    rank = dist.get_rank()
    recorder = Recorder(rank, schedule.actions[rank], clock_offset=offset)
    (program,) = pipeline.programs_of(schedule, rank, {rank: pipeline.build(rank)}, {})

    def sleepy(mb, inputs):
        time.sleep(NAP)
        return program.forward(mb, inputs)

    start = time.perf_counter()
    pipeline.run_schedule(
        schedule,
        [replace(program, forward=sleepy) if rank == 0 else program],
        pipeline.make_communicator(),
        recorder=recorder,
    )
    return recorder.spans(), recorder.totals(), (start + offset, time.perf_counter() + offset), schedule.actions[rank]


def test_spans_are_the_work_and_not_the_waiting():
    m = 4
    for rank, (spans, totals, (start, end), actions) in enumerate(run_ranks(slow_first_stage, 2, m, 1000.0)):
        assert [span.action for span in spans] == [action for action in actions if action.op not in MESSAGES]
        assert {span.pp_rank for span in spans} == {rank}
        times = [moment for span in spans for moment in (span.start, span.end)]
        assert times == sorted(times) and start <= times[0] and times[-1] <= end
        assert (totals.first_start, totals.last_end) == (times[0], times[-1])
        forward = totals.forward[rank]
        assert (NAP < forward < 2 * NAP) if rank == 0 else forward < NAP / 2, "waiting is no part of a forward"
        assert totals.busy == pytest.approx(m * (forward + totals.backward[rank]))


def test_figures_of_a_split_backward_count_both_halves_as_one():
    actions = [Action.parse(text) for text in ("0F0", "0F1", "0I0", "0W0", "0I1", "0W1", "0REDUCE_GRAD")]
    recorder = Recorder(0, actions)
    for index, length in enumerate((1.0, 3.0, 1.0, 2.0, 1.0, 4.0, 5.0)):
        recorder._starts[index], recorder._ends[index] = 10.0 * index, 10.0 * index + length
    totals = recorder.totals()
    assert (totals.forward, totals.backward) == ({0: 2.0}, {0: 4.0})
    assert (totals.busy, totals.first_start, totals.last_end) == (12.0, 0.0, 65.0)
    assert recorder.spans()[-1].action.op is Op.REDUCE_GRAD
