"""A step as all ranks of a job ran it: the file of a traced step, the trace of one of its pipelines, and its ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict

from ppctl.records.json_reader import Count, read
from ppctl.schedule.action import COMPUTE, Action, Schedule
from ppctl.schedule.trace import Span, Trace, makers

_VERSION = 1


class RankStamps(NamedTuple):
    """One rank's step in seconds on the job's common clock."""

    begin: float
    pipeline_end: float
    """The time at which the rank's last schedule call was over."""
    agreed: float
    """The time at which the reports of all ranks had come."""
    end: float
    """The time at which the optimizer had run."""
    actions: Sequence[tuple[int, float, float]]
    """(index in the rank's row, start, end) of what takes the rank's time, in order; of the last schedule call."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The spans of every rank in `step`."""

    step: int
    ranks: tuple[RankStamps, ...]
    """The stamps of each rank."""

    def to_json(self) -> dict[str, Any]:
        """Times in whole microseconds since the first rank began."""
        zero = min(rank.begin for rank in self.ranks)

        def since(seconds: float) -> int:
            return round(1e6 * (seconds - zero))

        ranks = [
            [*map(since, rank[:4]), [[i, round(1e6 * (a - zero)), round(1e6 * (b - zero))] for i, a, b in rank.actions]]
            for rank in self.ranks
        ]
        return {"version": _VERSION, "step": self.step, "unit": "us", "ranks": ranks}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MeasuredStep:
        """The inverse of `to_json`. Raises ValueError for data that `to_json` cannot have returned."""
        fields = read(_File, data)
        return cls(fields["step"], tuple(_rank_of(*rank) for rank in fields["ranks"]))

    def trace(self, schedule: Schedule, pipeline: Sequence[int]) -> Trace:
        """The spans of one pipeline, whose ranks are given in the order of pp_rank. Raises IndexError if the step
        was not run by this schedule."""
        spans = [
            Span(pp_rank, schedule.actions[pp_rank][index], start, end)
            for pp_rank, rank in enumerate(pipeline)
            for index, start, end in self.ranks[rank].actions
        ]
        return Trace(len(pipeline), tuple(sorted(spans, key=lambda span: span.start)), schedule.pairs)


_Stamp = tuple[Count, int, int]


class _File(TypedDict):
    version: Literal[1]
    step: Count
    ranks: list[tuple[int, int, int, int, list[_Stamp]]]


def _rank_of(begin: int, pipeline_end: int, agreed: int, end: int, stamps: Sequence[_Stamp]) -> RankStamps:
    """Return the stamps of a rank, given in microseconds."""
    timed = [(index, 1e-6 * start, 1e-6 * over) for index, start, over in stamps]
    return RankStamps(1e-6 * begin, 1e-6 * pipeline_end, 1e-6 * agreed, 1e-6 * end, timed)


@dataclass(slots=True)
class TimeLedger:
    """Where one rank's step went, in seconds: its rows add up to the time of the step, from the first rank's begin to
    the last rank's end."""

    compute: float = 0.0
    """In F, B, I and W."""
    gradients: float = 0.0
    """In what the schedule has beside them: sums of gradients."""
    waiting: dict[int, float] = field(default_factory=dict)
    """pp_rank -> seconds spent waiting until it had made what this rank needed next."""
    messages: float = 0.0
    """From there until this rank went on."""
    host: float = 0.0
    """Between actions whose input was there: the interpreter, sends, and the begin of the step."""
    drain: float = 0.0
    """Seconds after the rank's last action, until the last action of its pipeline was over."""
    agreement: float = 0.0
    """From there until the reports of all ranks had come: sums, the norm, and other pipelines."""
    optimizer: float = 0.0
    """Clipping and update; of a GPU, which may have been given them before, what is left to its host."""
    others: float = 0.0
    """After its own end, until the last rank had ended."""

    @property
    def total(self) -> float:
        """The sum of the rows."""
        return sum(self.rows().values())

    def rows(self) -> dict[str, float]:
        """The seconds of each row by its name, in the order in which rows are shown."""
        waits = {f"waiting for pp_rank {rank}": seconds for rank, seconds in sorted(self.waiting.items())}
        rest = {name: getattr(self, name) for name in ("messages", "host", "drain", "agreement", "optimizer", "others")}
        return {"compute": self.compute, "gradients": self.gradients, **waits, **rest}


def ledgers(step: MeasuredStep, schedule: Schedule, pipeline: Sequence[int]) -> list[TimeLedger]:
    """The ledgers of one pipeline, by pp_rank."""
    trace = step.trace(schedule, pipeline)
    made = makers(trace.spans)
    last = max((span.end for span in trace.spans), default=0.0)
    begin, end = min(rank.begin for rank in step.ranks), max(rank.end for rank in step.ranks)
    return [
        _ledger(spans, step.ranks[rank], made, last, begin, end)
        for spans, rank in zip(trace.rows(), pipeline, strict=True)
    ]


def _ledger(
    spans: Sequence[Span], rank: RankStamps, made: Mapping[Action, Span], last: float, begin: float, end: float
) -> TimeLedger:
    """One rank's ledger: a clock that goes from begin to end, and every stretch of it in one row."""
    ledger, clock = TimeLedger(), begin

    def until(time: float) -> float:
        """Seconds from the clock to `time`, to which it goes; 0 for what is past."""
        nonlocal clock
        passed = max(time - clock, 0.0)
        clock += passed
        return passed

    for pp_rank, action, start, over in spans:
        source = made.get(action)
        if source is not None and source.pp_rank != pp_rank and source.end > clock:
            waited = ledger.waiting.get(source.pp_rank, 0.0)
            ledger.waiting[source.pp_rank] = waited + until(min(source.end, start))
            ledger.messages += until(start)
        ledger.host += until(start)
        if action.op in COMPUTE:
            ledger.compute += until(over)
        else:
            ledger.gradients += until(over)
    ledger.drain += until(min(last, rank.agreed))
    ledger.agreement += until(rank.agreed)
    ledger.optimizer += until(rank.end)
    ledger.others += until(end)
    return ledger
