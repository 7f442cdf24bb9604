"""The numbers of a step: each rank's report, their exchange in one small gather, and the figures of metrics.jsonl.

A rank reads its device's numbers in one copy per step. With thousands of ranks nothing here may take a Python statement
per rank.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ppctl.comm.groups import gather_rows
from ppctl.config.gpu_environment import expanding
from ppctl.data.batches import check_same_samples
from ppctl.engine.dry_pass import AllocatorFigures
from ppctl.errors import Problem, TrainingError
from ppctl.host.accelerators import device_called, preset
from ppctl.records.run_records import ASKED_WORDS
from ppctl.tensors.host_numbers import HostNumbers
from ppctl.topology import RankGrid
from ppctl.train.callback import ASKED, SAVE_FAILED, TIME_IS_OVER
from ppctl.train.programs import RouterBalance, StagePrograms, auxiliary_width
from ppctl.train.session import Session

NOTHING = -1.0

Numbers = npt.NDArray[np.float64]


@dataclass(slots=True)
class RankReport:
    """One rank's numbers of one step. Times are seconds on the job's common clock."""

    stop: float = 0.0
    """The signal that asked this rank to stop, or a reason below 0 (`train.callback`); 0 to go on."""
    loss: float = 0.0
    """This rank's share of the loss (0 if it has no loss stage)."""
    bad_microbatch: float = NOTHING
    """The first microbatch whose loss is not finite."""
    checksum: float = NOTHING
    """crc32 of the sample ids that this rank read."""
    loss_tokens: float = 0.0
    """Unmasked tokens whose loss this rank computed."""
    start: float = 0.0
    end: float = 0.0
    busy: float = 0.0
    """Seconds in F, B, I and W."""
    memory_bytes: float = 0.0
    alloc_retries: float = 0.0
    """How often the allocator freed memory since the previous report; `driver_allocations` are counted so, too."""
    driver_allocations: float = 0.0
    unused_bytes: float = 0.0
    """Bytes that the GPU's allocator holds and no tensor uses."""
    mtp_loss: float = 0.0
    """This rank's share of the mean over the MTP modules' losses."""
    stage_seconds: list[float] = field(default_factory=list)
    """Busy seconds of each of this rank's stages, in chunk order; equally many on every rank."""
    auxiliary: list[float] = field(default_factory=list)
    """Auxiliary losses of each of this rank's routers, summed over microbatches; equally many on every rank."""

    def pack(self) -> list[float]:
        """The report as one row: float64 is exact for whole numbers below 2^53."""
        *head, stages, auxiliary = astuple(self)
        return [*head, *stages, *auxiliary]


_COLUMNS = {each.name: index for index, each in enumerate(fields(RankReport)[:-2])}


@dataclass(frozen=True, slots=True, eq=False)
class Reports:
    """The reports of all ranks, by rank: a row each, as `RankReport.pack` makes it."""

    table: Numbers
    """[ranks, numbers]"""
    stages: int
    """How many numbers of a row are seconds of stages."""

    def column(self, name: str) -> Numbers:
        """One field of all ranks (not the two lists)."""
        return self.table[:, _COLUMNS[name]]

    def total(self, name: str) -> float:
        """The sum of one field over all ranks, added up in rank order, on which its bits depend."""
        values: list[float] = self.column(name).tolist()
        return sum(values)

    @property
    def stage_seconds(self) -> Numbers:
        """[ranks, chunks]"""
        return self.table[:, len(_COLUMNS) : len(_COLUMNS) + self.stages]

    @property
    def auxiliary(self) -> Numbers:
        """[ranks, routers]"""
        return self.table[:, len(_COLUMNS) + self.stages :]


def gather_reports(own: RankReport, rank: int, groups: Sequence[dist.ProcessGroup]) -> Reports:
    """Every rank's report. A collective: all ranks of the world call it once a step, each with its groups."""
    return Reports(gather_rows(own.pack(), rank, groups).numpy(), len(own.stage_seconds))


def most_updates(session: Session) -> int:
    """How many updates the ranks' optimizers have made (0 without parameters). A collective of the world."""
    own = [float(session.replica.optimizer.updates)]
    return int(gather_rows(own, session.own.rank, session.groups.world).max())


def check_reports(reports: Reports, step: int, last_stage: int, *, finite: bool = True) -> None:
    """Raise TrainingError, on all ranks, if ranks read different samples, or with `finite` if a loss is not finite."""
    check_same_samples(step, _without(reports.column("checksum"), NOTHING))
    problems = [
        Problem(
            "PP-E732",
            f"step {step}: the loss of microbatch {microbatch} is not finite on rank {rank} (stage {last_stage})",
            "lower optim.lr or raise optim.warmup_steps; `ppctl resume` goes on from the last checkpoint",
        )
        for rank, microbatch in _without(reports.column("bad_microbatch"), NOTHING).items()
    ]
    if problems and finite:
        raise TrainingError(problems)


def _without(column: Numbers, nothing: float) -> dict[int, int]:
    """rank -> the whole number in a column, without ranks where it is `nothing`."""
    ranks = np.flatnonzero(column != nothing)
    return dict(zip(ranks.tolist(), column[ranks].astype(np.int64).tolist(), strict=True))


