"""Schedules with I and W, executed: the bits of a plain loop, what lives how long, and when gradients are complete."""

from __future__ import annotations

import itertools
import random
from functools import cache, partial

import pipeline
import pytest
import torch
import torch.distributed as dist
from live_memory import LiveBytes
from pairwise import in_tiers
from ranks import run_ranks

from ppctl.engine.stage import StageProgram
from ppctl.errors import ScheduleError
from ppctl.schedule.action import Action, Op, Placement, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import POLICIES, make_schedule
from ppctl.weight_gradients.deferred import WeightGradStore

SPLIT = [name for name, policy in POLICIES.items() if policy.splits]


@cache
def cases(pp):
    """Every (policy, vpp, m, batched, deallocate) that splits backwards, on pp ranks."""
    found = []
    for name, vpp, m in itertools.product(SPLIT, (1, 2, 3), sorted({1, 2, pp, pp + 1, 2 * pp + 1})):
        try:
            make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m)
        except ScheduleError:
            continue
        found += [(name, vpp, m, batched, kept) for batched in (False, pp > 1) for kept in (False, True)]
    return list(dict.fromkeys(found))


def lowered(case):
    name, vpp, m, batched, _ = case
    pp = dist.get_world_size()
    return lower(make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m), batched=batched)


def outcomes(chosen):
    """This rank's outcome of every case."""
    return [run_one(lowered(case), deallocate_pipeline_outputs=not case[-1]) for case in chosen]


def run_one(schedule, **options):
    communicator = None
    if dist.get_world_size() > 1:
        config = pipeline.SimpleNamespace(batch_p2p_comm=schedule.batched, pipeline_dtype=torch.float32)
        communicator = pipeline.P2PCommunicator(dist.group.WORLD, config, channels=schedule.capacities)
    return pipeline.run_case(schedule, communicator, **options)


def plain_loops(sizes):
    return [pipeline.plain_loop(*size) for size in sizes]


@pytest.mark.parametrize(("pp", "count"), in_tiers([(1, 99), (2, 99), (3, 99), (4, 99)], [(1, 4), (2, 6), (3, 4)]))
def test_losses_and_gradients_equal_a_plain_loop_bit_by_bit(pp, count):
    chosen = random.Random(pp).sample(cases(pp), min(count, len(cases(pp))))
    sizes = [(pp * vpp, m) for _, vpp, m, *_ in chosen]
    (references,) = run_ranks(plain_loops, 1, sizes)
    by_rank = run_ranks(outcomes, pp, chosen, timeout=100.0)
    for case, expected, *parts in zip(chosen, references, *by_rank, strict=True):
        assert pipeline.join(parts).equals(expected), case


def reduced(schedule):
    """At REDUCE_GRAD of a stage: how many of its weight gradients were computed."""
    done = []
    trail = pipeline.Trail(schedule.actions[dist.get_rank()])

    def reduce(stage):
        done.append((stage, sum(trail.count(op, stage) for op in (Op.B, Op.W))))

    run_one(schedule, heartbeat=trail, reduce_grad=reduce)
    return done


@pytest.mark.parametrize("name", ["zbv_zero_bubble", "dualpipev"])
def test_gradients_are_reduced_once_per_stage_after_its_last_w(name):
    schedule = lower(make_schedule(name, pp=2, vpp=2, num_microbatches=5))
    found = [each for done in run_ranks(reduced, 2, schedule) for each in done]
    assert sorted(found) == [(stage, 5) for stage in range(4)]


