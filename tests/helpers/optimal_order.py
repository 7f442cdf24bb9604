"""The shortest step of a small pipeline, by branch and bound over every order, microbatches of a stage in order.

Knows actions and their prices by itself: it shares no code with the search that it judges, nor with the executor.
"""

from __future__ import annotations

from typing import NamedTuple

from ppctl.schedule.lane_orders import Task

_NO_LINE = -1


class _State(NamedTuple):
    done: tuple[int, ...]
    """By lane (3 x stage + 0 for F, 1 for I, 2 for W), how many microbatches are done."""
    clocks: tuple[float, ...]
    """By rank, the end of what it has done."""
    arrived: tuple[tuple[float, ...], ...]
    """By lane, when the inputs that are not used yet are there."""
    lines: tuple[float, ...]
    """By channel, when it is free."""
    held: tuple[float, ...]
    """By rank."""


class Pipeline:
    """The lanes of a task, and the search for its optimum."""

    def __init__(self, task: Task) -> None:
        place, costs = task.placement, task.costs
        stages = range(place.num_stages)
        assert costs.input_gradient is not None and costs.weight_gradient is not None
        prices = zip(costs.forward, costs.input_gradient, costs.weight_gradient, strict=True)
        self.seconds = [price for stage in prices for price in stage]
        self.rank = [place.rank_of(stage) for stage in stages]
        self.lanes = [[3 * s + kind for s in stages if self.rank[s] == r for kind in range(3)] for r in range(place.pp)]
        self.goes_to = [-1] * (3 * place.num_stages)
        for stage in stages:
            self.goes_to[3 * stage] = 3 * stage + 3 if stage + 1 < place.num_stages else 3 * stage + 1
            self.goes_to[3 * stage + 1] = 3 * stage - 2 if stage else -1
        names: dict[tuple[int, int, int], int] = {}
        self.line = [_NO_LINE] * len(self.goes_to)
        for lane, target in enumerate(self.goes_to):
            if target >= 0 and self.rank[lane // 3] != self.rank[target // 3]:
                name = (self.rank[lane // 3], self.rank[target // 3], lane % 3)
                self.line[lane] = names.setdefault(name, len(names))
        self.lines, self.message = len(names), costs.message
        self.count, self.sizes, self.limits = task.num_microbatches, task.sizes, task.limits
        self.seen: dict[tuple[int, ...], list[tuple[float, ...]]] = {}

    def shorter_than(self, seconds: float) -> float | None:
        """The shortest step if it is below `seconds`, else None."""
        size, ranks = len(self.goes_to), len(self.lanes)
        start = _State((0,) * size, (0.0,) * ranks, ((),) * size, (0.0,) * self.lines, (0.0,) * ranks)
        self.best = seconds
        self.seen.clear()
        self._branch(start, size * self.count)
        return self.best if self.best < seconds else None

    def _branch(self, state: _State, left: int) -> None:
        if left == 0:
            self.best = min(self.best, max(state.clocks))
            return
        if self._dominated(state) or self._too_late(state):
            return
        for _, lane, start in sorted(self._next(state)):
            self._branch(self._after(state, lane, start), left - 1)

    def _dominated(self, state: _State) -> bool:
        """Whether the same was done no later before; else the state is noted."""
        times = (*state.clocks, *(at for each in state.arrived for at in each), *state.lines)
        others = self.seen.setdefault(state.done, [])
        if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in others):
            return True
        others.append(times)
        return False

    def _too_late(self, state: _State) -> bool:
        left = (
            clock + sum((self.count - state.done[lane]) * self.seconds[lane] for lane in lanes)
            for clock, lanes in zip(state.clocks, self.lanes, strict=True)
        )
        return max(left) >= self.best

    def _next(self, state: _State) -> list[tuple[float, int, float]]:
        """(end, lane, start) of everything that a rank could do next."""
        found = []
        for rank, lanes in enumerate(self.lanes):
            for lane in lanes:
                start = self._start(state, rank, lane)
                if start is not None and self._rest(lane, start) < self.best:
                    found.append((start + self.seconds[lane], lane, start))
        return found

    def _start(self, state: _State, rank: int, lane: int) -> float | None:
        kind, done, clock = lane % 3, state.done[lane], state.clocks[rank]
        if done >= self.count or (kind and done >= state.done[lane - 1]):
            return None
        if kind == 0 and state.held[rank] + self.sizes[lane // 3] > self.limits[rank] * (1 + 1e-12):
            return None
        if kind == 2 or lane == 0:
            return clock
        return max(clock, state.arrived[lane][0]) if state.arrived[lane] else None

    def _rest(self, lane: int, start: float) -> float:
        """The end of this microbatch's W on the first stage, at the earliest."""
        while True:
            start += self.seconds[lane]
            if self.goes_to[lane] < 0:
                return start + (self.seconds[lane + 1] if lane % 3 == 1 else 0.0)
            start += self.message if self.line[lane] != _NO_LINE else 0.0
            lane = self.goes_to[lane]

    def _after(self, state: _State, lane: int, start: float) -> _State:
        rank, kind, end = self.rank[lane // 3], lane % 3, start + self.seconds[lane]
        done, clocks, arrived = list(state.done), list(state.clocks), list(state.arrived)
        lines, held = list(state.lines), list(state.held)
        done[lane] += 1
        clocks[rank] = end
        if kind < 2 and lane:
            arrived[lane] = arrived[lane][1:]
        if (target := self.goes_to[lane]) >= 0:
            if (line := self.line[lane]) != _NO_LINE:
                end = lines[line] = max(end, lines[line]) + self.message
            arrived[target] = (*arrived[target], end)
        held[rank] += self.sizes[lane // 3] * (kind == 0) - self.sizes[lane // 3] * (kind == 2)
        return _State(tuple(done), tuple(clocks), tuple(arrived), tuple(lines), tuple(held))
