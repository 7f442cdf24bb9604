"""`ppctl.pipeline` makes this rank's stages from a model and a PipelineConfig, and runs steps and evaluations of them.

Optimizers are the caller's, over `parameters()`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.comm.communicator import Communicator, goes_by_group
from ppctl.config.pipeline_config import PipelineConfig
from ppctl.engine.interpreter import run_schedule
from ppctl.foreign.cut_proof import Crossing
from ppctl.modules.batch import GivenBatch, StepLoss, divide
from ppctl.modules.calls import BatchRun, Prepared, run_dry
from ppctl.modules.pipeline_agreement import SameCall, agreed, misuse, on_host, refuse_unlike
from ppctl.modules.pipeline_parts import (
    check_kinds,
    device_of,
    message_dtype,
    placement_of,
    refuse_uneven_groups,
    schedule_of,
    source_of,
    start_process_group,
)
from ppctl.modules.rank_stages import RankStages
from ppctl.modules.sources import PipelineModel
from ppctl.schedule.action import Placement, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import forwards_alone

_MOST_KNOWN = 64
"""The most forms of batches that stay prepared; the oldest is forgotten."""


@dataclass(frozen=True, slots=True)
class PipelineInfo:
    """The stages and the schedule of a pipeline on this rank."""

    pp: int
    pp_rank: int
    stages: tuple[int, ...]
    """This rank's stages in model order; the pipeline has `num_stages`."""
    num_stages: int
    has_first_stage: bool
    has_last_stage: bool
    schedule: Schedule | None
    """The schedule of the last step, with its messages; None before the first one."""


