"""A small pipeline for the engine's tests: stages of uneven width, the plain loop that they must equal, and the driver.

Stage s turns a [batch, width(s)] activation into [batch, width(s + 1)]. Every second edge carries two tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ppctl.engine.interpreter import run_schedule
from ppctl.engine.stage import StageProgram
from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.schedule.action import Schedule

BATCH = 3
CONFIG = SimpleNamespace(batch_p2p_comm=False, pipeline_dtype=torch.float32)


class TensorSpec(NamedTuple):
    """As a plan's: shape, and the dtype by name."""

    shape: tuple
    dtype: str


def width(stage):
    return 5 + stage % 3


def edge(stage):
    """The message from `stage` to the next one."""
    main = TensorSpec((BATCH, width(stage + 1)), "float32")
    return (main, TensorSpec((BATCH,), "float32")) if stage % 2 else (main,)


def build(stage):
    """A stage's parameters, by stage alone."""
    generator = torch.Generator().manual_seed(100 + stage)
    shapes = {"first": (width(stage), 8), "bias": (8,), "second": (8, width(stage + 1))}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def data(mb):
    return torch.randn(BATCH, width(0), generator=torch.Generator().manual_seed(mb))


def ragged(mb):
    """Microbatches of 1 to 4 rows, for messages of variable shape."""
    return torch.randn(1 + mb % 4, width(0), generator=torch.Generator().manual_seed(mb))


def compute(stage, weights, mb, inputs):
    """One stage: a linear attention over the batch between two linear maps."""
    x = data(mb) if stage == 0 else inputs[0]
    hidden = torch.tanh(x @ weights["first"] + weights["bias"])
    hidden = hidden + (hidden @ hidden.mT) @ hidden / 8
    if len(inputs) == 2:
        hidden = hidden * inputs[1][:, None]
    out = hidden @ weights["second"]
    return (out, out.mean(1)) if stage % 2 else (out,)


def loss_of(outputs, num_microbatches):
    return outputs[0].square().mean() / num_microbatches


@dataclass
class Outcome:
    """Losses by microbatch and gradients by (stage, name)."""

    losses: dict
    gradients: dict

    def equals(self, other):
        assert self.losses.keys() == other.losses.keys() and self.gradients.keys() == other.gradients.keys()
        same = [torch.equal(self.losses[k], other.losses[k]) for k in self.losses]
        return all(same + [torch.equal(self.gradients[k], other.gradients[k]) for k in self.gradients])


def plain_loop(num_stages, num_microbatches):
    """The reference: all stages, one microbatch after the other, no engine."""
    stages = [build(stage) for stage in range(num_stages)]
    losses = {}
    for mb in range(num_microbatches):
        outputs = ()
        for stage, weights in enumerate(stages):
            outputs = compute(stage, weights, mb, outputs)
        loss = loss_of(outputs, num_microbatches)
        loss.backward()
        losses[mb] = loss.detach()
    return Outcome(losses, {(s, name): p.grad for s, weights in enumerate(stages) for name, p in weights.items()})


def programs_of(schedule: Schedule, pp_rank, stages, losses):
    """This rank's stages as the engine wants them; losses are put into `losses`."""
    last = schedule.placement.num_stages - 1

    def program(stage):
        def forward(mb, inputs):
            outputs = compute(stage, stages[stage], mb, inputs)
            if stage < last:
                return outputs
            loss = loss_of(outputs, schedule.num_microbatches)
            losses[mb] = loss.detach().clone()
            return (loss,)

        return StageProgram(stage, forward, edge(stage - 1) if stage else (), edge(stage) if stage < last else ())

    return [program(stage) for stage in schedule.placement.stages_of(pp_rank)]


def make_communicator(schedule=None):
    """The world as one pipeline; a schedule brings its own channels (a V has others than a loop)."""
    if dist.get_world_size() == 1:
        return None
    return P2PCommunicator(dist.group.WORLD, CONFIG, channels=schedule and schedule.capacities)


def watch_outputs(program, graphs):
    """The program, noting for every output whether it has a graph."""

    def forward(mb, inputs):
        outputs = program.forward(mb, inputs)
        graphs.extend(t.grad_fn is not None for t in outputs)
        return outputs

    return replace(program, forward=forward)


class Trail:
    """A heartbeat that remembers."""

    def __init__(self, actions):
        self.actions = actions
        self.entered = []

    def enter(self, index):
        self.entered.append(index)

    def work(self, index):
        """What it needs is there."""

    def count(self, op, stage):
        """How many actions of a kind have begun; a pair's two are named in turns."""
        return sum(self.actions[i].op is op and self.actions[i].stage == stage for i in set(self.entered))


def run_case(schedule, communicator, **options):
    """One step on this rank's part of the pipeline."""
    pp_rank = dist.get_rank()
    stages = {stage: build(stage) for stage in schedule.placement.stages_of(pp_rank)}
    losses = {}
    run_schedule(schedule, programs_of(schedule, pp_rank, stages, losses), communicator, **options)
    return Outcome(losses, {(s, name): p.grad for s, weights in stages.items() for name, p in weights.items()})


def join(outcomes):
    """The ranks' outcomes as one."""
    joined = Outcome({}, {})
    for outcome in outcomes:
        joined.losses |= outcome.losses
        joined.gradients |= outcome.gradients
    return joined


P2P_MODES = {
    "channels": dict(batch_p2p_comm=False),
    "batched": dict(batch_p2p_comm=True, batch_p2p_sync=True),
    "channels, variable": dict(batch_p2p_comm=False, variable_seq_lengths=True),
    "batched, variable": dict(batch_p2p_comm=True, variable_seq_lengths=True),
}
"""How P2PCommunicator passes messages on."""
