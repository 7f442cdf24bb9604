"""One optimizer step on one rank: pipeline, sums, norm, clip, update. Must not know which schedule it runs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ppctl.comm.buffers import MessageSpec
from ppctl.config.batch_sizes import BatchSizes, steps_for_tokens
from ppctl.config.learning_rate import lr_at
from ppctl.config.mtp_weight import mtp_weight
from ppctl.data.batches import Batches, StepBatch
from ppctl.engine.device_memory import AllocatorFigures, reserve
from ppctl.engine.dry_pass import dry_pass, representatives
from ppctl.engine.interpreter import run_schedule
from ppctl.engine.pace import HELD
from ppctl.errors import Problem, TrainingError
from ppctl.parallel.tensor import sum_partial_gradients
from ppctl.schedule.measured_step import MeasuredStep
from ppctl.train.figures import StepFigures, retries_problem
from ppctl.train.grad_norm import GradNorm, clip_gradients
from ppctl.train.kept_gradients import KeptGradients
from ppctl.train.precision import unscale
from ppctl.train.programs import StagePrograms, auxiliary_weight
from ppctl.train.rank_reports import check_reports, gather_reports, stop_reason
from ppctl.train.replica_check import ReplicaCheck
from ppctl.train.router_balance import RouterBalance
from ppctl.train.session import Session
from ppctl.train.step_tracer import StepTracer


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, the same on every rank."""

    record: dict[str, Any]
    """The line of metrics.jsonl, without what only the run knows."""
    stop: str | None
    """Why the run has to stop, where some rank was asked to."""
    measured: MeasuredStep | None
    """What every rank did, in a step of `log.trace`."""


