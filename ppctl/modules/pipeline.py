"""`ppctl.pipeline`: a model and a PipelineConfig in, this rank's stages out, with a step and an evaluation of them.

Knows the order in which a pipeline is made and run. Must not know what a stage computes, nor optimizers: these are the
caller's, over `parameters()`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ppctl.checkpoint.agreement import AgreeingRanks
from ppctl.comm.communicator import Communicator
from ppctl.config.pipeline_config import PipelineConfig
from ppctl.engine.dry_pass import dry_pass, representatives
from ppctl.engine.interpreter import run_schedule
from ppctl.engine.stage import StageProgram
from ppctl.errors import CheckpointError, ConfigError, Problem
from ppctl.modules.agreement import CODE, SameCall, agreed
from ppctl.modules.batch import Batch, divide
from ppctl.modules.build import (
    check_kinds,
    device_of,
    placement_of,
    schedule_of,
    source_of,
    start_process_group,
)
from ppctl.modules.loss import StepLoss
from ppctl.modules.sources import (
    Source,
    wanted_policy,
)
from ppctl.modules.survey import Survey
from ppctl.modules.sync import GradientSync
from ppctl.parallel.ties import TiedGradients, TiedUse
from ppctl.schedule.action import BACKWARDS, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import POLICIES, forwards_alone


@dataclass(frozen=True, slots=True)
class PipelineInfo:
    """What a pipeline is on this rank."""

    pp: int
    pp_rank: int
    stages: tuple[int, ...]
    """This rank's stages in model order; the pipeline has `num_stages`."""
    num_stages: int
    has_first_stage: bool
    has_last_stage: bool
    schedule: Schedule | None
    """Of the last step, with its messages; None before the first one."""


def pipeline(
    model: nn.Module | str | os.PathLike[str],
    config: PipelineConfig | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    device: torch.device | str | None = None,
    group: ProcessGroup | None = None,
    parallelize: Callable[[nn.Module], nn.Module | None] | None = None,
) -> Pipeline:
    """Cut a model into stages and make those of this rank. A collective of the pipeline's ranks.

    `model` is a model of transformers (an instance, with weights or on meta, or a directory with config.json and
    safetensors), or any nn.Module, cut by `config.module_fqns_per_model_part`. `group` holds the pipeline's ranks in pp
    order, by default all ranks; under torchrun the default group is made here if it is not there, and a process that is
    alone is a pipeline of one rank. `device` is by default the GPU of LOCAL_RANK, else the CPU. `loss_fn` stands in for
    that of the config. `parallelize` is called with each stage's module, to shard it over other ranks
    (`fully_shard`), and may return another one.

    Raises ConfigError and CheckpointError on all ranks, before any message between stages: PP-E130 for a config that
    cannot be followed, PP-E131 for names, PP-E132 for a module that cannot be cut, PP-E526 to PP-E529 and PP-E538 as
    `model.from=DIR` does.
    """
    wanted = PipelineConfig() if config is None else config
    check_kinds(model, wanted, loss_fn, parallelize)
    if loss_fn is not None:
        wanted = replace(wanted, loss_fn=loss_fn)
    place = device_of(device)
    start_process_group(place)
    ranks = AgreeingRanks(group)
    source = source_of(model, wanted, ranks)
    return Pipeline(source, wanted, place, ranks, parallelize)


