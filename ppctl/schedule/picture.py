"""The contents of a picture of a step: its trace, its stages, and the memory of every rank while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ppctl.schedule.action import LIFE_ENDS, Op
from ppctl.schedule.trace import Trace

KINDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.REDUCE_GRAD: "gradient reduction",
}
"""The names of operations in a picture."""


@dataclass(frozen=True, slots=True)
class StageNote:
    """The text of a stage in a picture."""

    stage: int
    pp_rank: int
    vpp_rank: int
    layers: str = ""
    """Such as `embedding, decoder 0-2`."""
    facts: tuple[str, ...] = ()
    """Further lines: parameters, FLOPs, sources of its times."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one device of a pp_rank: permanent ones, and those that a microbatch adds on each stage."""

    fixed: int
    per_microbatch: dict[int, int]
    """Bytes of one microbatch from its forward to its backward."""
    in_forward: dict[int, int] = field(default_factory=dict)
    """The most further bytes while the forward runs."""
    in_backward: dict[int, int] = field(default_factory=dict)
    """The most further bytes while the backward runs."""
    behind: int = 0
    """The most bytes after the last action, all bytes counted."""
    halves: Mapping[Op, Mapping[int, tuple[int, int]]] = field(default_factory=dict)
    """For split backwards: (operation, stage) -> (bytes it frees, further bytes while it runs). Else W frees all."""


Level = tuple[float, int]
"""(time in seconds, the bytes that a rank holds from then on)."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A step to be drawn. `memory` has an entry per pp_rank, or none; so has `measured`."""

    title: str
    subtitle: str
    trace: Trace
    stages: tuple[StageNote, ...]
    memory: tuple[RankMemory, ...] = ()
    """Each rank's memory in the plan."""
    measured: tuple[RankMemory | None, ...] = ()
    """Each rank's memory measured by a rehearsal; None for a pp_rank that was not rehearsed."""
    limit: int | None = None
    """Bytes of one device."""
    planned: Trace | None = None
    """For a measured step: the planned step, drawn below it on the same axis, from its own first action on."""


def memory_over_time(trace: Trace, memory: Sequence[RankMemory | None]) -> tuple[tuple[Level, ...], ...]:
    """Per pp_rank the bytes held, step by step: a microbatch's activations from the start of F to the end of B or W. ()
    if `memory` is empty; no levels for a pp_rank whose memory is None."""
    if not memory:
        return ()
    kept = {(a.stage, a.mb) for _, a, _, _ in trace.spans if a.op in LIFE_ENDS}
    changes: list[list[tuple[float, int]]] = [[] for _ in memory]
    for pp_rank, (op, stage, mb), start, end in trace.spans:
        held = memory[pp_rank]
        if held is None:
            continue
        size = held.per_microbatch.get(stage, 0)
        if op is Op.F:
            most = max(size, held.in_forward.get(stage, 0))
            stays = size if (stage, mb) in kept else 0
            changes[pp_rank] += [(start, most), (end, stays - most)]
        elif op in held.halves or op in LIFE_ENDS:
            whole = size, held.in_backward.get(stage, 0)
            freed, more = held.halves.get(op, {}).get(stage, whole)
            changes[pp_rank] += [(start, more), (end, -more - freed)]
    end = max((span.end for span in trace.spans), default=0.0)
    for held, rank in zip(memory, changes, strict=True):
        if held is not None and held.behind > held.fixed:
            rank.append((end, held.behind - held.fixed - sum(change for _, change in rank)))
    return tuple(() if held is None else _levels(held.fixed, rank) for held, rank in zip(memory, changes, strict=True))


def _levels(fixed: int, changes: list[tuple[float, int]]) -> tuple[Level, ...]:
    """Levels after each change, with frees before allocations of the same moment."""
    levels = {0.0: fixed}
    held = fixed
    for time, change in sorted(changes):
        levels[time] = held = held + change
    return tuple(levels.items())