class Trainer:
    """Runs steps on a session. `stop_requested` is asked once a step, before the ranks agree.

    `sizes` says how many samples each step takes, from the step on with which this process begins. `gradients` is where
    steps of `log.gradients` are kept; None keeps none. `writes` is called with a step (from 1) whose files are next.
    """

    def __init__(
        self,
        session: Session,
        batches: Batches | None,
        stop_requested: Callable[[], int],
        sizes: BatchSizes | None = None,
        gradients: Path | None = None,
        writes: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.whole = session
        """The session of the whole global batch; evaluations read as much."""
        self.batches = batches
        self.sizes = BatchSizes.of(session.config.train) if sizes is None else sizes
        self.stop_requested = stop_requested
        self.on_gpu = session.device.type == "cuda"
        self.tracer = StepTracer(session)
        self.replicas = ReplicaCheck(session)
        self._steps_for = steps_for_tokens(session.config)
        self._said: set[int] = set()
        self._told = False
        self.gradients = KeptGradients(session, gradients, lambda: self.stages.first, writes)
        self._take(session)

    def _take(self, session: Session) -> None:
        """Run steps of this session's batch from now on: what a rank holds stays, what counts microbatches is new."""
        self.session = session
        """The size of the present step's batch."""
        self.stages = StagePrograms(session, self._said)
        self.gradients.session = session
        self.programs = self.gradients.watched(self.stages.make())
        self.figures = StepFigures(session)
        self.balance = RouterBalance(
            [router for module in session.stages.values() for router in module.routers()],
            session.config.model,
            weight=auxiliary_weight(session),
            others=session.other_tokens,
        )

    def _take_size(self, step: int) -> None:
        size = self.sizes.at(step)
        if size != self.session.config.train.global_batch_size:
            self._take(self.whole.of_batch(size))
            self.session.recorder.follow(self.session.own.actions)

    def step(self, step: int) -> StepResult:
        """Run the step that follows `step` completed ones; records and errors count steps from 1.

        Raises TrainingError, on all ranks alike, where numbers are not finite, or copies that were compared differ.
        """
        self._take_size(step)
        s, started = self.session, time.perf_counter()
        self.gradients.begin(step + 1)
        self._run_pipeline(step)
        pipeline_end = time.perf_counter()
        if s.heartbeat is not None:
            s.heartbeat.set_state("updating")
        own = self.figures.report(self.stages, self.balance.losses(), self.stop_requested())
        reports = gather_reports(own, s.own.rank, s.world_groups)
        agreed = time.perf_counter()
        check_reports(reports, step + 1, s.plan.stages[-1].stage)
        # A step that is left out does not use up the schedule (as in Megatron). Ranks without parameters count none.
        lr = lr_at(int(reports.column("updates").max()), s.config.optim, s.config.train.steps, self._steps_for)
        s.reducer.finish()
        if s.partial_gradients:
            sum_partial_gradients([s.weights.master[name] for name in s.partial_gradients], s.groups["tp"])
        s.ties.sum()
        unscale(s.weights.master, s.loss_scale)
        self.gradients.keep(step + 1)
        norm = s.norm.measure(s.weights.master)
        grad_norm = norm.item()
        overflow = not math.isfinite(grad_norm)
        if overflow and (s.loss_scale is None or s.loss_scale.exhausted):
            raise _bad_norm(step + 1, norm)
        if not overflow:
            self._update(norm, lr)
        ended = time.perf_counter()
        seconds = ended - started
        record = {"step": step + 1, "loss": reports.total("loss"), "grad_norm": grad_norm, "lr": lr}
        if s.loss_scale is not None:
            record |= {"loss_scale": s.loss_scale.scale, "skipped": overflow}
            s.loss_scale.update(overflow=overflow)
        if s.config.model.mtp_num_layers:
            record["mtp_weight"] = self.stages.mtp_weight
        record |= self.figures.further_losses(reports) | self.figures.throughput(reports, seconds)
        if s.own.rank == 0 and not self._told and (problem := retries_problem(reports, step + 1)) is not None:
            print(f"warning: {problem}", file=sys.stderr)
            self._told = True
        if self.replicas.is_due(step + 1):
            record["replicas_compared"] = self.replicas.compare(step + 1)
        measured = self.tracer.take(step + 1, (started, pipeline_end, agreed, ended))
        return StepResult(record, stop_reason(reports), measured)

    def _update(self, norm: GradNorm, lr: float) -> None:
        s = self.session
        clip_gradients(s.weights.master, norm, s.config.optim.clip_grad)
        s.optimizer.lr = lr
        s.optimizer.step()
        s.weights.publish()
        self.balance.move_biases()

    def dry_pass(self, step: int) -> None:
        """Run all kernels of a step's list once, without a message (see `engine.dry_pass`).

        A collective where stages have collectives (experts on several ranks, gathered weights, sums of gradients over
        replicas). Nothing that a step reads is different afterwards: weights, gradients, ledgers and every draw of
        random numbers.
        """
        self._take_size(step)
        s = self.session
        self._begin(step)
        self.stages.first = 0
        for program in self.programs:
            schedule, is_last = s.plan.schedule, program.stage == len(s.plan.stages) - 1
            trained, back = program.stage >= schedule.frozen_stages, schedule.gradient_leaves(program.stage)
            units = [(program.stage, mb) for mb in range(s.plan.num_microbatches)] if trained else []
            for mb in representatives((u in self.stages.keeping, u in schedule.split) for u in units):
                split = (program.stage, mb) in schedule.split
                dry_pass(program, s.own.pp_rank, mb, s.device, is_last=is_last, split=split, hands_back=back)
            s.stages[program.stage].train(False)
            dry_pass(program, s.own.pp_rank, 0, s.device, is_last=is_last, training=False)
            s.stages[program.stage].train()
            self._reduce(program.stage)
        s.reducer.finish()
        s.weights.clear_gradients()
        if self.on_gpu:
            torch.cuda.synchronize(s.device)
            if s.communicator is not None:
                self._reserve()
            self.figures.allocator = AllocatorFigures.of(s.device)  # of the steps alone

    def _reserve(self) -> None:
        """Take from the driver the plan's peak, messages that are held longer, and experts' rows once more."""
        s = self.session
        own = s.plan.pp_ranks[s.own.pp_rank]
        varying = HELD * max(MessageSpec.of(e).nbytes for spec in s.own.stages for e in (spec.receives, spec.sends))
        if s.plan.routed and not s.config.launch.share_gpu:
            varying += own.activation_bytes
        lacks = reserve(s.device, own.peak_bytes, own.in_flight, varying)
        if s.offload is not None:
            s.offload.copies.buffers.multiply(own.in_flight)
        if lacks:
            message = f"rank {s.own.rank} lacks {lacks >> 20} MiB of the plan's peak of {own.peak_bytes >> 20} MiB"
            has = torch.cuda.mem_get_info(s.device)[1] >> 30
            print(f"warning: {Problem('PP-E823', message, f'launch.device_memory={has}GiB')}", file=sys.stderr)

    def _begin(self, step: int) -> None:
        """Forget the step before, and fetch the samples of this one."""
        s = self.session
        s.weights.clear_gradients()
        self.balance.begin(1.0 if s.loss_scale is None else s.loss_scale.scale)
        self.stages.begin(None if self.batches is None else self.batches.step(step), step)
        self.stages.mtp_weight = mtp_weight(step, self.whole.config.model, self._steps_for)

    def _run_pipeline(self, step: int) -> None:
        s = self.session
        self._begin(step)
        calls = s.plan.gradient_accumulation_steps
        for call in range(calls):
            self.stages.first = call * s.plan.num_microbatches
            run_schedule(
                s.plan.schedule,
                self.programs,
                s.communicator,
                deallocate_pipeline_outputs=s.config.parallel.deallocate_pipeline_outputs,
                reduce_grad=self._reduce if call + 1 == calls else None,
                recorder=s.recorder,
                heartbeat=s.heartbeat,
            )

    def forward_only(self, batch: StepBatch | None) -> list[float]:
        """The losses of `batch` by microbatch, on the rank that owns the loss; weights and gradients stay as they are.

        A collective of the pipeline. The stages are in evaluation mode meanwhile.
        """
        s = self.whole
        self.stages.begin(batch)
        for stage in s.stages.values():
            stage.train(False)
        for call in range(s.plan.gradient_accumulation_steps):
            self.stages.first = call * s.plan.num_microbatches
            run_schedule(s.plan.forward_schedule, self.programs, s.communicator, heartbeat=s.heartbeat)
        if s.gathered is not None:
            s.gathered.release_all()
        for stage in s.stages.values():
            stage.train()
        losses = [self.stages.losses[mb] for mb in sorted(self.stages.losses)]
        found: list[float] = torch.stack(losses).tolist() if losses else []  # waits for the device once
        return found

    def _reduce(self, stage: int) -> None:
        """Release a stage's weights and sum its gradients over replicas, after the step's last backward of it."""
        if self.session.gathered is not None:
            self.session.gathered.release(stage)
        scaled = self.session.config.pipeline.scale_grads_in_schedule
        self.session.reducer.reduce(stage, self.session.microbatches_of_all if scaled else 1.0)


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
