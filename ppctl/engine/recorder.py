"""When each action ran: stamps that allocate nothing in the steady state, and are read as spans.

Messages have no spans: waiting for one is outside every span.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from time import perf_counter

import torch

from ppctl.schedule.action import COMPUTE, MESSAGES, PASSED_ON, Action, Op
from ppctl.schedule.trace import Span


@dataclass(frozen=True, slots=True)
class StepTotals:
    """One rank's step in figures, seconds. Starts and ends are on the recorder's clock, shifted by its offset."""

    busy: float
    """Time inside F, B, I and W."""
    first_start: float
    """Start of the first action."""
    last_end: float
    """End of the last action."""
    forward: dict[int, float]
    """Mean time of F by stage."""
    backward: dict[int, float]
    """Mean time of a whole backward (B, or I plus W) by stage."""


class Recorder:
    """Stamps for one action list, on the CPU's clock. `begin` and `end` take the action's index in the list."""

    def __init__(self, pp_rank: int, actions: Sequence[Action], *, clock_offset: float = 0.0) -> None:
        self.device = torch.device("cpu")
        """The device whose time is stamped."""
        self.pp_rank = pp_rank
        self.clock_offset = clock_offset
        """Seconds to add to this host's clock to get the pipeline's common clock."""
        Recorder.follow(self, actions)

    def follow(self, actions: Sequence[Action]) -> None:
        """Stamp another list from the next step on; earlier stamps are dropped."""
        self.actions = tuple(actions)
        self._stamped = [index for index, action in enumerate(self.actions) if action.op not in MESSAGES]
        stamped = [self.actions[index] for index in self._stamped]
        self._keys = [(op is Op.F, stage) if op in COMPUTE else None for op, stage, _ in stamped]
        """For each stamped action, (whether it is a forward, its stage), or None if it does not compute."""
        self._counts = Counter((op is Op.F, stage) for op, stage, _ in stamped if op in PASSED_ON)
        self._starts = [0.0] * len(self.actions)
        self._ends = [0.0] * len(self.actions)

    def begin_step(self) -> None:
        """A step starts."""

    def begin(self, index: int) -> None:
        """Stamp the start of an action."""
        self._starts[index] = perf_counter()

    def end(self, index: int) -> None:
        """Stamp the end of an action."""
        self._ends[index] = perf_counter()

    def end_step(self) -> None:
        """The step is over."""

    def stamps(self) -> list[tuple[int, float, float]]:
        """(index, start, end) of each stamped action in the last step that can be read, on the common clock."""
        shift = self.clock_offset
        return [(index, self._starts[index] + shift, self._ends[index] + shift) for index in self._stamped]

    def stamps_now(self) -> list[tuple[int, float, float]]:
        """The stamps of the step that has just ended; empty if the device has not finished it."""
        return self.stamps()

    def spans(self) -> list[Span]:
        """The stamps as spans of a trace."""
        return [Span(self.pp_rank, self.actions[index], start, end) for index, start, end in self.stamps()]

    def totals(self) -> StepTotals | None:
        """The stamps in figures; None if no step can be read yet."""
        stamps = self.stamps()
        if not stamps:
            return None
        sums: dict[tuple[bool, int], float] = {}
        for (_, start, end), key in zip(stamps, self._keys, strict=True):
            if key is not None:
                sums[key] = sums.get(key, 0.0) + end - start
        means = {key: total / max(self._counts[key], 1) for key, total in sums.items()}
        return StepTotals(
            busy=sum(sums.values()),
            first_start=min(map(itemgetter(1), stamps)),
            last_end=max(map(itemgetter(2), stamps)),
            forward={stage: mean for (is_forward, stage), mean in means.items() if is_forward},
            backward={stage: means.get((False, stage), 0.0) for _, stage in means},
        )


class CudaRecorder(Recorder):
    """Stamps with CUDA events on the current stream, and reads a step's events at the end of the next step.

    Only the constructor waits for the device: a step whose events the device has not passed by then is never read. Two
    sets of events take turns; each step's origin is placed on the host's clock by its distance to the previously read
    origin, so that the float milliseconds of `elapsed_time` never grow large.
    """

    def __init__(self, pp_rank: int, actions: Sequence[Action], *, clock_offset: float = 0.0) -> None:
        super().__init__(pp_rank, actions, clock_offset=clock_offset)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._now = _EventSet(self._stamped)
        self._before = _EventSet(self._stamped)
        self._steps = 0
        self._origin = _event()
        torch.cuda.synchronize()
        self._origin.record()
        self._origin_time = perf_counter()
        self._readable: list[tuple[int, float, float]] = []

    def follow(self, actions: Sequence[Action]) -> None:
        """Make events for the new list; none is recorded, and the device is not waited for."""
        super().follow(actions)
        self._now, self._before = _EventSet(self._stamped), _EventSet(self._stamped)
        self._steps, self._readable = 0, []

    def begin_step(self) -> None:
        """Take the other set of events and record the step's origin."""
        self._now, self._before = self._before, self._now
        self._now.origin.record()

    def begin(self, index: int) -> None:
        """Record the start of an action on the current stream."""
        self._now.starts[index].record()

    def end(self, index: int) -> None:
        """Record the end of an action on the current stream."""
        self._now.ends[index].record()

    def end_step(self) -> None:
        """Read the previous step, if the device has finished it."""
        self._steps += 1
        if self._steps > 1 and self._stamped and self._before.ends[self._stamped[-1]].query():
            self._read(self._before)

    def stamps(self) -> list[tuple[int, float, float]]:
        """The stamps of the newest step that was read, one step late; empty before."""
        return self._readable

    def stamps_now(self) -> list[tuple[int, float, float]]:
        """The stamps of the step that has just ended; call it after a wait for the device, as for the gradient norm."""
        passed = self._stamped and self._now.ends[self._stamped[-1]].query()
        return self._stamps_of(self._now, self._time_of(self._now)) if passed else []

    def _read(self, events: _EventSet) -> None:
        self._origin_time = self._time_of(events)
        self._readable = self._stamps_of(events, self._origin_time)
        self._origin, events.origin = events.origin, self._origin

    def _time_of(self, events: _EventSet) -> float:
        since: float = self._origin.elapsed_time(events.origin)  # milliseconds
        return self._origin_time + since / 1e3

    def _stamps_of(self, events: _EventSet, origin_time: float) -> list[tuple[int, float, float]]:
        zero, origin = origin_time + self.clock_offset, events.origin
        return [
            (i, zero + origin.elapsed_time(events.starts[i]) / 1e3, zero + origin.elapsed_time(events.ends[i]) / 1e3)
            for i in self._stamped
        ]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class _EventSet:
    """The events of one step: an origin, and a pair for every index that is stamped."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.origin = _event()
        pairs = {index: (_event(), _event()) for index in indices}
        self.starts = {index: start for index, (start, _) in pairs.items()}
        self.ends = {index: end for index, (_, end) in pairs.items()}


def make_recorder(
    pp_rank: int, actions: Sequence[Action], device: torch.device, *, clock_offset: float = 0.0
) -> Recorder:
    """The recorder for a device."""
    kind = CudaRecorder if device.type == "cuda" else Recorder
    return kind(pp_rank, actions, clock_offset=clock_offset)