def pipeline(
    model: nn.Module | str | os.PathLike[str],
    config: PipelineConfig | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    device: torch.device | str | None = None,
    group: ProcessGroup | None = None,
    parallelize: Callable[[nn.Module], nn.Module | None] | None = None,
    transport: str = "auto",
) -> Pipeline:
    """Cut a model into stages and build this rank's stages. A collective of the pipeline's ranks.

    `model` is a transformers model (an instance, with weights or on meta, or a directory with config.json and
    safetensors), or any nn.Module, cut by `config.module_fqns_per_model_part`. `group` has the pipeline's ranks in pp
    order, by default all ranks. Under torchrun the default group is created if necessary; a single process is a
    pipeline of one rank. `device` is by default the GPU of LOCAL_RANK, else the CPU. `loss_fn` replaces the config's.
    `parallelize` is called with each stage's module, to shard it over other ranks (`fully_shard`), and may return
    another module. `transport` is how messages between stages travel: `plain` (batches over `group`), `channels` (while
    stages compute), or `auto`, which is plain on NCCL.

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
    return Pipeline(source, wanted, place, ranks, parallelize, transport)


class Pipeline:
    """This rank's stages of a model, made by `pipeline`. `step` and `eval` are collectives of the pipeline's ranks."""

    def __init__(
        self,
        source: PipelineModel,
        config: PipelineConfig,
        device: torch.device,
        ranks: AgreeingRanks,
        parallelize: Callable[[nn.Module], nn.Module | None] | None,
        transport: str,
    ) -> None:
        self.config, self.device = config, device
        self._source, self._ranks, self._transport = source, ranks, transport
        self.placement = agreed(
            ranks, "place the stages", lambda: placement_of(config, ranks.size, source.num_stages), of=Placement
        )
        tied = {self.placement.rank_of(stage) for uses in source.ties for stage in uses.values()}
        if members := tied if on_host(ranks) else set(range(ranks.size)):  # the members of a group to make
            refuse_uneven_groups(ranks, members)
        self._stages = RankStages(source, config, device, ranks, self.placement, parallelize)
        self._known: dict[str, Prepared] = {}
        self._communicator: Communicator | None = None
        self._schedule: Schedule | None = None
        self._same = SameCall(ranks)
        self._broken = ""
        """The exception that ended a step between its messages."""
        self._closed = False

    # --- what a training loop uses -----------------------------------------------------------------------------------

    def step(self, batch: Any = None, **named: Any) -> Tensor | None:
        """Run forward and backward of a batch, adding gradients to `.grad`; returns the loss on the last stage's rank.

        Every rank passes the same batch: `(inputs, labels)`, a mapping with `labels`, or its entries by keyword
        (`step(input_ids=..., attention_mask=..., labels=...)`). Every stage computes masks and positions from it. Its
        rows form microbatches of `pp_microbatch_size`; with `pp_batch_size` above 1 they run in several schedule calls.
        The loss is the sum of the microbatches' shares (`StepLoss`). Raises on all ranks: ConfigError before any
        message (PP-E130, PP-E132; PP-E553 for an exception of the user's code; PP-E554 if an earlier step ended amid
        its messages), TrainingError (PP-E558) after the messages if a forward, a loss or a backward failed."""
        return self._run(_given(batch, named), training=True)

    def eval(self, batch: Any = None, **named: Any) -> Tensor | None:
        """Like `step`, in evaluation mode and without gradients; returns the loss on the last stage's rank."""
        return self._run(_given(batch, named), training=False)

    @property
    def parts(self) -> list[nn.Module]:
        """The modules of this rank's stages."""
        return list(self._stages.modules.values())

    @property
    def info(self) -> PipelineInfo:
        """This rank's place in the pipeline, its stages, and the schedule of the last step."""
        last, numbers = self.placement.num_stages - 1, self._stages.numbers
        ends = 0 in numbers, last in numbers
        return PipelineInfo(self._ranks.size, self._ranks.rank, numbers, last + 1, *ends, self._schedule)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, under the names of the whole model.

        Each use of a shared parameter is a parameter of its own. All uses have the same gradient after a step, so any
        elementwise optimizer keeps them equal.
        """
        return self._stages.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer."""
        yield from (parameter for _, parameter in self.named_parameters())

    def zero_grad(self) -> None:
        """Set the gradients of this rank's parameters to None."""
        for parameter in self.parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and saved buffers under the model's names; all ranks' together are its state."""
        return self._stages.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's values from the state of the whole model, or of these stages.

        Raises CheckpointError and loads nothing if tensors are missing, have another shape, or differ although the
        model shares them (PP-E537), or if stages are sharded over other ranks (PP-E539). The next step or evaluation
        compares the shared ones over all ranks, and raises CheckpointError (PP-E504) if they differ.
        """
        self._stages.load_state_dict(state)
        self._known.clear()  # the next step compares shared parameters before it runs

    def close(self) -> None:
        """End the pipeline's connections; every rank calls it before the process groups are destroyed."""
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None
        self._closed = True

    # --- how it runs -------------------------------------------------------------------------------------------------

    def _run(self, given: Any, *, training: bool) -> Tensor | None:
        run = self._run_of(self._begin(given, training=training))
        with self._stages.summing_ties() if training else self._stages.evaluating():
            self._run_calls(run, training=training)
        return torch.stack(run.losses).sum() if run.losses else None

    def _run_of(self, batch: GivenBatch) -> BatchRun:
        prepared = self._known[batch.shapes]
        return BatchRun(self._source, self._stages, self.config, batch, prepared, self._ranks.rank, self.device)

    def _run_calls(self, run: BatchRun, *, training: bool) -> None:
        """Run all schedule calls of a batch; raises TrainingError (PP-E558) on all ranks if one of them failed. Any
        other error between messages breaks the pipeline for good."""
        schedule = run.prepared.schedule if training else run.prepared.forwards
        if training:
            self._schedule = schedule
        run.carries_on = self._ranks.size > 1
        calls = range(0, len(run.batch.microbatches), run.batch.per_call)
        try:
            for first in calls:
                programs = run.programs(first, last_call=first == calls[-1])
                run_schedule(schedule, programs, self._communicator)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise
        failed = self._same.last_failed(failed=run.failed is not None)
        if failed is not None:
            raise run.failure(failed) from run.failed

    def _begin(self, given: Any, *, training: bool = True) -> GivenBatch:
        """Divide a batch into microbatches. For the first batch of a shape all ranks check it, agree on it, and prepare
        its messages and schedules; on a GPU they also run it dry. A collective."""
        known: GivenBatch | None = None
        with suppress(Exception):  # all ranks raise the error below
            self._check(training=training)
            divided = self._divide(given)
            if divided.on_host:  # on a GPU `_look_at` reads only the first batch of a shape, since this waits
                self._source.refuse_values(divided.given)
            known = divided
        call = "a step" if training else "an evaluation"
        ready = known is not None and known.shapes in self._known and self._stages.trains_as_compared
        if self._same(f"{call} of {known.shapes}" if known is not None and ready else None, self._broken):
            assert known is not None  # set with its text
            return known
        batch: GivenBatch
        batch, crossing = agreed(self._ranks, "look at the batch", partial(self._look_at, given, training), own=True)
        refuse_unlike(self._ranks, "batches", [f"{call} of {batch.shapes}"])
        self._stages.compare_ties()
        place, number = self.placement, batch.per_call
        group = (self._ranks.group or dist.group.WORLD) if self._ranks.size > 1 else None
        batched = group is not None and goes_by_group(group, self._transport)
        schedule = agreed(
            self._ranks, "make the schedule", lambda: schedule_of(self.config, place, number, batched), of=Schedule
        )
        forwards = lower(forwards_alone(place, number), batched=batched)
        if self._communicator is None and group is not None:
            channels, how = schedule.capacities, self._transport
            self._communicator = Communicator(group, channels=channels, device=self.device, transport=how)
        if batch.shapes not in self._known and len(self._known) == _MOST_KNOWN:
            del self._known[next(iter(self._known))]  # on all ranks the same one
        self._known[batch.shapes] = Prepared(crossing, schedule, forwards)
        if self.device.type == "cuda":
            self._dry_pass(batch)
        return batch

    def _dry_pass(self, batch: GivenBatch) -> None:
        run_dry(self._run_of(batch), self.device)

    def _divide(self, given: Any) -> GivenBatch:
        return divide(given, self.config, self.device, reads_masks=self._source.reads_masks)

    def _check(self, *, training: bool) -> None:
        """Raise ConfigError (PP-E130) if the pipeline is closed, or in `training` if gradients are disabled."""
        if self._closed:
            raise misuse("the pipeline is closed", "pipeline = ppctl.pipeline(model, config)")
        if training and not torch.is_grad_enabled():
            message = "gradients are disabled (no_grad or inference_mode), but a step computes them"
            raise misuse(message, "pipeline.eval(batch), or pipeline.step(batch) outside of it")

    def _look_at(self, given: Any, training: bool) -> tuple[GivenBatch, Crossing]:
        """Check a batch on this rank before messages; returns its microbatches, and the tensors that cross the cuts.
        Raises ConfigError if the loss cannot be computed."""
        self._check(training=training)
        batch = self._divide(given)
        loss, first = StepLoss(self.config, batch.microbatches), batch.microbatches[0]
        self._source.refuse_values(batch.given)
        crossing = self._source.look_at(first, self.device)
        ends = self.placement.num_stages - 1 in self._stages.numbers
        if crossing.output is not None and (ends or self.config.loss_fn is None):
            loss.try_out(crossing.output, first.labels, self.device)
        wanted, others = message_dtype(self.config), [e.dtype for e in crossing.edges if not e.is_floating_point()]
        if wanted is not None and others:
            message = f"dtype is {wanted}, but the stages send {others[0]}"
            raise misuse(message, "PipelineConfig(dtype=None)")
        return batch, crossing


def _given(batch: Any, named: Mapping[str, Any]) -> Any:
    return named if batch is None and named else {"batch": batch, **named} if named else batch
