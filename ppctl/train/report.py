"""What every rank tells all others once a step, in one small gather, and what all conclude from it alike.

Knows the fields of that message and the rules that end a step or a run. Must not know how the numbers came about. The
gather comes before the optimizer, so that wrong data or a non-finite loss never reaches a weight.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields

import torch
import torch.distributed as dist

from ppctl.data.batches import check_same_samples
from ppctl.errors import Problem, TrainingError

NOTHING = -1.0
TIME_IS_OVER = -1


@dataclass(slots=True)
class RankReport:
    """One rank's numbers of one step. Times are seconds on the job's common clock."""

    stop: float = 0.0
    """The signal that asked this rank to stop, or TIME_IS_OVER; 0 where nothing did."""
    loss: float = 0.0
    """This rank's share of the loss (0 where it has no loss stage)."""
    bad_microbatch: float = NOTHING
    """The first microbatch whose loss is not finite."""
    checksum: float = NOTHING
    """crc32 of the sample ids that this rank read."""
    loss_tokens: float = 0.0
    """Tokens that count in the loss, of those whose loss this rank computed: masked ones do not."""
    start: float = 0.0
    end: float = 0.0
    busy: float = 0.0
    """Seconds in F, B, I and W."""
    memory_bytes: float = 0.0
    mtp_loss: float = 0.0
    """This rank's share of the mean over the MTP modules' losses."""
    updates: float = 0.0
    """Updates that this rank's optimizer has made, in earlier steps."""
    stage_seconds: list[float] = field(default_factory=list)
    """Busy seconds of each of this rank's stages, in chunk order."""
    auxiliary: list[float] = field(default_factory=list)
    """Auxiliary losses of each of this rank's routers, summed over its microbatches; as long on every rank."""

    def pack(self) -> torch.Tensor:
        """The report as a float64 vector: exact for whole numbers below 2^53."""
        *head, stages, auxiliary = astuple(self)
        return torch.tensor([*head, *stages, *auxiliary], dtype=torch.float64)

    def unpack(self, row: Sequence[float]) -> RankReport:
        """The report that was packed into `row`, with lists as long as this one's."""
        report, head = RankReport(), [f.name for f in fields(self)][:-2]
        for name, value in zip(head, row, strict=False):
            setattr(report, name, value)
        stages, end = len(head), len(head) + len(self.stage_seconds)
        report.stage_seconds, report.auxiliary = list(row[stages:end]), list(row[end:])
        return report


def gather_reports(own: RankReport, group: dist.ProcessGroup | None = None) -> list[RankReport]:
    """Every rank's report, by rank. A collective: all ranks of the world call it once a step."""
    row = own.pack()
    world = dist.get_world_size(group)
    table = torch.empty(world, row.numel(), dtype=torch.float64)
    dist.all_gather(list(table.unbind()), row, group=group)
    return [own.unpack(values) for values in table.tolist()]


def check_reports(reports: Sequence[RankReport], step: int, last_stage: int) -> None:
    """Raise TrainingError where ranks read different samples or a loss is not finite. All ranks raise alike."""
    check_same_samples(step, {rank: int(r.checksum) for rank, r in enumerate(reports) if r.checksum != NOTHING})
    problems = [
        Problem(
            "PP-E732",
            f"step {step}: the loss of microbatch {int(report.bad_microbatch)} is not finite on rank {rank} "
            f"(stage {last_stage})",
            "lower optim.lr or raise optim.warmup_steps; `ppctl resume` goes on from the last checkpoint",
        )
        for rank, report in enumerate(reports)
        if report.bad_microbatch != NOTHING
    ]
    if problems:
        raise TrainingError(problems)


def stop_reason(reports: Sequence[RankReport]) -> str | None:
    """Why the run has to stop, in words: what has asked which ranks. None where nothing has."""
    asked = {rank: int(report.stop) for rank, report in enumerate(reports) if report.stop}
    if not asked:
        return None
    if TIME_IS_OVER in asked.values():
        return "its time is nearly over"
    first, number = next(iter(asked.items()))
    ranks = f"rank {first}" if len(asked) == 1 else f"{len(asked)} ranks" if len(asked) < len(reports) else "every rank"
    return f"{signal.Signals(number).name.removeprefix('SIG')} on {ranks}"


def bubble_fraction(reports: Sequence[RankReport]) -> float:
    """1 - busy time / (ranks x time from the first action's start to the last one's end), over one pipeline's ranks."""
    span = max(r.end for r in reports) - min(r.start for r in reports)
    return 1.0 - sum(r.busy for r in reports) / (len(reports) * span) if span > 0 else math.nan


def slowest_stage(reports: Sequence[RankReport], stages: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(stage, rank) with the most busy seconds; `stages[i]` and `reports[i]` are those of rank i, in chunk order."""
    seconds = {
        (stage, rank): spent
        for rank, (report, own) in enumerate(zip(reports, stages, strict=True))
        for stage, spent in zip(own, report.stage_seconds, strict=True)
    }
    return max(seconds, key=lambda which: seconds[which])