class Pipeline:
    """This rank's stages of a model. `step` and `eval` are collectives of the pipeline; `pipeline` makes it."""

    def __init__(
        self,
        source: Source,
        config: PipelineConfig,
        device: torch.device,
        ranks: AgreeingRanks,
        parallelize: Callable[[nn.Module], nn.Module | None] | None,
    ) -> None:
        self.config, self.device = config, device
        self._source, self._ranks = source, ranks
        self.placement = agreed(ranks, "place the stages", lambda: placement_of(config, ranks.size, source.num_stages))
        self._numbers = self.placement.stages_of(ranks.rank)
        made = agreed(
            ranks, "make the stages", lambda: {n: source.make_stage(n, device) for n in self._numbers}, own=True
        )
        self._stages: dict[int, Any] = made
        self._modules: dict[int, Any] = {n: (parallelize(m) or m) if parallelize else m for n, m in made.items()}
        self._sync = {n: GradientSync(module) for n, module in self._modules.items()}
        agreed(ranks, "look at how stages are sharded", partial(self._check_sync, parallelize is not None))
        self._ties = self._tie()
        self._known: dict[str, tuple[Survey, Schedule, Schedule]] = {}
        self._communicator: Communicator | None = None
        self._schedule: Schedule | None = None
        self._same = SameCall(ranks)
        self._broken = ""
        """What ended a step amid its messages."""

    # --- what a training loop uses -----------------------------------------------------------------------------------

    def step(self, batch: Any = None, **named: Any) -> Tensor | None:
        """Forward and backward of a batch: gradients are added to `.grad`. The loss on the rank of the last stage.

        Every rank gives the same batch, `(inputs, labels)` or a mapping with `labels`, or that by keyword
        (`step(input_ids=..., attention_mask=..., labels=...)`): masks and positions are made of it on every stage. Its
        rows are microbatches of `pp_microbatch_size`; with `pp_batch_size` above 1 they run in several schedule calls.
        The loss is the sum of its microbatches' shares (`StepLoss`). Raises ConfigError (PP-E130, PP-E132; PP-E553 for
        an exception of the user's code) on all ranks before any message; PP-E554 where an earlier step ended amid its
        messages.
        """
        return self._run(_given(batch, named), training=True)

    def eval(self, batch: Any = None, **named: Any) -> Tensor | None:
        """The loss of a batch in evaluation mode, without gradients, on the rank of the last stage; else as `step`."""
        return self._run(_given(batch, named), training=False)

    @property
    def parts(self) -> list[nn.Module]:
        """The modules of this rank's stages."""
        return list(self._modules.values())

    @property
    def info(self) -> PipelineInfo:
        """Stages, ranks and the schedule."""
        last = self.placement.num_stages - 1
        ends = 0 in self._numbers, last in self._numbers
        return PipelineInfo(self._ranks.size, self._ranks.rank, self._numbers, last + 1, *ends, self._schedule)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the names that the whole model gives them.

        Each use of a shared parameter is one of its own. All uses have the same gradient after a step, so that any
        optimizer that looks at one element at a time keeps them equal.
        """
        for stage in self._stages.values():
            yield from stage.canonical_parameters().items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer."""
        yield from (parameter for _, parameter in self.named_parameters())

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and saved buffers by the whole model's names; over all ranks they are its state."""
        buffers = (item for stage in self._stages.values() for item in stage.canonical_buffers().items())
        return {**{name: p.detach() for name, p in self.named_parameters()}, **dict(buffers)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's values from the state of the whole model, or of these stages.

        Raises CheckpointError (PP-E537), with nothing taken, naming tensors that are missing or of another shape, and
        PP-E539 for stages that are sharded over other ranks.
        """
        owner = {use.name: uses[0].name for uses in self._source.ties for use in uses}
        own = self.state_dict()
        found = {name: state.get(name, state.get(owner.get(name, name))) for name in own}
        wrong = [f"{n} is missing" for n, tensor in found.items() if tensor is None]
        wrong += [
            f"{name}: {list(tensor.shape)} given, {list(own[name].shape)} expected"
            for name, tensor in found.items()
            if tensor is not None and tensor.shape != own[name].shape
        ]
        if wrong:
            listed = "\n".join(wrong[:20])
            raise CheckpointError(Problem("PP-E537", "the state does not fit this rank's stages", "", listed))
        if any(sync.shards for sync in self._sync.values()):
            message = "stages that fully_shard has divided hold parts of tensors"
            remedy = "torch.distributed.checkpoint.load(pipeline.state_dict(), checkpoint_id=...)"
            raise CheckpointError(Problem("PP-E539", message, remedy))
        for name, tensor in found.items():
            assert tensor is not None  # it would be in `wrong`
            own[name].copy_(tensor)

    def close(self) -> None:
        """End the pipeline's connections; every rank calls it, before the process groups go."""
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None

    # --- how it runs -------------------------------------------------------------------------------------------------

    def _run(self, given: Any, *, training: bool) -> Tensor | None:
        batch = self._begin(given, training=training)
        with nullcontext() if training else self._evaluating():
            return self._run_calls(batch, training=training)

    def _run_calls(self, batch: Batch, *, training: bool) -> Tensor | None:
        survey, schedule, forwards = self._known[batch.shapes]
        loss = StepLoss(self.config, batch.microbatches)
        held = self._hold_tied() if training else {}
        losses: list[Tensor] = []
        calls = range(0, len(batch.microbatches), batch.per_call)
        for first in calls:
            if training:
                self._schedule = schedule
            programs = [
                self._program(number, batch, first, survey, loss, losses, last_call=first == calls[-1])
                for number in self._numbers
            ]
            self._run_schedule(schedule if training else forwards, programs)
        if training:
            for tied in self._ties:
                tied.sum()
            for parameter, before in held.items():
                parameter.grad = before if parameter.grad is None else before + parameter.grad
        return torch.stack(losses).sum() if losses else None

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """All modules are in evaluation mode inside."""
        modes = {each: each.training for module in self._modules.values() for each in module.modules()}
        for module in self._modules.values():
            module.eval()
        try:
            yield
        finally:
            for each, training in modes.items():
                each.training = training

    def _run_schedule(self, schedule: Schedule, programs: list[StageProgram]) -> None:
        try:
            run_schedule(schedule, programs, self._communicator)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise

    def _begin(self, given: Any, *, training: bool = True) -> Batch:
        """The batch in microbatches; the first one of its shape is looked at, and agreed on by all ranks."""
        if self._broken and self._ranks.size > 1:
            message = f"an earlier step ended amid its messages, which other ranks may wait for: {self._broken}"
            raise ConfigError(Problem("PP-E554", message, "end all ranks, and start them from a checkpoint"))
        known: Batch | None = None
        with suppress(Exception):  # all ranks raise it, below
            _check_gradients(training)
            known = divide(given, self.config, self.device)
        call = "a step" if training else "an evaluation"
        ready = known is not None and known.shapes in self._known
        if self._same(f"{call} of {known.shapes}" if known is not None and ready else None):
            assert known is not None  # the text is there
            return known
        batch: Batch
        batch, survey = agreed(
            self._ranks,
            "look at the batch",
            partial(self._look_at, given, training),
            own=True,
            told=lambda found: f"{call} of {found[0].shapes}",
        )
        place, number = self.placement, batch.per_call
        schedule = agreed(self._ranks, "make the schedule", lambda: schedule_of(self.config, place, number))
        forwards = lower(forwards_alone(place, number))
        if self._communicator is None and self._ranks.size > 1:
            group = self._ranks.group or dist.group.WORLD
            assert group is not None  # there is more than one rank
            self._communicator = Communicator(group, channels=schedule.capacities, device=self.device)
        self._known[batch.shapes] = survey, schedule, forwards
        if self.device.type == "cuda":
            self._dry_pass(batch)
        return batch

    def _dry_pass(self, batch: Batch) -> None:
        """Run all kernels of a step and of an evaluation once, before the first message (see `engine.dry_pass`).

        Nothing that a step reads is different afterwards: gradients, buffers, draws of random numbers.
        """
        survey, schedule, _ = self._known[batch.shapes]
        self._schedule = schedule
        held = [(parameter, parameter.grad) for parameter in self.parameters()]
        buffers = [(b, b.clone()) for m in self._modules.values() for b in m.buffers() if 0 not in b.stride()]
        self.zero_grad()
        on_gpu = self.device.type == "cuda"
        loss = StepLoss(self.config, batch.microbatches)
        with torch.random.fork_rng([self.device] if on_gpu else []):
            for number in self._numbers:
                program = self._program(number, batch, 0, survey, loss, [], last_call=True)
                if program.around_backward is not None:  # what is not summed now would be added to the step's gradients
                    program = replace(program, around_backward=self._sync[number].at_once)
                is_last = number == self.placement.num_stages - 1
                run = partial(dry_pass, program, self._ranks.rank, device=self.device, is_last=is_last)
                splits = [(number, mb) in schedule.split for mb in range(schedule.num_microbatches)]
                with self._evaluating():  # first: a backward lets sharded weights go that a forward has gathered
                    run(0, training=False)
                for mb in representatives(splits):
                    run(mb, split=splits[mb])
        for parameter, gradient in held:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        if on_gpu:
            torch.cuda.synchronize(self.device)

    def _look_at(self, given: Any, training: bool) -> tuple[Batch, Survey]:
        _check_gradients(training)
        batch = divide(given, self.config, self.device)
        loss, first = StepLoss(self.config, batch.microbatches), batch.microbatches[0]
        survey = self._source.look_at(first)
        ends = self.placement.num_stages - 1 in self._numbers
        if survey.output is not None and (ends or self.config.loss_fn is None):
            loss.try_out(survey.output, first.labels, self.device)
        wanted, sent = self.config.dtype, {edge.dtype for edge in survey.edges}
        wanted = getattr(torch, wanted) if isinstance(wanted, str) else wanted
        if wanted is not None and sent - {wanted}:
            message = f"dtype is {wanted}, and the stages send {', '.join(map(str, sent))}"
            raise ConfigError(Problem(CODE, message, "PipelineConfig(dtype=None)"))
        return batch, survey

    def _program(
        self,
        number: int,
        batch: Batch,
        first: int,
        survey: Survey,
        loss: StepLoss,
        losses: list[Tensor],
        *,
        last_call: bool,
    ) -> StageProgram:
        module, is_last = self._modules[number], number == self.placement.num_stages - 1
        if survey.forms:
            self._stages[number].forms = survey.forms

        def forward(mb: int, received: tuple[Tensor, ...]) -> tuple[Any, ...]:
            microbatch = batch.microbatches[first + mb]
            output = self._source.run(module, received[0] if received else None, microbatch)
            if not is_last:
                return (output,)
            share = loss(output, microbatch.labels)
            losses.append(share.detach())
            return (share,)

        sync, around = self._sync[number], None
        if self.config.patch_stage_backward_maybe_with_nosync and sync.shards:
            row = self._schedule.actions[self._ranks.rank] if self._schedule is not None else ()
            ends = [action.mb for action in row if action.stage == number and action.op in BACKWARDS]
            around = partial(sync.around, ends[-1] if ends and last_call else -1)
        receives = (survey.edges[number - 1],) if number else ()
        sends = () if is_last else (survey.edges[number],)
        whole = getattr(self._stages[number], "whole", ())
        return StageProgram(number, forward, receives, sends, around_backward=around, whole=whole)

    def _tie(self) -> list[TiedGradients]:
        """Every shared parameter's sum over its uses: one accumulator per use, summed once after a step."""
        own = dict(self.named_parameters())
        group = self._ranks.group

        def rank_of(stage: int) -> int:
            pp_rank = self.placement.rank_of(stage)
            return pp_rank if group is None or self._ranks.alone else dist.get_global_rank(group, pp_rank)

        here = 0 if self._ranks.alone else dist.get_rank()
        return [
            TiedGradients([TiedUse(rank_of(stage), name) for stage, name in uses], own, here)
            for uses in self._source.ties
        ]

    def _hold_tied(self) -> dict[nn.Parameter, Tensor]:
        """Take the gradients of earlier steps, which are sums already, off the shared parameters."""
        held = {}
        for tied in self._ties:
            for parameter in tied.own.values():
                if parameter.grad is not None:
                    held[parameter], parameter.grad = parameter.grad, None
        return held

    def _check_sync(self, sharded: bool) -> None:
        shards = any(sync.shards for sync in self._sync.values())
        splits = self.config.pp_schedule_csv is None and POLICIES[wanted_policy(self.config)].splits
        if shards and splits:
            message = f"fully_shard reduces gradients in a whole backward, and {self.config.pp_schedule} splits it"
            raise ConfigError(Problem(CODE, message, "pp_schedule='1f1b'"))
        if shards and self._source.ties:
            message = "parameters that several modules share have one gradient per use, and fully_shard divides each"
            raise ConfigError(Problem(CODE, message, "a model with tie_word_embeddings=False"))


def _check_gradients(training: bool) -> None:
    """Raise ConfigError (PP-E130) for a step where nothing has a gradient."""
    if training and not torch.is_grad_enabled():
        message = "gradients are switched off here (no_grad or inference_mode), and a step makes them"
        raise ConfigError(Problem(CODE, message, "pipeline.eval(batch), or pipeline.step(batch) outside of it"))


def _given(batch: Any, named: Mapping[str, Any]) -> Any:
    """A batch as it was given, or by keyword."""
    return named if batch is None and named else {"batch": batch, **named} if named else batch