class _TimesWeight(torch.autograd.Function):
    """x * w of a user who puts w's gradient off, and keeps for it the very tensor that came as the gradient."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        WeightGradStore.put(lambda: w.grad.add_((gradient * x).sum(0)))
        return gradient * w, None


def gradients_by_hook(schedule):
    """The weights' gradients, of which microbatch mb adds mb, by stage."""
    own, last = schedule.placement.stages_of(dist.get_rank()), schedule.placement.num_stages - 1
    weights = {stage: torch.ones(3, requires_grad=True) for stage in own}
    for weight in weights.values():
        weight.grad = torch.zeros(3)

    def forward(stage, mb, inputs):
        out = _TimesWeight.apply(inputs[0] if stage else torch.full((1, 3), 1.0, requires_grad=True), weights[stage])
        return ((mb * out).sum(),) if stage == last else (out,)

    edge = (pipeline.TensorSpec((1, 3), "float32"),)
    programs = [
        StageProgram(s, partial(forward, s), edge if s else (), edge if s < last else (), intercept=False) for s in own
    ]
    config = pipeline.SimpleNamespace(batch_p2p_comm=False, pipeline_dtype=torch.float32)
    communicator = pipeline.P2PCommunicator(dist.group.WORLD, config, channels=schedule.capacities)
    pipeline.run_schedule(schedule, programs, communicator)
    return {stage: weight.grad.tolist() for stage, weight in weights.items()}


def test_what_a_user_keeps_for_w_is_not_received_into():
    schedule = lower(make_schedule("interleaved_zero_bubble", pp=2, vpp=2, num_microbatches=8))
    assert run_ranks(gradients_by_hook, 2, schedule) == [{0: [28.0] * 3, 2: [28.0] * 3}, {1: [28.0] * 3, 3: [28.0] * 3}]


class Residual(torch.nn.Module):
    """A stage whose output's gradient is that of a product, and whose input is one's operand."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x):
        return x + self.two(torch.tanh(self.one(x)))


def two_stages():
    torch.manual_seed(0)
    return [Residual() for _ in range(2)]


def run_on(stages, texts, watch=lambda action: None):
    """Stages 0 and 1 on one rank, in this order; calls `watch` behind every action. Returns all gradients."""
    edge = (pipeline.TensorSpec((4, 6), "float32"),)
    actions = tuple(map(Action.parse, texts))
    schedule = Schedule("own", Placement("loop", 1, 2), 1 + max(a.mb for a in actions), (actions,))

    def forward(stage, mb, inputs):
        own = torch.randn(4, 6, generator=torch.Generator().manual_seed(mb))
        out = stages[stage](inputs[0] if stage else own)
        return (out.square().mean(),) if stage else (out,)

    programs = [StageProgram(s, partial(forward, s), edge if s else (), () if s else edge) for s in range(2)]

    class Watch:
        def enter(self, index):
            if index:
                watch(actions[index - 1])

        def work(self, index):
            """What it needs is there."""

    pipeline.run_schedule(schedule, programs, None, heartbeat=Watch())
    return [p.grad for stage in stages for p in stage.parameters()]


WHOLE = ("0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1")
LATE = ("0F0", "1F0", "1I0", "0I0", "0F1", "1F1", "1I1", "0I1", "1W0", "1W1", "0W0", "0W1")


def test_the_first_stage_does_all_but_weights_in_i():
    """Elsewhere the first stage has no I, and pays for everything in W."""
    stages, seen = two_stages(), {}

    def note(action):
        seen[str(action)] = (stages[0].one.weight.grad is None, stages[0].one.bias.grad is None)

    assert all(map(torch.equal, run_on(stages, LATE, note), run_on(two_stages(), WHOLE)))
    assert seen["1I0"] == (True, True) and seen["0I0"] == (True, False)
    assert seen["1W1"] == (True, False) and seen["0W0"] == (False, False)


def test_behind_i_only_operands_of_products_live_and_behind_w_nothing():
    """Of either stage: the inputs of two products, and the gradients of their results."""
    stages, living = two_stages(), {}
    with LiveBytes() as live:
        row = ("0F0", "1F0", "1I0", "0I0", "1W0", "0W0")
        run_on(stages, row, lambda action: living.update({str(action): live.now()}))
    operand, bias, weight = 4 * 6 * 4, 6 * 4, 6 * 6 * 4
    assert living["0I0"] == 2 * (4 * operand + 2 * bias)
    assert living["1W0"] == living["0I0"] - 4 * operand + 2 * weight
    assert living["0W0"] == 4 * (bias + weight)
