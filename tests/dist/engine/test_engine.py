"""The bitwise law: whatever the cut and the schedule, losses and gradients equal a plain loop's, bit by bit."""

import itertools
import random
from functools import cache

import pipeline
import pytest
import torch.distributed as dist
from pairwise import pairwise
from ranks import run_ranks

from ppctl.errors import ScheduleError
from ppctl.schedule.action import Action, Op, Placement, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule

SAMPLE = 24


def schedule_of(name, pp, vpp, m):
    return lower(make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m))


@cache
def grid(pp):
    """Every (policy, vpp, m, deallocate) that the policies allow on pp ranks."""
    cases = []
    for vpp, m in itertools.product((1, 2, 3), sorted({1, 2, pp, pp + 1, 2 * pp + 1})):
        for name in ("gpipe", "1f1b", "interleaved_1f1b"):
            try:
                make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m)
            except ScheduleError:
                continue
            cases += [(name, vpp, m, deallocate) for deallocate in (True, False)]
    return cases


def outcomes(pp, cases):
    """This rank's outcome of every case, through one communicator."""
    communicator = pipeline.make_communicator()
    return [
        pipeline.run_case(schedule_of(name, pp, vpp, m), communicator, deallocate_pipeline_outputs=deallocate)
        for name, vpp, m, deallocate in cases
    ]


def plain_loops(sizes):
    return [pipeline.plain_loop(*size) for size in sizes]


def check(pp, cases):
    sizes = sorted({(pp * vpp, m) for _, vpp, m, _ in cases})
    (references,) = run_ranks(plain_loops, 1, sizes)
    expected = dict(zip(sizes, references, strict=True))
    by_rank = run_ranks(outcomes, pp, pp, cases, timeout=100.0)
    for case, *parts in zip(cases, *by_rank, strict=True):
        _, vpp, m, _ = case
        assert pipeline.join(parts).equals(expected[pp * vpp, m]), case


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_losses_and_gradients_equal_a_plain_loop_bit_by_bit(pp):
    check(pp, random.Random(pp).sample(grid(pp), SAMPLE))


@pytest.mark.whole
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_every_pair_of_values_gives_the_bits_of_a_plain_loop(pp):
    check(pp, pairwise(grid(pp)))


@pytest.mark.soak
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_the_whole_grid_equals_a_plain_loop_bit_by_bit(pp):
    check(pp, grid(pp))


def test_interleaving_over_two_ranks_is_right():
    """Both neighbours are the same rank: where channels are shared, activations are taken for gradients."""
    check(2, [("interleaved_1f1b", 2, m, True) for m in (2, 4, 8)])


def rows(*texts):
    return tuple(tuple(Action.parse(cell) for cell in text.split()) for text in texts)


def test_a_v_placement_turns_without_a_message():
    schedule = Schedule(
        "v",
        Placement("v", 2, 4),
        2,
        rows("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"),
    )
    assert pipeline.join(run_ranks(one_v, 2, lower(schedule))).equals(run_ranks(plain_loops, 1, [(4, 2)])[0][0])


def one_v(schedule):
    return pipeline.run_case(schedule, pipeline.make_communicator(schedule))


@pytest.mark.shows("pipeline.p2p_capacity")
@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_capacity_changes_nothing_but_time(capacity):
    schedule = lower(make_schedule("1f1b", pp=3, num_microbatches=7), capacity=capacity)
    assert pipeline.join(run_ranks(one_v, 3, schedule)).equals(run_ranks(plain_loops, 1, [(3, 7)])[0][0])


def forward_losses(pp, vpp, m):
    """Losses of the forward-only schedule, and whether any graph was built."""
    communicator = pipeline.make_communicator()
    schedule = schedule_of("forward_only", pp, vpp, m)
    stages = {stage: pipeline.build(stage) for stage in schedule.placement.stages_of(dist.get_rank())}
    losses = {}
    graphs = []
    programs = pipeline.programs_of(schedule, dist.get_rank(), stages, losses)
    watched = [pipeline.watch_outputs(program, graphs) for program in programs]
    pipeline.run_schedule(schedule, watched, communicator)
    return losses, any(graphs)


def test_forward_only_builds_no_graph_and_gives_the_same_losses():
    results = run_ranks(forward_losses, 2, 2, 2, 5)
    losses = results[0][0] | results[1][0]
    expected = run_ranks(plain_loops, 1, [(4, 5)])[0][0].losses
    assert losses == expected
    assert not any(built for _, built in results)


def reduced(pp, vpp, m):
    """At REDUCE_GRAD of a stage: which backwards of it were done."""
    schedule = schedule_of("interleaved_1f1b", pp, vpp, m)
    done = []
    heartbeat = pipeline.Trail(schedule.actions[dist.get_rank()])
    pipeline.run_case(
        schedule,
        pipeline.make_communicator(),
        heartbeat=heartbeat,
        reduce_grad=lambda stage: done.append((stage, heartbeat.count(Op.B, stage))),
    )
    return done, heartbeat.entered == list(range(len(schedule.actions[dist.get_rank()]) + 1))


def test_gradients_are_reduced_once_per_stage_after_its_last_backward():
    results = run_ranks(reduced, 2, 2, 2, 4)
    assert sorted(stage for done, _ in results for stage, _ in done) == [0, 1, 2, 3]
    assert all(count == 4 for done, _ in results for _, count in done)
    assert all(in_order for _, in_order in results), "every action is told in order, then the wait for sends"
