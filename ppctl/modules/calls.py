"""The calls of a schedule as the engine takes them: the programs of this rank's stages on a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppctl.comm.buffers import MessageSpec
from ppctl.config.pipeline_config import PipelineConfig
from ppctl.engine.dry_pass import dry_pass, representatives, reserve
from ppctl.engine.pace import HELD
from ppctl.engine.stage import AroundBackward, StageProgram, no_gradient, refuse_other_loss, refuse_other_outputs
from ppctl.errors import ConfigError, Problem, TrainingError
from ppctl.foreign.cut_proof import Crossing
from ppctl.modules.batch import GivenBatch, StepLoss
from ppctl.modules.pipeline_parts import message_dtype
from ppctl.modules.rank_stages import RankStages
from ppctl.modules.sources import PipelineModel
from ppctl.schedule.action import BACKWARDS, LIFE_ENDS, Op, Schedule, stages_with_backwards

CODE = "PP-E557"
FAILED = "PP-E558"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The schedules and messages of batches of one shape."""

    crossing: Crossing
    schedule: Schedule
    """The schedule of a call in a step, with its messages."""
    forwards: Schedule
    """The schedule of an evaluation."""


@dataclass(slots=True)
class BatchRun:
    """One batch on this rank's stages: `programs` makes the stages' programs for a schedule call, `losses` collects the
    shares of the loss. With `carries_on` an exception of a forward or backward is kept in `failed`; from then on this
    rank computes nothing, but sends messages of NaN, because other ranks wait for messages.
    """

    source: PipelineModel
    stages: RankStages
    config: PipelineConfig
    batch: GivenBatch
    prepared: Prepared
    pp_rank: int
    device: torch.device
    carries_on: bool = False
    failed: Exception | None = None
    where: str = ""
    """The stage and the microbatch that failed."""
    _received: dict[tuple[int, int], tuple[Tensor, ...]] = field(default_factory=dict)
    """(stage, microbatch of the call) -> the forward's inputs, until the backward, whose gradients another rank
    awaits."""
    losses: list[Tensor] = field(default_factory=list)
    _loss: StepLoss = field(init=False)

    def __post_init__(self) -> None:
        self._loss = StepLoss(self.config, self.batch.microbatches)

    def programs(self, first: int, *, last_call: bool) -> list[StageProgram]:
        """The programs of the schedule call that starts with microbatch `first`; after a `last_call` comes no other."""
        return [self._program(number, first, last_call=last_call) for number in self.stages.numbers]

    def _program(self, number: int, first: int, *, last_call: bool) -> StageProgram:
        """The program of one stage in the schedule call that begins at microbatch `first`. `last_call` says whether
        sharded gradients are summed at the end of this call."""
        crossing, module = self.prepared.crossing, self.stages.modules[number]
        is_last = number == self.prepared.schedule.placement.num_stages - 1
        if crossing.forms:
            self.stages.made[number].forms = crossing.forms
        arrives = crossing.edges[number - 1] if number else None
        leaves = None if is_last else crossing.edges[number]
        dtype = message_dtype(self.config)
        receives, sends = (
            () if edge is None else (edge if dtype is None else torch.empty_like(edge, dtype=dtype),)
            for edge in (arrives, leaves)
        )

        def run(mb: int, received: tuple[Tensor, ...]) -> tuple[Any, ...]:
            microbatch = self.batch.microbatches[first + mb]
            state = received[0].to(arrives.dtype) if arrives is not None else None
            output = self.source.run(module, state, microbatch)
            if leaves is not None:
                _check_dtype(number, output, leaves)
                sent = (output if dtype is None else output.to(dtype),)
                refuse_other_outputs(number, first + mb, sent, MessageSpec.of(sends))
                return sent
            share = self._loss(output, microbatch.labels)
            if torch.is_grad_enabled():
                refuse_other_loss(number, first + mb, (share,))
            self.losses.append(share.detach())
            return (share,)

        def forward(mb: int, received: tuple[Tensor, ...]) -> tuple[Any, ...]:
            if self.carries_on and any(each.requires_grad for each in received):
                self._received[number, mb] = received
            where = f"stage {number} failed in microbatch {first + mb}"
            result = self._carried(where, lambda: run(mb, received))
            return result or (self._nothing(received, sends[0] if sends else None),)

        sync, around = self.stages.sync[number], None
        if self.config.patch_stage_backward_maybe_with_nosync and sync.shards:
            row = self.prepared.schedule.actions[self.pp_rank]
            ends = [action.mb for action in row if action.stage == number and action.op in BACKWARDS]
            around = partial(sync.around, ends[-1] if ends and last_call else -1)
        if self.carries_on:
            around = partial(self._backward, number, first, around)
        whole = getattr(self.stages.made[number], "whole", ())
        return StageProgram(number, forward, receives, sends, around_backward=around, whole=whole)

    def _backward(
        self, number: int, first: int, around: AroundBackward | None, mb: int, run: Callable[[], None]
    ) -> None:
        """Run a backward, or half of one; if this rank has failed, put NaN in place of its result."""
        received = self._received.pop((number, mb), ())

        def work() -> bool:
            run() if around is None else around(mb, run)
            if any(each.grad is None for each in received):
                raise no_gradient(number, first + mb)
            return True

        if not self._carried(f"stage {number} failed in the backward of microbatch {first + mb}", work):
            for each in received:
                each.grad = torch.full_like(each, float("nan"))

    def _carried(self, where: str, work: Callable[[], Any]) -> Any:
        """Return the result of `work`; None if this rank has failed before, or fails now and goes on (`carries_on`)."""
        if self.failed is None:
            try:
                return work()
            except Exception as error:
                if not self.carries_on:
                    raise
                self.failed, self.where = error, where
        return None

    def _nothing(self, received: tuple[Tensor, ...], edge: Tensor | None) -> Tensor:
        """Return NaN in the form of a message (without `edge`: of a loss), with a graph to the received tensors."""
        nan = torch.full((), float("nan"), device=self.device)
        read = received[0].sum() * nan if received else nan
        return read if edge is None else read.to(edge.dtype).expand(edge.shape).clone()

    def failure(self, rank: int) -> TrainingError:
        """The error of a call that failed: with this rank's exception if there is one, else it refers to `rank`."""
        message, remedy = f"rank {rank} of the pipeline failed in this call and says why", "the exception of that rank"
        if self.failed is not None:
            first = (str(self.failed).splitlines() or [""])[0]
            message = f"rank {self.pp_rank}: {self.where}: {type(self.failed).__name__}: {first}"
            remedy = "the exception above; pipeline.zero_grad() before another step"
        return TrainingError(Problem(FAILED, message, remedy))


