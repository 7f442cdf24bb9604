"""What lives, counted from outside the engine: activations in flight, bytes, buffers."""

import time

import pipeline
import pytest
import torch
import torch.distributed as dist
from live_memory import Census, LiveBytes, made_messages
from ranks import run_ranks

from ppctl.engine.stage import StageProgram
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import in_flight


def planned_of(name, pp, vpp, m, extra_warmup=0):
    return lower(make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m, extra_warmup=extra_warmup))


def count_in_flight(cases):
    communicator = pipeline.make_communicator()
    peaks = []
    for case in cases:
        schedule = planned_of(*case)
        stages = {s: pipeline.build(s) for s in schedule.placement.stages_of(dist.get_rank())}
        census = Census()
        programs = [census.watch(p) for p in pipeline.programs_of(schedule, dist.get_rank(), stages, {})]
        pipeline.run_schedule(schedule, programs, communicator)
        peaks.append(census.peak)
        assert not census.alive, "a graph outlived its backward"
    return peaks


IN_FLIGHT = {
    1: [("1f1b", 1, 1, 3), ("gpipe", 1, 2, 3), ("interleaved_1f1b", 1, 3, 4)],
    2: [("1f1b", 2, 1, 5), ("gpipe", 2, 1, 5), ("interleaved_1f1b", 2, 2, 6), ("interleaved_1f1b", 2, 3, 4)],
    4: [
        *(("1f1b", 4, 1, 9), ("1f1b", 4, 1, 2), ("gpipe", 4, 2, 5), ("interleaved_1f1b", 4, 2, 8)),
        *(("1f1b", 4, 1, 9, 1), ("1f1b", 4, 1, 9, 3), ("interleaved_1f1b", 4, 2, 8, 2)),
    ],
}


@pytest.mark.parametrize("pp", IN_FLIGHT)
def test_activations_in_flight_are_the_planned_ones_on_every_rank(pp):
    measured = run_ranks(count_in_flight, pp, IN_FLIGHT[pp])
    planned = [in_flight(planned_of(*case)) for case in IN_FLIGHT[pp]]
    assert list(zip(*measured, strict=True)) == planned


def peak_bytes(name, pp, vpp, counts):
    """Peak bytes of a step for each number of microbatches, on this rank."""
    peaks = []
    for m in counts:
        schedule = lower(make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m))
        communicator = pipeline.make_communicator()
        with LiveBytes() as live:
            pipeline.run_case(schedule, communicator)
        peaks.append(live.peak)
    return peaks


@pytest.mark.parametrize(("name", "pp", "vpp"), [("1f1b", 2, 1), ("1f1b", 4, 1), ("interleaved_1f1b", 2, 2)])
def test_peak_bytes_do_not_grow_with_the_number_of_microbatches(name, pp, vpp):
    for rank, (short, long) in enumerate(run_ranks(peak_bytes, pp, name, pp, vpp, (2 * pp, 4 * pp))):
        losses = 2 * pp * 4 if rank == pp - 1 else 0  # the test keeps every loss
        assert 0 <= long - short <= losses, f"rank {rank}"


def peak_with_and_without_deallocation(m):
    schedule = lower(make_schedule("gpipe", pp=2, num_microbatches=m), capacity=2)
    communicator = pipeline.make_communicator()
    peaks = []
    for deallocate in (True, False):
        with LiveBytes() as live:
            pipeline.run_case(schedule, communicator, deallocate_pipeline_outputs=deallocate)
        peaks.append(live.peak)
    return peaks


def test_deallocation_frees_an_output_once_it_is_delivered():
    m, output = 6, pipeline.BATCH * pipeline.width(1) * 4
    (freed, kept), _ = run_ranks(peak_with_and_without_deallocation, 2, m)
    assert kept - freed >= (m - 2) * output


def several_steps(name, pp, vpp, m, steps):
    """After each step: buffers ever made, and bytes still alive."""
    schedule = lower(make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m))
    communicator = pipeline.make_communicator()
    seen = []
    with LiveBytes() as live, made_messages() as made:
        for _ in range(steps):
            pipeline.run_case(schedule, communicator)
            seen.append((len(made), live.now()))
    return seen


@pytest.mark.parametrize(("name", "vpp"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_nothing_grows_over_steps(name, vpp):
    for seen in run_ranks(several_steps, 2, name, 2, vpp, 6, 4):
        assert seen == [seen[0]] * 4
        assert 0 < seen[0][0] < 6 * vpp, "buffers are reused within a step"


def views_only():
    """The middle stage returns a view of its input, so that its input's gradient is a view of what it received.

    The first stage's backward dawdles: the middle stage's gradients wait for delivery while the next ones come in.
    """
    schedule = lower(make_schedule("gpipe", pp=3, num_microbatches=6), capacity=2)
    weights = {stage: pipeline.build(stage) for stage in (0, 2)}
    flat, turned = [(pipeline.TensorSpec(shape, "float32"),) for shape in ((3, 8), (8, 3))]

    def compute_first(mb, first):
        return (pipeline.data(mb) @ first).clone()

    def first(mb, inputs):
        out = compute_first(mb, weights[0]["first"])
        out.register_hook(lambda gradient: time.sleep(0.02))
        return (out,)

    def last(mb, inputs):
        return (inputs[0].square().sum() * (mb + 1),)

    programs = [
        StageProgram(0, first, (), flat),
        StageProgram(1, lambda mb, inputs: (inputs[0].view(8, 3),), flat, turned),
        StageProgram(2, last, turned, ()),
    ]
    rank = dist.get_rank()
    pipeline.run_schedule(schedule, [programs[rank]], pipeline.make_communicator())
    expected = pipeline.build(0)["first"]
    for mb in range(6):
        (compute_first(mb, expected).square().sum() * (mb + 1)).backward()
    return rank != 0 or torch.equal(weights[0]["first"].grad, expected.grad)


def test_a_buffer_that_became_a_gradient_is_not_received_into():
    assert all(run_ranks(views_only, 3))
