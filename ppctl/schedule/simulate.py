"""(Schedule, Costs) -> Trace, and results from traces: the critical path, time slots, activations in flight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain, repeat

from ppctl.errors import Problem, ScheduleError
from ppctl.schedule.action import (
    BACKWARDS,
    COMPUTE,
    INPUT_GRADIENTS,
    LIFE_ENDS,
    PASSED_ON,
    TIMED,
    Action,
    Channel,
    F,
    Op,
    Pair,
    Schedule,
    grouped,
)
from ppctl.schedule.executor import Execution, execute
from ppctl.schedule.trace import Span, Trace, new_span


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds per stage and microbatch, in model order, and seconds per message. A split backward takes half of
    `backward` for each half unless `input_gradient` and `weight_gradient` are given. A message takes `message`, or its
    channel's entry in `messages`; the messages of a channel go one after another."""

    forward: Sequence[float]
    backward: Sequence[float]
    input_gradient: Sequence[float] | None = None
    weight_gradient: Sequence[float] | None = None
    reduce_grad: Sequence[float] | None = None
    message: float = 0.0
    messages: Mapping[Channel, float] = field(default_factory=dict)
    exchanges: Sequence[tuple[float, float]] | None = None
    """The seconds of exchanges in each stage's forward and input gradient, which the other half of a pair hides."""
    overlapped_link: float = 1.0
    """The share of their rate that exchanges reach beside computation."""

    @classmethod
    def uniform(cls, num_stages: int, forward: float = 1.0, backward: float = 2.0, message: float = 0.0) -> Costs:
        """Costs that are equal for every stage."""
        return cls((forward,) * num_stages, (backward,) * num_stages, message=message)

    def seconds(self) -> dict[Op, Sequence[float]]:
        """Seconds of each operation, by stage."""
        half = [0.5 * seconds for seconds in self.backward]
        return {
            Op.F: self.forward,
            Op.B: self.backward,
            Op.I: half if self.input_gradient is None else self.input_gradient,
            Op.W: half if self.weight_gradient is None else self.weight_gradient,
            Op.REDUCE_GRAD: [0.0] * len(half) if self.reduce_grad is None else self.reduce_grad,
        }

    def saved(self, pairs: Iterable[Pair]) -> dict[Action, float]:
        """Seconds by which pairs' actions are shorter than alone: a pair takes the sum of its computations, or of its
        exchanges at `overlapped_link`, whichever is longer, and no less than either action alone."""
        if self.exchanges is None:
            return {}
        seconds, less = self.seconds(), dict[Action, float]()
        for pair in pairs:
            ahead, back = (seconds[action.op][action.stage] for action in pair)
            sent, sent_back = self.exchanges[pair.forward.stage][0], self.exchanges[pair.backward.stage][1]
            linked = (sent + sent_back) / self.overlapped_link
            together = max(ahead + back - sent - sent_back, linked, ahead, back)
            share = max(0.0, 1 - together / (ahead + back))
            less[pair.forward], less[pair.backward] = share * ahead, share * back
        return less


def simulate(schedule: Schedule, costs: Costs) -> Trace:
    """The trace of every F, B, I, W and REDUCE_GRAD; messages take time but are no spans.

    A lowered schedule runs with its messages and capacities; in a compute-only schedule every message is sent and
    received immediately. The two actions of a pair hide each other's exchanges (`Costs.saved`). Raises ScheduleError if
    the schedule deadlocks (`verify` says why).
    """
    return traced(schedule, run_of(schedule, costs))


def traced(schedule: Schedule, run: Execution) -> Trace:
    """The trace of a schedule that was run to its end."""
    rows = map(zip, map(repeat, range(schedule.placement.pp)), timed(schedule), run.starts, run.ends)
    return Trace(schedule.placement.pp, tuple(map(new_span, chain.from_iterable(rows))), schedule.pairs)


def timed(schedule: Schedule) -> list[list[Action]]:
    """By pp_rank, the actions with times in an `Execution`: all but messages."""
    return [[action for action in row if action[0] in TIMED] for row in schedule.actions]


def run_of(schedule: Schedule, costs: Costs) -> Execution:
    """The times that `simulate` puts into a trace, rank by rank. Raises ScheduleError if the schedule deadlocks."""
    run = attempted(schedule, costs)
    if run.stuck:
        waits = ", ".join(f"rank {r} at {schedule.actions[r][i]}" for r, i in sorted(run.stuck.items()))
        raise ScheduleError(Problem("PP-E317", f"schedule {schedule.name} hangs: {waits}"))
    return run


