"""The figures of a step: what a rank reports, and what metrics.jsonl says of all ranks' reports.

Knows FLOPs, times, memory and losses. Must not know how a step is computed, nor in which order.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ppctl.accelerators import device_called, preset
from ppctl.config.gpu_environment import expanding
from ppctl.engine.device_memory import AllocatorFigures
from ppctl.errors import Problem
from ppctl.topology import RankGrid
from ppctl.train.programs import StagePrograms
from ppctl.train.rank_reports import NOTHING, RankReport, Reports
from ppctl.train.router_balance import auxiliary_width
from ppctl.train.session import Session


class StepFigures:
    """Makes a rank's reports, and the figures of all ranks' reports together."""

    def __init__(self, session: Session) -> None:
        self.session = session
        plan, grid = session.plan, RankGrid(session.plan.sizes)
        self.pipeline = grid.group_of("pp", 0)
        stages = [plan.for_rank(rank).stages for rank in self.pipeline]
        numbers = [[spec.stage for spec in own] for own in stages]
        self.stages_of = np.array([numbers[grid.coordinates(rank)["pp"]] for rank in range(plan.sizes.world)])
        """[ranks, chunks]: the stages of every rank."""
        self.auxiliary_width = auxiliary_width(stages, session.config.model)
        self.peak_flops = _peak_flops(session)
        self.allocator = AllocatorFigures.of(session.device)
        """At the last report."""

    def report(self, programs: StagePrograms, auxiliary: Sequence[float], stop: int) -> RankReport:
        """This rank's numbers. Times are those of the step's last schedule call; all its calls are alike."""
        s, report = self.session, RankReport(stop=float(stop))
        if programs.batch is not None:
            report.checksum = float(programs.batch.checksum)
        if programs.losses and s.own.tp_rank == 0:  # all tensor-parallel ranks have the same losses
            losses = torch.stack([programs.losses[mb] for mb in sorted(programs.losses)]).tolist()
            report.loss = sum(losses)
            if s.own.cp_rank == 0:  # the batch has whole sequences
                report.loss_tokens = float(programs.own_batch.loss_mask.sum())
            report.bad_microbatch = next((float(mb) for mb, x in enumerate(losses) if not math.isfinite(x)), NOTHING)
        report.stage_seconds = [0.0] * s.plan.sizes.vpp
        totals = s.recorder.totals()
        if totals is not None:
            s.steps.append(totals)
            report.start, report.end, report.busy = totals.first_start, totals.last_end, totals.busy
            report.stage_seconds = [
                s.plan.num_microbatches * (totals.forward[n] + totals.backward[n]) for n in s.stages
            ]
        if programs.mtp_losses and s.own.tp_rank == 0:
            report.mtp_loss = sum(torch.stack([programs.mtp_losses[mb] for mb in sorted(programs.mtp_losses)]).tolist())
        if programs.added:
            auxiliary = [math.fsum(torch.stack([programs.added[mb] for mb in sorted(programs.added)]).tolist())]
        report.auxiliary = [*auxiliary, *[0.0] * (self.auxiliary_width - len(auxiliary))]
        report.memory_bytes = float(_peak_memory(s.device))
        before, self.allocator = self.allocator, AllocatorFigures.of(s.device)
        report.alloc_retries = float(self.allocator.retries - before.retries)
        report.driver_allocations = float(self.allocator.driver_allocations - before.driver_allocations)
        report.unused_bytes = float(self.allocator.unused)
        report.updates = float(s.optimizer.updates)
        return report

    def further_losses(self, reports: Reports) -> dict[str, float]:
        """What the objective has beside the loss: MTP's mean loss, and what the auxiliary losses add, over all layers.

        The objective is loss + mtp_weight x mtp_loss + aux_loss.
        """
        losses = {}
        if self.session.config.model.mtp_num_layers:
            losses["mtp_loss"] = reports.total("mtp_loss")
        if self.auxiliary_width:
            losses["aux_loss"] = math.fsum(reports.auxiliary.ravel().tolist()) / self.session.microbatches_of_all
        return losses

    def throughput(self, reports: Reports, seconds: float) -> dict[str, Any]:
        """Throughput and balance of a step that took `seconds`; what belongs to one pipeline is that of rank 0's."""
        s = self.session
        stage, rank = slowest_stage(reports, self.stages_of)
        # All that went through the model, as FLOPs count them; samples are whole, so that none of these is padding.
        tokens = s.config.train.global_batch_size * s.config.data.seq_length
        world = s.plan.sizes.world
        # Forward plus twice backward, over every microbatch of every data-parallel rank.
        flops = sum(spec.flops for spec in s.plan.stages) * s.microbatches_of_all
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
            "unused_memory_bytes": int(reports.column("unused_bytes").max()),
            "alloc_retries": int(reports.total("alloc_retries")),
            "driver_allocations": int(reports.total("driver_allocations")),
        }


def retries_problem(reports: Reports, step: int) -> Problem | None:
    """The problem of a step in which some rank's allocator freed memory."""
    retries = reports.column("alloc_retries")
    if not retries.any():
        return None
    worst = int(retries.argmax())
    often = f"step {step}: torch's allocator on rank {worst} freed memory {int(retries[worst])} times"
    message = f"{often} and waited for its device; two ranks that do so in one step may wait for each other for ever"
    less = "train.recompute_granularity=full train.recompute_method=uniform train.recompute_num_layers=1"
    return Problem("PP-E822", message, expanding(os.environ) or less)


def bubble_fraction(reports: Reports, pipeline: Sequence[int]) -> float:
    """1 - busy time / (ranks x time from the first action's start to the last one's end), over one pipeline's ranks."""
    start, end, busy = (reports.column(name)[list(pipeline)] for name in ("start", "end", "busy"))
    span = float(end.max() - start.min())
    return 1.0 - sum(busy.tolist()) / (len(pipeline) * span) if span > 0 else math.nan


def slowest_stage(reports: Reports, stages: npt.NDArray[np.int64]) -> tuple[int, int]:
    """(stage, rank) with the most busy seconds, the first of equals; `stages` is [ranks, chunks], as the seconds are.

    Raises ValueError where it is not: a rank's report is missing.
    """
    seconds = reports.stage_seconds
    if seconds.shape != stages.shape:
        raise ValueError(f"reports of [ranks, chunks] {seconds.shape} where stages are {stages.shape}")
    rank, chunk = divmod(int(seconds.argmax()), seconds.shape[1])
    return int(stages[rank, chunk]), rank


def _peak_flops(session: Session) -> float | None:
    """Dense bf16 operations per second of `cost.device`, else of this GPU; None on a CPU and for an unknown GPU."""
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
