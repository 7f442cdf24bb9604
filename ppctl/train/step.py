"""One optimizer step on one rank: pipeline, sums, norm, clip, update. Decision 81 has the order of GPU and host."""

from __future__ import annotations

import math
import sys
import time
from functools import partial

import torch
from torch import Tensor

from ppctl.comm.buffers import MessageSpec
from ppctl.config.batch_sizes import BatchSizes, steps_for_tokens
from ppctl.config.learning_rate import lr_at, mtp_weight
from ppctl.data.batches import Batches
from ppctl.engine.dry_pass import AllocatorFigures, dry_pass, representatives, reserve
from ppctl.engine.pace import HELD
from ppctl.engine.pair_runner import leave_blas_handle
from ppctl.errors import Problem
from ppctl.tensors.host_numbers import HostNumbers
from ppctl.train.callback import Callback, StepResult
from ppctl.train.grad_norm import GradNorm
from ppctl.train.programs import RouterBalance, StagePrograms, auxiliary_weight
from ppctl.train.reports import (
    Reports,
    StepFigures,
    check_reports,
    gather_reports,
    most_updates,
    retries_problem,
    stop_reason,
)
from ppctl.train.session import Session
from ppctl.train.stragglers import Stragglers


class Trainer:
    """Runs steps on a session, and calls `callback` in each. `sizes` gives the number of samples of each step that this
    process runs."""

    def __init__(
        self,
        session: Session,
        batches: Batches | None,
        sizes: BatchSizes | None = None,
        callback: Callback | None = None,
    ) -> None:
        self.whole = session
        """The session of the whole global batch."""
        self.batches = batches
        self.on_gpu = session.device.type == "cuda"
        self.sizes = BatchSizes.of(session.config.train) if sizes is None else sizes
        self.callback = callback or Callback()
        self._steps_for = steps_for_tokens(session.config)
        self._warned = False
        self._updates = -1
        """Updates made so far, those before a checkpoint included; -1 until the first step."""
        self._take(session)

    def _take(self, session: Session) -> None:
        """Run steps of this session's batch size from now on: tensors stay, what counts microbatches is made anew."""
        self.session = session
        """The session for the size of the present step's batch."""
        self.stages = StagePrograms(session)
        watch, microbatches = self.callback.stage_program, session.plan.num_microbatches
        firsts = [call * microbatches for call in range(session.plan.gradient_accumulation_steps)]
        self.programs = [[watch(program, first) for program in self.stages.make(first)] for first in firsts]
        """The programs of each schedule call of a step."""
        self.figures = StepFigures(session)
        self.stragglers = Stragglers(session.plan, self.figures.stages_of)
        self.balance = RouterBalance(
            [router for module in session.model.stages.values() for router in module.routers()],
            session.config.model,
            weight=auxiliary_weight(session),
            others=session.groups.other_tokens,
        )

    def _take_size(self, step: int) -> None:
        size = self.sizes.at(step)
        if size != self.session.config.train.global_batch_size:
            self._take(self.whole.of_batch(size))
            self.session.pipeline.recorder.follow(self.session.own.actions)

    def step(self, step: int) -> StepResult:
        """Run the step that follows `step` completed ones; records and errors count steps from 1.

        Raises TrainingError, equal on all ranks, if the run has to stop for its numbers. The host waits for its device
        once, for the step's numbers; a GPU may then still do the update, or leave it out by itself if the norm is bad.
        On return the host knows whether it did, so that a save has a whole step.
        """
        self._take_size(step)
        s, replica, started = self.session, self.session.replica, time.perf_counter()
        if self._updates < 0:
            self._updates = most_updates(s)
        self._run_pipeline(step)
        try:
            norm, limit, numbers, left_out, lr, stop = self._enqueue_end(step)
        except RuntimeError:
            s.pipeline.settle()  # raises a device's error as an error of its action
            raise
        ahead, pipeline_end = s.pipeline.ahead, s.pipeline.settle()
        if ahead:  # so far the rank's state named the device's action
            self.callback.enter("updating", step)
        (grad_norm,), *read = numbers.read()
        reports = gather_reports(self.figures.report(self.stages, read, stop), s.own.rank, s.groups.world)
        agreed = time.perf_counter()
        bad = self._judge(step + 1, norm, grad_norm, limit, reports)
        if left_out is None and not bad:
            self._update(norm, lr)
        elif left_out is not None and bad:
            replica.optimizer.take_back()
        self._updates += not bad
        ended = time.perf_counter()
        record = {"step": step + 1, "loss": reports.total("loss"), "grad_norm": grad_norm, "lr": lr}
        if replica.limit.goes_on:
            record["skipped"] = bad
        if replica.loss_scale is not None:
            record |= {"loss_scale": replica.loss_scale.scale, "skipped": bad}
            replica.loss_scale.update(overflow=not math.isfinite(grad_norm))
        if s.config.model.mtp_num_layers:
            record["mtp_weight"] = self.stages.mtp_weight
        record |= self.figures.further_losses(reports) | self.figures.throughput(reports, ended - started)
        self._warn_of_retries(reports, step + 1)
        if s.own.rank == 0 and (slow := self.stragglers.note(step + 1, reports.stage_seconds)) is not None:
            self._warn(slow)
        back = replica.limit.goes_back
        last, why = step + 1 == self.whole.config.train.steps and not back, None if back else stop_reason(reports)
        return StepResult(step + 1, record, why, last, (started, pipeline_end, agreed, ended), back)

    def _judge(self, step: int, norm: GradNorm, value: float, limit: float, reports: Reports) -> bool:
        """Whether the step's update is left out, for a norm of `value`; raises TrainingError if the run has to stop."""
        replica, bad = self.session.replica, not value <= limit  # nan is bad, too
        check_reports(reports, step, self.session.plan.stages[-1].stage, finite=not (bad and replica.limit.goes_on))
        scale = replica.loss_scale
        if not bad:
            replica.limit.take(value)
        elif math.isfinite(value) or scale is None or scale.exhausted:
            self._warn(replica.limit.skip(step, norm, value, limit))
        return bad

    def _enqueue_end(self, step: int) -> tuple[GradNorm, float, HostNumbers, Tensor | None, float, int]:
        """Enqueue the work after the pipeline, without waiting for the device; returns (the norm, the largest good one,
        the step's numbers on their way, a scalar that is 1 if the device leaves out the enqueued update (None: no
        update is enqueued), the learning rate, the reason to stop)."""
        s, replica = self.session, self.session.replica
        if not s.pipeline.ahead:
            self.callback.enter("updating", step)
        stop = self.callback.stop_requested()
        replica.sum_gradients()
        self.callback.pre_update(step + 1)
        norm = replica.norm.measure(replica.weights.master)
        limit = replica.limit.value(norm.total.dtype)
        # A step that is left out does not use up the schedule (as in Megatron).
        lr = lr_at(self._updates, s.config.optim, s.config.train.steps, self._steps_for)
        numbers, left_out = self.figures.start_reading(self.stages, self.balance, norm.total), None
        if replica.optimizer.skips_on_device:
            left_out = (~(norm.total <= limit)).float()  # so is nan
            self._update(norm, lr, left_out)
        return norm, limit, numbers, left_out, lr, stop

    def _update(self, norm: GradNorm, lr: float, left_out: Tensor | None = None) -> None:
        self.session.replica.update(norm, lr, self.session.config.optim.clip_grad, left_out)
        self.balance.move_biases(left_out)

    def _warn(self, problem: Problem) -> None:
        if self.session.own.rank == 0:
            print(f"warning: {problem}", file=sys.stderr)

    def _warn_of_retries(self, reports: Reports, step: int) -> None:
        if not self._warned and (problem := retries_problem(reports, step)) is not None:
            self._warn(problem)
            self._warned = True

    def dry_pass(self, step: int) -> None:
        """Run all kernels of a step's list once, without a message (see `engine.dry_pass`).

        A collective if stages have collectives (experts on several ranks, gathered weights, sums of gradients over
        replicas). Weights, gradients, ledgers and random states are the same afterwards.
        """
        self._take_size(step)
        s = self.session
        self._begin(step)
        for program in self.programs[0]:
            schedule = s.plan.schedule
            one = partial(dry_pass, program, schedule, s.own.pp_rank, device=s.device)
            trained = program.stage >= schedule.frozen_stages
            units = [(program.stage, mb) for mb in range(s.plan.num_microbatches)] if trained else []
            for mb in representatives((u in self.stages.keeping, u in schedule.split) for u in units):
                one(mb)
            module = s.model.stages[program.stage]
            module.train(False)
            one(0, training=False)
            module.train()
            self._reduce(program.stage)
        s.replica.reducer.finish()
        s.replica.weights.clear_gradients()
        if self.on_gpu:
            if s.plan.schedule.pairs and s.config.train.replay:
                leave_blas_handle(s.device)
            torch.cuda.synchronize(s.device)
            if s.pipeline.communicator is not None:
                self._reserve()
            self.figures.allocator = AllocatorFigures.of(s.device)  # from here on, of steps alone

    def _reserve(self) -> None:
        """Reserve the plan's peak, messages that are held longer, and experts' rows once more; may warn (PP-E823)."""
        s = self.session
        own = s.plan.pp_ranks[s.own.pp_rank]
        varying = HELD * max(MessageSpec.of(e).nbytes for spec in s.own.stages for e in (spec.receives, spec.sends))
        if s.plan.routed and not s.config.launch.share_gpu:
            varying += own.activation_bytes
        lacks = reserve(s.device, own.peak_bytes, own.in_flight, varying)
        if s.model.offload is not None:
            s.model.offload.copies.buffers.multiply(own.in_flight)
        if lacks:
            message = f"rank {s.own.rank} lacks {lacks >> 20} MiB of the plan's peak of {own.peak_bytes >> 20} MiB"
            has = torch.cuda.mem_get_info(s.device)[1] >> 30
            print(f"warning: {Problem('PP-E823', message, f'launch.device_memory={has}GiB')}", file=sys.stderr)

    def _begin(self, step: int) -> None:
        """Clear what the previous step has left, and fetch this step's samples."""
        replica = self.session.replica
        replica.weights.clear_gradients()
        self.balance.begin(replica.scale)
        self.stages.begin(None if self.batches is None else self.batches.step(step), step)
        self.stages.mtp_weight = mtp_weight(step, self.whole.config.model, self._steps_for)

    def _run_pipeline(self, step: int) -> None:
        self._begin(step)
        schedule, *earlier, last = self.session.plan.schedule, *self.programs
        for programs in earlier:
            self.session.pipeline.train(schedule, programs, None)
        self.session.pipeline.train(schedule, last, self._reduce)
        self.session.pipeline.leave()

    def _reduce(self, stage: int) -> None:
        """Release a stage's weights and sum its gradients over replicas, after the step's last backward of it."""
        replica = self.session.replica
        if replica.gathered is not None:
            replica.gathered.release(stage)
        scaled = self.session.config.pipeline.scale_grads_in_schedule
        replica.reducer.reduce(stage, self.session.microbatches_of_all if scaled else 1.0)
