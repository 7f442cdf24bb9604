"""Every message mode executes every schedule to the bits of a plain loop, and refuses what it cannot."""

import itertools
import random
from functools import partial
from types import SimpleNamespace

import pipeline
import pytest
import torch
import torch.distributed as dist
from pairwise import pairwise
from ranks import RanksFailed, run_ranks

from ppctl.comm.communicator import FusedBatch, LooseBatch
from ppctl.engine.interpreter import Engine
from ppctl.errors import ScheduleError
from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.schedule.action import MESSAGES, Action, Placement, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.verify import verify

MODES = {
    "channels": dict(batch_p2p_comm=False, overlap_p2p_comm=True),
    "batched": dict(batch_p2p_comm=True, batch_p2p_sync=True),
    "one by one": dict(batch_p2p_comm=False, overlap_p2p_comm=False),
    "channels, variable": dict(batch_p2p_comm=False, overlap_p2p_comm=True, variable_seq_lengths=True),
    "batched, variable": dict(batch_p2p_comm=True, variable_seq_lengths=True),
    "one by one, variable": dict(batch_p2p_comm=False, overlap_p2p_comm=False, variable_seq_lengths=True),
    "plain": dict(batch_p2p_comm=False, overlap_p2p_comm=True),
    "plain, variable": dict(batch_p2p_comm=False, overlap_p2p_comm=True, variable_seq_lengths=True),
}
SAMPLE = 18


def in_batches(mode):
    return mode.startswith("plain") or not MODES[mode].get("overlap_p2p_comm", False)


def communicator_of(mode, schedule=None):
    config = SimpleNamespace(pipeline_dtype=torch.float32, **MODES[mode])
    transport = "plain" if mode.startswith("plain") else "auto"
    channels = schedule and schedule.capacities
    return P2PCommunicator(dist.group.WORLD, config, channels=channels, transport=transport)


def schedule_of(mode, name, pp, vpp, m):
    policy, _, variant = name.partition(", ")
    more = {"": {}, "warmed up": {"extra_warmup": pp - 1}, "wide groups": {"microbatch_group_size": pp + 1}}[variant]
    plain = make_schedule(policy, pp=pp, vpp=vpp, num_microbatches=m, **more)
    schedule = lower(plain, batched=in_batches(mode))
    assert not verify(schedule)
    return schedule


def grid(pp):
    cases = []
    for mode, vpp, m in itertools.product(MODES, (1, 2, 3), sorted({1, 2, pp, pp + 1, 2 * pp + 1})):
        own = ("1f1b", "1f1b, warmed up") if vpp == 1 else ("interleaved_1f1b", "interleaved_1f1b, wide groups")
        cases += [(mode, name, vpp, m) for name in ("gpipe", *own)]
    return cases


def outcomes(pp, cases):
    results = []
    for mode, name, vpp, m in cases:
        pipeline.data = pipeline.ragged if "variable" in mode else FIXED
        results.append(pipeline.run_case(schedule_of(mode, name, pp, vpp, m), communicator_of(mode)))
    return results


FIXED = pipeline.data


def plain_loops(sizes):
    results = []
    for stages, m, variable in sizes:
        pipeline.data = pipeline.ragged if variable else FIXED
        results.append(pipeline.plain_loop(stages, m))
    return results


def check(pp, cases):
    sizes = sorted({(pp * vpp, m, "variable" in mode) for mode, _, vpp, m in cases})
    (references,) = run_ranks(plain_loops, 1, sizes)
    expected = dict(zip(sizes, references, strict=True))
    by_rank = run_ranks(outcomes, pp, pp, cases, timeout=100.0)
    for case, *parts in zip(cases, *by_rank, strict=True):
        mode, _, vpp, m = case
        assert pipeline.join(parts).equals(expected[pp * vpp, m, "variable" in mode]), case


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_mode_changes_no_bit(pp):
    check(pp, random.Random(pp).sample(grid(pp), SAMPLE))


@pytest.mark.whole
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_no_mode_changes_a_bit_for_any_pair_of_values(pp):
    check(pp, pairwise(grid(pp)))


@pytest.mark.soak
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_no_mode_changes_a_bit_anywhere_in_the_grid(pp):
    check(pp, grid(pp))


@pytest.mark.parametrize("mode", ["batched", "batched, variable", "one by one"])
def test_interleaving_over_two_ranks_is_right_in_batches(mode):
    """The original takes activations for gradients here, and says nothing."""
    check(2, [(mode, "interleaved_1f1b", vpp, m) for vpp in (2, 3) for m in (2, 4, 7)])


def rows(*texts):
    return tuple(tuple(Action.parse(cell) for cell in text.split()) for text in texts)


V = Schedule(
    "v",
    Placement("v", 2, 4),
    2,
    rows("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"),
)


def one_v(mode):
    pipeline.data = pipeline.ragged if "variable" in mode else FIXED
    schedule = lower(V, batched=in_batches(mode))
    return pipeline.run_case(schedule, communicator_of(mode, schedule))


@pytest.mark.parametrize("mode", MODES)
def test_a_v_runs_in_every_mode(mode):
    expected = run_ranks(plain_loops, 1, [(4, 2, "variable" in mode)])[0][0]
    assert pipeline.join(run_ranks(one_v, 2, mode)).equals(expected)


def on_one_rank():
    pipeline.data = pipeline.ragged
    schedule = lower(make_schedule("interleaved_1f1b", pp=1, vpp=3, num_microbatches=5))
    return pipeline.run_case(schedule, None, variable_shapes=True).equals(pipeline.plain_loop(3, 5))


