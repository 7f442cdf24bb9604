"""One optimizer step on one rank: pipeline, sums, norm, clip, update.

Knows the order of these and nothing of runs: no files, no screen, no checkpoints. Must not know which schedule it runs.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppctl.accelerators import device_called, preset
from ppctl.comm.buffers import Message
from ppctl.config.precision import autocast_dtype
from ppctl.data.batches import Batches, StepBatch
from ppctl.engine.dry_pass import dry_pass
from ppctl.engine.interpreter import run_schedule
from ppctl.engine.stage import StageProgram
from ppctl.errors import Problem, TrainingError
from ppctl.geometry.layers import Layer
from ppctl.megatron.microbatches import checkpoint_flags, forwards_in_flight
from ppctl.model.loss import microbatch_loss, mtp_targets, without
from ppctl.model.packing import ROWS, Packing
from ppctl.model.stage import StageModule
from ppctl.plan import StageSpec
from ppctl.schedule.sync_events import gathers_ahead
from ppctl.topology import RankGrid
from ppctl.train.balance import Balance, auxiliary_width
from ppctl.train.grad_norm import GradNorm, clip_gradients
from ppctl.train.optimizer import lr_at, set_lr
from ppctl.train.packing import packing_of
from ppctl.train.precision import in_precision, unscale
from ppctl.train.report import (
    NOTHING,
    RankReport,
    Reports,
    bubble_fraction,
    check_reports,
    gather_reports,
    slowest_stage,
    stop_reason,
)
from ppctl.train.session import Session


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to, the same on every rank."""

    record: dict[str, Any]
    """The line of metrics.jsonl, without what only the run knows."""
    stop: str | None
    """Why the run has to stop, where some rank was asked to."""