def stop_reason(reports: Reports) -> str | None:
    """Why the run has to stop, in words: which signal, on which ranks. None if it goes on."""
    asked = _without(reports.column("stop"), 0.0)
    if not asked:
        return None
    if SAVE_FAILED in asked.values():
        return "a checkpoint could not be written"
    if TIME_IS_OVER in asked.values():
        return "its time is nearly over"
    if ASKED in asked.values():
        return ASKED_WORDS
    first, number = next(iter(asked.items()))
    several = f"{len(asked)} ranks" if len(asked) < len(reports.table) else "every rank"
    ranks = f"rank {first}" if len(asked) == 1 else several
    return f"{signal.Signals(number).name.removeprefix('SIG')} on {ranks}"


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
        """The allocator's figures at the last report."""

    def start_reading(self, programs: StagePrograms, balance: RouterBalance, norm: Tensor) -> HostNumbers:
        """Start copying the step's numbers to the host: the norm, the losses for `report`, and each router's losses."""
        reports = self.session.own.tp_rank == 0  # other tensor-parallel ranks have the same losses
        whole = reports and programs.losses and self.session.own.cp_rank == 0  # the batch has whole sequences
        listed = [programs.losses if reports else {}, programs.mtp_losses if reports else {}, programs.added]
        return HostNumbers(
            [
                norm,
                programs.own_batch.loss_mask.sum() if whole else norm.new_empty(0),
                *(_in_order(losses, norm) for losses in listed),
                *(torch.stack(losses) for losses in balance.losses()),
            ]
        )

    def report(self, programs: StagePrograms, numbers: Sequence[Sequence[float]], stop: int) -> RankReport:
        """This rank's report; `numbers` were read by `start_reading`, without the norm. Times are of the step's last
        schedule call; all calls of a step are alike."""
        s, report = self.session, RankReport(stop=float(stop))
        tokens, losses, mtp_losses, added, *routers = numbers
        if programs.batch is not None:
            report.checksum = float(programs.batch.checksum)
        report.loss, report.loss_tokens, report.mtp_loss = sum(losses), sum(tokens), sum(mtp_losses)
        report.bad_microbatch = next((float(mb) for mb, x in enumerate(losses) if not math.isfinite(x)), NOTHING)
        report.stage_seconds = [0.0] * s.plan.sizes.vpp
        totals = s.pipeline.recorder.totals()
        if totals is not None:
            s.pipeline.totals.append(totals)
            report.start, report.end, report.busy = totals.first_start, totals.last_end, totals.busy
            report.stage_seconds = [
                s.plan.num_microbatches * (totals.forward[n] + totals.backward[n]) for n in s.model.stages
            ]
        auxiliary = [math.fsum(each) for each in ([added] if added else routers)]
        report.auxiliary = [*auxiliary, *[0.0] * (self.auxiliary_width - len(auxiliary))]
        report.memory_bytes = float(_peak_memory(s.device))
        before, self.allocator = self.allocator, AllocatorFigures.of(s.device)
        report.alloc_retries = float(self.allocator.retries - before.retries)
        report.driver_allocations = float(self.allocator.driver_allocations - before.driver_allocations)
        report.unused_bytes = float(self.allocator.unused)
        return report

    def further_losses(self, reports: Reports) -> dict[str, float]:
        """The objective's terms beside the loss (loss + mtp_weight x mtp_loss + aux_loss): MTP's mean loss, and the sum
        of the auxiliary losses over all layers."""
        losses = {}
        if self.session.config.model.mtp_num_layers:
            losses["mtp_loss"] = reports.total("mtp_loss")
        if self.auxiliary_width:
            losses["aux_loss"] = math.fsum(reports.auxiliary.ravel().tolist()) / self.session.microbatches_of_all
        return losses

    def throughput(self, reports: Reports, seconds: float) -> dict[str, Any]:
        """Throughput and balance of a step that took `seconds`; figures of one pipeline are of rank 0's pipeline."""
        s = self.session
        stage, rank = slowest_stage(reports, self.stages_of)
        # All tokens that went through the model, as FLOPs count them; samples are whole, without padding.
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


def _in_order(losses: Mapping[int, Tensor], like: Tensor) -> Tensor:
    return torch.stack([losses[mb] for mb in sorted(losses)]) if losses else like.new_empty(0)


def retries_problem(reports: Reports, step: int) -> Problem | None:
    """The problem (PP-E822) of a step in which some rank's allocator freed memory; None if none did."""
    retries = reports.column("alloc_retries")
    if not retries.any():
        return None
    worst = int(retries.argmax())
    often = f"step {step}: torch's allocator on rank {worst} freed memory {int(retries[worst])} times"
    message = f"{often} and waited for its device; two ranks that do so in one step may wait for each other for ever"
    less = "train.recompute_granularity=full train.recompute_method=uniform train.recompute_num_layers=1"
    return Problem("PP-E822", message, expanding(os.environ) or less)


def bubble_fraction(reports: Reports, pipeline: Sequence[int]) -> float:
    """1 - busy time / (ranks x time from the first action's start to the last one's end), over a pipeline's ranks."""
    start, end, busy = (reports.column(name)[list(pipeline)] for name in ("start", "end", "busy"))
    span = float(end.max() - start.min())
    return 1.0 - sum(busy.tolist()) / (len(pipeline) * span) if span > 0 else math.nan


def slowest_stage(reports: Reports, stages: npt.NDArray[np.int64]) -> tuple[int, int]:
    """(stage, rank) with the most busy seconds, the first of equals; `stages` is [ranks, chunks], as the seconds are.
    Raises ValueError for another shape: a rank's report is missing."""
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