def test_lengths_may_differ_without_any_message():
    assert run_ranks(on_one_rank, 1) == [True]


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_variable_lengths_hang_at_no_capacity_that_verify_passes(capacity):
    for name, pp, vpp, m in (("1f1b", 3, 1, 7), ("interleaved_1f1b", 2, 2, 6), ("interleaved_1f1b", 3, 2, 4)):
        schedule = lower(make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m), capacity=capacity)
        if verify(schedule):
            continue
        expected = run_ranks(plain_loops, 1, [(pp * vpp, m, True)])[0][0]
        assert pipeline.join(run_ranks(at_capacity, pp, schedule)).equals(expected)


def at_capacity(schedule):
    pipeline.data = pipeline.ragged
    return pipeline.run_case(schedule, communicator_of("channels, variable"))


def forward_only_losses(mode, pp, m):
    schedule = schedule_of(mode, "forward_only", pp, 2, m)
    stages = {stage: pipeline.build(stage) for stage in schedule.placement.stages_of(dist.get_rank())}
    losses = {}
    programs = pipeline.programs_of(schedule, dist.get_rank(), stages, losses)
    pipeline.run_schedule(schedule, programs, communicator_of(mode))
    return losses


@pytest.mark.parametrize("mode", ["batched", "one by one"])
def test_forward_only_in_batches(mode):
    losses = run_ranks(forward_only_losses, 2, mode, 2, 5)
    assert losses[0] | losses[1] == run_ranks(plain_loops, 1, [(4, 5, False)])[0][0].losses


def fused_calls():
    """How many operations each batch_isend_irecv of a step got, and this rank's batches as the schedule has them."""
    schedule = schedule_of("batched", "interleaved_1f1b", 2, 2, 4)
    sizes, fuse = [], dist.batch_isend_irecv
    communicator = communicator_of("batched")
    communicator.batch = partial(FusedBatch, communicator.pp_group)  # as where a device's backend moves tensors

    def counting(ops):
        sizes.append(len(ops))
        return fuse(ops)

    dist.batch_isend_irecv = counting
    try:
        pipeline.run_case(schedule, communicator)
    finally:
        dist.batch_isend_irecv = fuse
    tensors, expected = 0, []
    for index, action in enumerate(schedule.actions[dist.get_rank()]):
        if action.op in MESSAGES:
            edge = action.stage - ("RECV_F" in action.op or "SEND_B" in action.op)
            tensors += len(pipeline.edge(edge))
        if index in schedule.batch_ends(dist.get_rank()):
            expected.append(tensors)
            tensors = 0
    return sizes, expected


def started_one_by_one():
    communicator = communicator_of("batched")
    return type(communicator.batch()), communicator.fused, len(communicator.ends)


def test_a_host_starts_the_messages_of_a_batch_on_their_channels():
    """Its backend would start one after the other anyway, on one connection for both directions."""
    assert run_ranks(started_one_by_one, 2) == [(LooseBatch, False, 4)] * 2


def test_neighbouring_messages_go_out_in_one_call():
    for sizes, expected in run_ranks(fused_calls, 2):
        assert sizes == expected
        assert max(sizes) > 2, "some batch fuses several messages"


def mismatched():
    schedule = lower(make_schedule("1f1b", pp=2, num_microbatches=2))
    programs = pipeline.programs_of(schedule, dist.get_rank(), {dist.get_rank(): pipeline.build(dist.get_rank())}, {})
    with pytest.raises(ScheduleError) as caught:
        Engine(schedule, programs, communicator_of("batched"))
    return str(caught.value)


def test_a_schedule_that_receives_ahead_is_refused_on_a_communicator_that_batches():
    for text in run_ranks(mismatched, 2):
        assert text.startswith("PP-E393: schedule 1f1b receives ahead of need")
        assert "lower(schedule, batched=True)" in text


def fails_in_a_batch(mode):
    schedule = schedule_of(mode, "1f1b", 3, 1, 4)
    rank = dist.get_rank()
    (healthy,) = pipeline.programs_of(schedule, rank, {rank: pipeline.build(rank)}, {})

    def forward(mb, inputs):
        if (rank, mb) == (1, 2):
            raise ValueError("no flour")
        return healthy.forward(mb, inputs)

    program = pipeline.StageProgram(rank, forward, healthy.receives, healthy.sends)
    pipeline.run_schedule(schedule, [program], communicator_of(mode))


@pytest.mark.parametrize("mode", ["batched", "one by one", "channels, variable"])
def test_a_failure_is_named_and_its_peers_end_in_every_mode(mode):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fails_in_a_batch, 3, mode)
    first, *others = caught.value.failures
    assert first.rank == 1 and "failed in 1F2: ValueError: no flour" in first.message
    assert sorted(other.rank for other in others) == [0, 2]
    assert all(other.message.startswith("PP-E711") for other in others)


def wrong_dtype():
    schedule = schedule_of("channels, variable", "1f1b", 2, 1, 2)
    rank = dist.get_rank()
    (healthy,) = pipeline.programs_of(schedule, rank, {rank: pipeline.build(rank)}, {})

    def forward(mb, inputs):
        return tuple(t.double() for t in healthy.forward(mb, inputs))

    program = pipeline.StageProgram(rank, forward, healthy.receives, healthy.sends) if rank == 0 else healthy
    pipeline.run_schedule(schedule, [program], communicator_of("channels, variable"))


def test_with_variable_shapes_number_and_dtypes_still_bind():
    with pytest.raises(RanksFailed, match=r"PP-E712.*put float64\[3, 6\] on its edge.*says float32\[of any shape\]"):
        run_ranks(wrong_dtype, 2)