def attempted(schedule: Schedule, costs: Costs) -> Execution:
    """The run of `run_of`, also for a schedule that deadlocks: ranks that did not finish are in `stuck`."""
    message, saved = (lambda channel: costs.messages.get(channel, costs.message)), costs.saved(schedule.pairs)
    return execute(schedule, costs.seconds(), message, saved)


def computing(actions: Sequence[Sequence[Action]], run: Execution) -> list[list[float]]:
    """By pp_rank, the seconds of each F, B, I and W of these `timed` lists."""
    rows = map(zip, actions, run.starts, run.ends)
    return [[end - start for (op, _, _), start, end in row if op in COMPUTE] for row in rows]


def bubble_of(computed: Sequence[Sequence[float]], run: Execution) -> float:
    """The `bubble_fraction` of a run, from its `computing`."""
    return 1.0 - sum(chain.from_iterable(computed)) / (len(computed) * run.seconds) if run.seconds else 0.0


def in_flight(schedule: Schedule, *, until: Set[Op] = LIFE_ENDS) -> tuple[int, ...]:
    """Per pp_rank, the most (stage, microbatch) activations alive at once: from the start of F to the end of B, or of W
    if the backward is split (of I if `until` is INPUT_GRADIENTS); without a backward only during F."""
    peaks = []
    for row in schedule.actions:
        ends = {(stage, mb) for op, stage, mb in row if op in until}
        alive = most = 0
        for op, stage, mb in row:
            if op is F:
                most = max(most, alive + 1)
                alive += (stage, mb) in ends
            elif op in until:
                alive -= 1
        peaks.append(most)
    return tuple(peaks)


_KINDS = ("forward", "backward", "messages", "gradients")


def critical_path(trace: Trace) -> list[Span]:
    """The chain of spans that ends with the last one, in order; the end (and message) of each lets the next start."""
    rows = trace.rows()
    run = Execution([[span.start for span in row] for row in rows], [[span.end for span in row] for row in rows], {})
    return longest_chain([[span.action for span in row] for row in rows], run)


def longest_chain(actions: Sequence[Sequence[Action]], run: Execution) -> list[Span]:
    """The `critical_path` of a run of these `timed` lists."""
    ends, at = run.ends, dict[Action, tuple[int, int]]()
    for pp_rank, row in enumerate(ends):
        at.update(zip(actions[pp_rank], zip(repeat(pp_rank), range(len(row))), strict=False))

    def latest(places: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        return max(places, key=lambda place: ends[place[0]][place[1]], default=None)

    path: dict[Action, Span] = {}
    last = latest((pp_rank, max(range(len(row)), key=row.__getitem__)) for pp_rank, row in enumerate(ends) if row)
    # In a wrong file an action may wait for itself.
    while last is not None and (action := actions[last[0]][last[1]]) not in path:
        pp_rank, index = last
        path[action] = Span(pp_rank, action, run.starts[pp_rank][index], ends[pp_rank][index])
        # The previous span of its rank, or the span that made its input, whichever is later.
        op, stage, mb = action
        ops, source = ({F}, stage - 1) if op is F else (INPUT_GRADIENTS if op in PASSED_ON else (), stage + 1)
        made = [place for each in ops if (place := at.get(Action(each, source, mb)))]
        last = latest([(pp_rank, index - 1)] * (index > 0) + made)
    return list(path.values())[::-1]


def seconds_by_kind(path: list[Span]) -> dict[str, float]:
    """Kind of action -> seconds on a critical path; time between two spans counts as a message."""
    seconds = dict.fromkeys(_KINDS, 0.0)
    for index, (_, (op, _, _), start, end) in enumerate(path):
        kind = "forward" if op is F else "backward" if op in BACKWARDS else "gradients"
        seconds[kind] += end - start
        if index:
            seconds["messages"] += start - path[index - 1].end
    return seconds


def to_slots(schedule: Schedule) -> str:
    """The CSV of computations, without messages and gradient sync, every action in its first possible slot. A pair is
    one cell, in its forward's slot. For torch's `_load_csv(format="compute_only")` and `Schedule.from_csv`. Raises
    ScheduleError for a schedule that hangs."""
    rows = tuple(tuple(action for action in row if action.op in COMPUTE) for row in schedule.actions)
    plain = replace(schedule, actions=rows, capacities={})
    stages = schedule.placement.num_stages
    one = (1.0,) * stages
    spans = simulate(plain, Costs(one, one, one, one)).spans
    columns = round(max((span.end for span in spans), default=0.0))
    cells = [[""] * columns for _ in rows]
    slots = {span.action: round(span.start) for span in spans}
    for row, line in zip(rows, cells, strict=True):
        for each in grouped(row, plain.pairs):
            line[slots[each.forward if isinstance(each, Pair) else each]] = str(each)
    return "".join(",".join(row) + "\n" for row in cells)
