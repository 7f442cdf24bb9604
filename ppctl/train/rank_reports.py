"""The reports of all ranks on a step, exchanged in one small gather, and the checks that every rank makes on them.

Must not know how the numbers are measured. The gather comes before the optimizer, so that wrong data or a non-finite
loss never reaches a weight. With thousands of ranks nothing here may take a Python statement for each of them.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from ppctl.comm.groups import gather_rows
from ppctl.data.batches import check_same_samples
from ppctl.errors import Problem, TrainingError

NOTHING = -1.0
TIME_IS_OVER, SAVE_FAILED = -1, -2

Numbers = npt.NDArray[np.float64]


@dataclass(slots=True)
class RankReport:
    """One rank's numbers of one step. Times are seconds on the job's common clock."""

    stop: float = 0.0
    """The signal that asked this rank to stop, or one of the two numbers below 0; 0 to go on."""
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
    alloc_retries: float = 0.0
    """Since the report before, as `driver_allocations`."""
    driver_allocations: float = 0.0
    unused_bytes: float = 0.0
    """What the GPU's allocator holds and no tensor uses."""
    mtp_loss: float = 0.0
    """This rank's share of the mean over the MTP modules' losses."""
    updates: float = 0.0
    """Updates that this rank's optimizer has made, in earlier steps."""
    stage_seconds: list[float] = field(default_factory=list)
    """Busy seconds of each of this rank's stages, in chunk order; as many on every rank."""
    auxiliary: list[float] = field(default_factory=list)
    """Auxiliary losses of each of this rank's routers, summed over its microbatches; as long on every rank."""

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
    """How many of a row's numbers are seconds of stages."""

    @classmethod
    def of(cls, reports: Sequence[RankReport]) -> Reports:
        """These reports, of rank 0 and so on."""
        return cls(np.array([report.pack() for report in reports], dtype=np.float64), len(reports[0].stage_seconds))

    def column(self, name: str) -> Numbers:
        """One field of all ranks (not the two lists)."""
        return self.table[:, _COLUMNS[name]]

    def total(self, name: str) -> float:
        """The sum of one field over all ranks, added up in rank order: its bits depend on the order."""
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
    """Every rank's report. A collective: all ranks of the world call it once a step, with their groups."""
    return Reports(gather_rows(own.pack(), rank, groups).numpy(), len(own.stage_seconds))


def check_reports(reports: Reports, step: int, last_stage: int) -> None:
    """Raise TrainingError, on all ranks, where ranks read different samples or a loss is not finite."""
    check_same_samples(step, _without(reports.column("checksum"), NOTHING))
    problems = [
        Problem(
            "PP-E732",
            f"step {step}: the loss of microbatch {microbatch} is not finite on rank {rank} (stage {last_stage})",
            "lower optim.lr or raise optim.warmup_steps; `ppctl resume` goes on from the last checkpoint",
        )
        for rank, microbatch in _without(reports.column("bad_microbatch"), NOTHING).items()
    ]
    if problems:
        raise TrainingError(problems)


def _without(column: Numbers, nothing: float) -> dict[int, int]:
    """rank -> the whole number in a column, where it is not `nothing`."""
    ranks = np.flatnonzero(column != nothing)
    return dict(zip(ranks.tolist(), column[ranks].astype(np.int64).tolist(), strict=True))


def stop_reason(reports: Reports) -> str | None:
    """Why the run has to stop, in words: which signal, on which ranks. None where it goes on."""
    asked = _without(reports.column("stop"), 0.0)
    if not asked:
        return None
    if SAVE_FAILED in asked.values():
        return "a checkpoint could not be written"
    if TIME_IS_OVER in asked.values():
        return "its time is nearly over"
    first, number = next(iter(asked.items()))
    several = f"{len(asked)} ranks" if len(asked) < len(reports.table) else "every rank"
    ranks = f"rank {first}" if len(asked) == 1 else several
    return f"{signal.Signals(number).name.removeprefix('SIG')} on {ranks}"