def _check_dtype(number: int, output: Any, edge: Tensor) -> None:
    """Raise ConfigError (PP-E557) if a stage returns another dtype than it did in the forward on meta tensors."""
    if isinstance(output, Tensor) and output.dtype != edge.dtype:
        shown = str(edge.dtype)
        message = f"stage {number} returns {output.dtype}, but on tensors without values it returned {shown}"
        raise ConfigError(Problem(CODE, message, f"a parallelize whose stages return x.to({shown})"))


def run_dry(run: BatchRun, device: torch.device) -> None:
    """Run all kernels of a step and of an evaluation once, before the first message (see `engine.dry_pass`). Gradients,
    buffers and random states are the same afterwards."""
    schedule, stages, kept = run.prepared.schedule, run.stages, dict[int, int]()
    on_gpu = device.type == "cuda"
    if on_gpu:  # afterwards the cache has what one microbatch needs
        torch.cuda.empty_cache()
    with torch.random.fork_rng([device] if on_gpu else []), stages.restored():
        for program in run.programs(0, last_call=True):
            number = program.stage
            if program.around_backward is not None:  # unsummed gradients would be added to the step's
                program = replace(program, around_backward=stages.sync[number].at_once)
            one = partial(dry_pass, program, schedule, run.pp_rank, device=device)
            splits = [(number, mb) in schedule.split for mb in range(schedule.num_microbatches)]
            with stages.evaluating():  # first, since a backward frees sharded weights that a forward has gathered
                one(0, training=False)
            for mb in representatives(splits):
                kept[number] = one(mb)
    if on_gpu:
        torch.cuda.synchronize(device)
        if schedule.capacities:
            _reserve(run, device, kept)


def _reserve(run: BatchRun, device: torch.device, kept: Mapping[int, int]) -> None:
    """Reserve the GPU memory of a step: for the dry pass, for microbatches in flight and for posted receives."""
    schedule, crossing = run.prepared.schedule, run.prepared.crossing
    row, alive = schedule.actions[run.pp_rank], list[int]()
    trained, most, in_flight = stages_with_backwards(row), 0, 0
    for op, stage, _ in row:
        if op is Op.F and stage in trained:
            alive.append(stage)
        elif op in LIFE_ENDS:
            alive.remove(stage)
        most, in_flight = max(most, sum(kept[each] for each in alive)), max(in_flight, len(alive))
    posted = sum(capacity for channel, capacity in schedule.capacities.items() if channel.target == run.pp_rank)
    messages = (posted + HELD) * max(edge.nbytes for edge in crossing.edges)
    peak = torch.cuda.memory_reserved(device) + most + messages
    reserve(device, peak, in_flight)
