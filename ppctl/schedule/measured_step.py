"""A step as all ranks of a job ran it: the file of a traced step, the trace of one of its pipelines, and its ledger.

Also simulates a measured step again, with the means of its stages, and with one stage faster or slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypedDict

from ppctl.records.json_reader import Count, read
from ppctl.schedule.action import COMPUTE, Action, Op, Schedule
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import Span, Trace, makers, message_times, step_time

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
    """(index in the rank's row, start, end) of the actions of the last schedule call that take time, in order."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step, as every rank stamped it."""

    step: int
    ranks: tuple[RankStamps, ...]
    """The stamps of each rank."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, with times in whole microseconds since the first rank began."""
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
        """Return the step of data from `to_json`. Raises ValueError for other data."""
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
    """How one rank spent a step, in seconds: the entries add up to the step, from the begin of the first rank to the
    end of the last."""

    compute: float = 0.0
    """Seconds in F, B, I and W."""
    gradients: float = 0.0
    """Seconds in the schedule's other actions: sums of gradients."""
    waiting: dict[int, float] = field(default_factory=dict)
    """pp_rank -> seconds in which this rank waited for that rank's computation."""
    messages: float = 0.0
    """Seconds from the end of that computation until this rank went on."""
    host: float = 0.0
    """Seconds between actions whose input was there: the interpreter, sends, and the begin of the step."""
    drain: float = 0.0
    """Seconds after the rank's last action, until the last action of its pipeline was over."""
    agreement: float = 0.0
    """Seconds from then until the reports of all ranks had come: sums, the norm, and other pipelines."""
    optimizer: float = 0.0
    """Seconds of clipping and update; on a GPU, which may do them later, the host's part."""
    others: float = 0.0
    """Seconds from this rank's end until the last rank had ended."""

    @property
    def total(self) -> float:
        """The sum of all entries."""
        return sum(self.rows().values())

    def rows(self) -> dict[str, float]:
        """The seconds of each entry by its name, in the order in which entries are shown."""
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
    """One rank's ledger: every stretch of time from begin to end is in one entry."""
    ledger, clock = TimeLedger(), begin

    def until(time: float) -> float:
        """Move the clock to `time`; returns the seconds, 0 for a past time."""
        nonlocal clock
        passed = max(time - clock, 0.0)
        clock += passed
        return passed

    for pp_rank, action, start, ended in spans:
        source = made.get(action)
        if source is not None and source.pp_rank != pp_rank and source.end > clock:
            waited = ledger.waiting.get(source.pp_rank, 0.0)
            ledger.waiting[source.pp_rank] = waited + until(min(source.end, start))
            ledger.messages += until(start)
        ledger.host += until(start)
        if action.op in COMPUTE:
            ledger.compute += until(ended)
        else:
            ledger.gradients += until(ended)
    ledger.drain += until(min(last, rank.agreed))
    ledger.agreement += until(rank.agreed)
    ledger.optimizer += until(rank.end)
    ledger.others += until(end)
    return ledger


SHARE = 0.1
"""The share by which a stage is made faster or slower."""


class StageChange(NamedTuple):
    """A stage as it was measured, and the change of the step if it were faster or slower. Seconds."""

    stage: int
    forward: float
    """Mean of F."""
    backward: float
    """Mean of B, or of I and W together."""
    faster: float
    """Change of the step if the stage's work took a tenth less time."""
    slower: float
    """Change of the step if the stage's work took a tenth more time."""


def measured_costs(trace: Trace, schedule: Schedule) -> Costs:
    """Costs for simulating the schedule again: means by operation and stage, medians of messages. If a stage ran only
    unsplit backwards, I and W count as half each; if only split ones, B as their sum."""
    durations: dict[Op, dict[int, list[float]]] = {op: {} for op in Op}
    for _, (op, stage, _), start, end in trace.spans:
        durations[op].setdefault(stage, []).append(end - start)
    means = {op: {stage: sum(each) / len(each) for stage, each in row.items()} for op, row in durations.items()}
    stages = range(schedule.placement.num_stages)
    halves = {op: [means[op].get(s, means[Op.B].get(s, 0.0) / 2) for s in stages] for op in (Op.I, Op.W)}
    whole = [means[Op.B].get(s, halves[Op.I][s] + halves[Op.W][s]) for s in stages]
    channels = message_times([trace.spans])
    usual = sorted(channels.values())[len(channels) // 2] if channels else 0.0
    return Costs(
        [means[Op.F].get(s, 0.0) for s in stages],
        whole,
        halves[Op.I],
        halves[Op.W],
        [means[Op.REDUCE_GRAD].get(s, 0.0) for s in stages],
        usual,
        channels,
    )


def stage_changes(schedule: Schedule, costs: Costs) -> tuple[float, list[StageChange]]:
    """(seconds of the simulated step, the StageChange of each stage)."""
    now = step_time(simulate(schedule, costs))

    def changed(stage: int, factor: float) -> float:
        return step_time(simulate(schedule, _scaled(costs, stage, factor))) - now

    return now, [
        StageChange(s, costs.forward[s], costs.backward[s], changed(s, 1 - SHARE), changed(s, 1 + SHARE))
        for s in range(schedule.placement.num_stages)
    ]


def _scaled(costs: Costs, stage: int, factor: float) -> Costs:
    def scaled(seconds: Sequence[float] | None) -> list[float] | None:
        return None if seconds is None else [each * (factor if s == stage else 1) for s, each in enumerate(seconds)]

    names = ("forward", "backward", "input_gradient", "weight_gradient")
    changed: dict[str, Any] = {name: scaled(getattr(costs, name)) for name in names}
    return replace(costs, **changed)