class Trainer:
    """Runs steps on a session. `stop_requested` is asked once a step, before the ranks agree."""

    def __init__(self, session: Session, batches: Batches | None, stop_requested: Callable[[], int]) -> None:
        self.session = session
        self.batches = batches
        self.stop_requested = stop_requested
        self.batch: StepBatch | None = None
        self.losses: dict[int, Tensor] = {}
        """By microbatch of the step; on the rank that owns the loss."""
        self.mtp_losses: dict[int, Tensor] = {}
        """The same, of the MTP modules: the mean over them."""
        self.calls = session.plan.gradient_accumulation_steps
        self.first = 0
        """The step's microbatch that is the schedule call's number 0."""
        self.spared = _spared_from_recompute(session)
        row = session.plan.schedule.actions[session.own.pp_rank]
        self.gathers = {(action.stage, action.mb): stage for action, stage in gathers_ahead(row).items()}
        """(stage, microbatch) -> the stage whose weights begin to be gathered before that forward, if they are."""
        self.peak_flops = _peak_flops(session)
        programs = [self._program(spec, session.stages[spec.stage]) for spec in session.own.stages]
        autocast = autocast_dtype(session.config.parallel)
        self.programs = [in_precision(each, autocast, session.device, session.loss_scale) for each in programs]
        plan = session.plan
        grid = RankGrid(plan.sizes)
        self.pipeline = grid.group_of("pp", 0)
        stages = [plan.for_rank(rank).stages for rank in self.pipeline]
        numbers = [[spec.stage for spec in own] for own in stages]
        self.stages_of = np.array([numbers[grid.coordinates(rank)["pp"]] for rank in range(plan.sizes.world)])
        """[ranks, chunks]: the stages of every rank."""
        self.auxiliary_width = auxiliary_width(stages, session.config.model)
        self.balance = Balance(
            [router for module in session.stages.values() for router in module.routers()],
            session.config.model,
            weight=1.0 if session.config.pipeline.scale_grads_in_schedule else 1.0 / self._microbatches_of_all(),
            group=session.dp_group if plan.sizes.dp > 1 else None,
        )

    def step(self, step: int) -> StepResult:
        """Run the step that follows `step` completed ones; whoever is told of it counts from 1.

        Raises TrainingError, on all ranks alike, where numbers are not finite.
        """
        s, started = self.session, time.perf_counter()
        self._run_pipeline(step)
        if s.heartbeat is not None:
            s.heartbeat.set_state("updating")
        reports = gather_reports(self._report(), s.own.rank, s.world_groups)
        check_reports(reports, step + 1, s.plan.stages[-1].stage)
        # A step that is left out does not use up the schedule (as in Megatron). Ranks without parameters count none.
        lr = lr_at(int(reports.column("updates").max()), s.config.optim, s.config.train.steps)
        s.reducer.finish()
        s.ties.sum()
        unscale(s.weights.master, s.loss_scale)
        norm = s.norm.measure(s.weights.master)
        grad_norm = norm.item()
        overflow = not math.isfinite(grad_norm)
        if overflow and (s.loss_scale is None or s.loss_scale.exhausted):
            raise _bad_norm(step + 1, norm)
        if not overflow:
            self._update(norm, lr)
        seconds = time.perf_counter() - started
        record = {"step": step + 1, "loss": reports.total("loss"), "grad_norm": grad_norm, "lr": lr}
        if s.loss_scale is not None:
            record |= {"loss_scale": s.loss_scale.scale, "skipped": overflow}
            s.loss_scale.update(overflow=overflow)
        record |= self._further_losses(reports)
        return StepResult(record | self._figures(reports, seconds), stop_reason(reports))

    def _update(self, norm: GradNorm, lr: float) -> None:
        s = self.session
        clip_gradients(s.weights.master, norm, s.config.optim.clip_grad)
        set_lr(s.optimizer, lr)
        s.optimizer.step()
        s.weights.publish()
        self.balance.move_biases()

    def dry_pass(self, step: int) -> None:
        """Run all kernels of a step's list once, without a message: what `engine.dry_pass` is for.

        A collective where stages have some of their own (experts on several ranks, gathered weights, sums of gradients
        over replicas). Nothing that a step reads is different behind it: weights, gradients, ledgers and every draw of
        random numbers.
        """
        s = self.session
        self._begin(step)
        self.first = 0
        for program in self.programs:
            is_last = program.stage == len(s.plan.stages) - 1
            for mb in self._different_ones(program.stage):
                dry_pass(program, s.own.pp_rank, mb, s.device, is_last=is_last)
            s.stages[program.stage].eval()
            dry_pass(program, s.own.pp_rank, 0, s.device, is_last=is_last, training=False)
            s.stages[program.stage].train()
            self._reduce(program.stage)
        s.reducer.finish()
        s.weights.clear_gradients()
        if s.device.type == "cuda":
            torch.cuda.synchronize(s.device)

    def _different_ones(self, stage: int) -> list[int]:
        """Microbatches of a stage that between them run all of its kernels: the second one adds to the first one's
        gradients, and of some the activations are recomputed, of others kept."""
        kinds = {(stage, mb) in self.spared: mb for mb in range(self.session.plan.num_microbatches)}
        return [*kinds.values(), *kinds.values()]

    def _begin(self, step: int) -> None:
        """Forget the step before, and fetch the samples of this one."""
        s = self.session
        s.weights.clear_gradients()
        self.losses, self.mtp_losses = {}, {}
        self.balance.begin(1.0 if s.loss_scale is None else s.loss_scale.scale)
        self.batch = None if self.batches is None else _moved(self.batches.step(step), s.device)

    def _run_pipeline(self, step: int) -> None:
        s = self.session
        self._begin(step)
        for call in range(self.calls):
            self.first = call * s.plan.num_microbatches
            run_schedule(
                s.plan.schedule,
                self.programs,
                s.communicator,
                deallocate_pipeline_outputs=s.config.parallel.deallocate_pipeline_outputs,
                reduce_grad=self._reduce if call + 1 == self.calls else None,
                recorder=s.recorder,
                heartbeat=s.heartbeat,
            )

    def forward_only(self, batch: StepBatch | None) -> list[float]:
        """The losses of `batch` by microbatch, on the rank that owns the loss; weights and gradients stay as they are.

        A collective of the pipeline. The stages are in evaluation mode meanwhile.
        """
        s = self.session
        self.batch, self.losses = None if batch is None else _moved(batch, s.device), {}
        for stage in s.stages.values():
            stage.eval()
        for call in range(self.calls):
            self.first = call * s.plan.num_microbatches
            run_schedule(s.plan.forward_schedule, self.programs, s.communicator, heartbeat=s.heartbeat)
        if s.gathered is not None:
            s.gathered.release_all()
        for stage in s.stages.values():
            stage.train()
        return [float(self.losses[mb]) for mb in sorted(self.losses)]

    def _reduce(self, stage: int) -> None:
        """What happens to a stage's weights and gradients once the step's last gradient is there."""
        if self.session.gathered is not None:
            self.session.gathered.release(stage)
        scaled = self.session.config.pipeline.scale_grads_in_schedule
        self.session.reducer.reduce(stage, self._microbatches_of_all() if scaled else 1.0)

    def _microbatches_of_all(self) -> int:
        """Microbatches of the global batch: of all calls, on all data-parallel ranks."""
        return self.calls * self.session.plan.num_microbatches * self.session.plan.sizes.dp

    def _program(self, spec: StageSpec, module: StageModule) -> StageProgram:
        """What the engine calls: the module, fed with tokens where it reads them, closed by the loss where it ends."""
        embeds, predicts, ends = (Layer(kind) in spec.layers for kind in ("embedding", "mtp", "loss"))
        recompute = self.session.recompute[spec.stage]

        def forward(mb: int, inputs: Message) -> Message:
            recompute.on = (spec.stage, mb) not in self.spared
            packing, tokens = self._packing(self.first + mb), None
            if embeds or predicts:
                tokens = self._own(self.batch).tokens[self.first + mb]
            given = (tokens,) if embeds else inputs
            outputs: Message = module(*given, tokens=tokens, packing=packing)
            return (self._loss(mb, *outputs),) if ends else outputs

        gathered = self.session.gathered

        def prepare(mb: int) -> None:
            assert gathered is not None
            gathered.hold(spec.stage)
            if (spec.stage, mb) in self.gathers:
                gathered.begin(self.gathers[spec.stage, mb])

        return StageProgram(
            spec.stage, forward, spec.receives, spec.sends, prepare=None if gathered is None else prepare
        )

    def _loss(self, mb: int, logits: Tensor, *of_modules: Tensor) -> Tensor:
        """The loss to start from; notes the microbatch's share of the step's, and of its MTP modules'.

        The same numbers, unless the schedule scales: then it starts from the mean over the microbatch's own tokens.
        """
        pipeline, model = self.session.config.pipeline, self.session.config.model
        batch, mb = self._own(self.batch), self.first + mb
        labels, mask = batch.labels[mb], batch.loss_mask[mb]
        scaled = pipeline.scale_grads_in_schedule and torch.is_grad_enabled()
        tokens = mask.sum().clamp(min=1) if scaled else batch.total_tokens
        shares = self._microbatches_of_all() if scaled else 1

        def against(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
            if pipeline.loss_fn is None:
                return microbatch_loss(logits, labels, mask, tokens)
            loss: Tensor = pipeline.loss_fn(logits, without(labels, mask))
            return loss / (1.0 if scaled else batch.total_tokens)

        loss = against(logits, labels, mask)
        self.losses[mb] = loss.detach() / shares
        if of_modules:
            targets = mtp_targets(labels, mask, len(of_modules), self._packing(mb).documents)
            further = [against(each, *target) for each, target in zip(of_modules, targets, strict=True)]
            mean = torch.stack(further).mean()
            self.mtp_losses[mb] = mean.detach() / shares
            loss = loss + model.mtp_loss_scaling_factor * mean
        return loss

    def _packing(self, mb: int) -> Packing:
        """Where documents lie in the step's microbatch `mb`; nowhere, on ranks without layers that would ask."""
        return ROWS if self.batch is None else packing_of(self.batch.positions, self.batch.documents, mb)

    def _own(self, batch: StepBatch | None) -> StepBatch:
        assert batch is not None  # only stages with E, m or L ask, and their ranks read data
        return batch

    def _report(self) -> RankReport:
        """This rank's numbers. Times are those of the step's last schedule call; all its calls are alike."""
        s, report = self.session, RankReport(stop=float(self.stop_requested()))
        if self.batch is not None:
            report.checksum = float(self.batch.checksum)
        if self.losses:
            losses = torch.stack([self.losses[mb] for mb in sorted(self.losses)]).tolist()
            report.loss = sum(losses)
            report.loss_tokens = float(self._own(self.batch).loss_mask.sum())
            report.bad_microbatch = next((float(mb) for mb, x in enumerate(losses) if not math.isfinite(x)), NOTHING)
        report.stage_seconds = [0.0] * s.plan.sizes.vpp
        totals = s.recorder.totals()
        if totals is not None:
            s.steps.add(totals)
            report.start, report.end, report.busy = totals.first_start, totals.last_end, totals.busy
            report.stage_seconds = [
                s.plan.num_microbatches * (totals.forward[n] + totals.backward[n]) for n in s.stages
            ]
        report.mtp_loss = sum((self.mtp_losses[mb].item() for mb in sorted(self.mtp_losses)), 0.0)
        own = self.balance.losses()
        report.auxiliary = own + [0.0] * (self.auxiliary_width - len(own))
        report.memory_bytes = float(_peak_memory(s.device))
        report.updates = float(s.optimizer.updates)
        return report

    def _further_losses(self, reports: Reports) -> dict[str, float]:
        """What the objective has beside the loss: MTP's mean loss, and what the auxiliary losses add, over all layers.

        The objective is loss + model.mtp_loss_scaling_factor x mtp_loss + aux_loss.
        """
        losses = {}
        if self.session.config.model.mtp_num_layers:
            losses["mtp_loss"] = reports.total("mtp_loss")
        if self.auxiliary_width:
            losses["aux_loss"] = math.fsum(reports.auxiliary.ravel().tolist()) / self._microbatches_of_all()
        return losses

    def _figures(self, reports: Reports, seconds: float) -> dict[str, Any]:
        """Throughput and balance, from rank 0's pipeline where a figure belongs to one."""
        s = self.session
        stage, rank = slowest_stage(reports, self.stages_of)
        # All that went through the model, as FLOPs count them; samples are whole, so that none of these is padding.
        tokens = s.config.train.global_batch_size * s.config.data.seq_length
        world = s.plan.sizes.world
        # Forward plus twice backward, over every microbatch of every data-parallel rank.
        flops = 3 * sum(spec.flops_forward for spec in s.plan.stages) * self._microbatches_of_all()
        tflops = flops / seconds / world / 1e12
        return {
            "tokens": tokens,
            "loss_tokens": int(reports.total("loss_tokens")),
            "tokens_per_s": tokens / seconds,
            "tokens_per_s_per_device": tokens / seconds / world,
            "step_time_s": seconds,
            "bubble_fraction": bubble_fraction(reports, self.pipeline),
            "slowest_stage": stage,
            "slowest_rank": rank,
            "tflops_per_device": tflops,
            "mfu": None if self.peak_flops is None else tflops * 1e12 / self.peak_flops,
            "max_memory_bytes": int(reports.column("memory_bytes").max()),
        }


def _spared_from_recompute(session: Session) -> frozenset[tuple[int, int]]:
    """The (stage, microbatch) that keep their activations although layers are recomputed."""
    row = session.plan.schedule.actions[session.own.pp_rank]
    partial = session.config.parallel.num_microbatches_with_partial_activation_checkpoints
    flags = checkpoint_flags(row, partial, forwards_in_flight(row))
    return frozenset((action.stage, action.mb) for action, recomputed in flags.items() if not recomputed)


def _moved(batch: StepBatch, device: torch.device) -> StepBatch:
    """The batch on the device: one copy ahead of the pipeline, in which nothing then waits for the device."""
    if device.type != "cuda":
        return batch
    tensors = {name: getattr(batch, name) for name in ("tokens", "labels", "loss_mask", "positions")}
    on_device = {n: t.pin_memory().to(device, non_blocking=True) for n, t in tensors.items() if t is not None}
    return replace(batch, **on_device)


def _peak_flops(session: Session) -> float | None:
    """Dense bf16 operations per second of `cost.device`, else of the device this is; None where nothing knows it."""
    if session.device.type != "cuda":
        return None
    name = session.config.cost.device
    device = preset(name) if name else device_called(torch.cuda.get_device_name(session.device))
    return None if device is None else device.bf16_flops


def _peak_memory(device: torch.device) -> int:
    """Most bytes allocated on the device so far; on a CPU the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _bad_norm(step: int, norm: GradNorm) -> TrainingError:
    culprits = norm.culprits()
    where = "of all parameters together"
    if culprits:
        first = culprits[0]
        where = f"of {first.name} (pp_rank {first.pp_rank}, stage {first.stage})"
    return TrainingError(
        Problem(
            "PP-E733",
            f"step {step}: the gradient norm {where} is not finite; no weight was changed",
            "lower optim.lr or raise optim.warmup_steps; `ppctl resume` goes on from the last checkpoint",
        )
    )
