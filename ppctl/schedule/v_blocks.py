"""Schedules of a V whose activations are a half or a third of 1F1B's (Qi et al., arXiv 2405.15362).

Each is a building block, the four starts of one microbatch on a rank, that repeats every six slots. What follows from
it: how late a rank may run its forwards, and so how many activations it holds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from ppctl.schedule.action import Action, Op, Placement, Schedule

_INTERVAL = 6
"""Slots from one microbatch to the next: F, I and W on each of a rank's two stages, one slot each."""


class _Block(NamedTuple):
    """In which slots microbatch 0 starts on a rank: `down` is the rank's first stage, `up` its second."""

    forward_down: int
    forward_up: int
    gradient_up: int
    gradient_down: int


def v_half(pp: int, vpp: int, num_microbatches: int, group: int) -> Schedule:
    """V-Half: at most 2 (pp // 2 + 1) chunks in flight, about half of 1F1B's, and at most half of its bubble.

    The bubble is that if F, I and W take equal times. For any number of microbatches it stays what it is for a few,
    as long as 2 F <= W + 2 I and 2 I <= W + 2 F.
    """
    gap = 3 if pp % 2 == 0 else 0
    blocks = [_Block(2 * r, 3 * pp - r - 2, 3 * pp + gap + 2 * r - 1, 6 * pp + gap - r - 2) for r in range(pp)]
    return _repeated("v_half", blocks, 2 * ((pp + 2) // 2), num_microbatches)


def v_min(pp: int, vpp: int, num_microbatches: int, group: int) -> Schedule:
    """V-Min: at most 2 ((pp + 4) // 3) chunks in flight, about a third of 1F1B's, and two thirds of its bubble.

    The bubble is that if F, I and W take equal times: 2 (pp - 1) of one of them, and (pp - 4) / 6 more if pp is 1
    more than a multiple of 3. If they differ, it grows with the number of microbatches.
    """
    gap = 2 if pp % 3 == 0 else 0
    blocks = [_Block(r, 2 * pp - r - 1, 2 * pp + gap + r, 4 * pp + gap - r - 1) for r in range(pp)]
    return _repeated("v_min", blocks, 2 * ((pp + 4) // 3), num_microbatches)


def _repeated(name: str, blocks: list[_Block], most: int, num_microbatches: int) -> Schedule:
    """The block repeated, and squeezed: slot by slot every rank runs what is due first of all that it can run.

    A weight gradient runs if nothing else can. A rank holds at most `most` (stage, microbatch) activations, of which
    its first stage leaves as many to its second as the block has between that one's F and I. So nothing can hang: all
    that the oldest unfinished microbatch needs next is there, and it has room on either stage.
    """
    placement = Placement("v", len(blocks), 2 * len(blocks))
    done: _Done = {op: [0] * placement.num_stages for op in (Op.F, Op.I, Op.W)}
    ranks = [
        _OpenRow(placement.stages_of(pp_rank), block, most, num_microbatches, done)
        for pp_rank, block in enumerate(blocks)
    ]
    left = 3 * placement.num_stages * num_microbatches
    while left:
        # All ranks choose before any of them is through: what one does in this slot is of use from the next one on.
        chosen = [(rank, lane) for rank in ranks if (lane := rank.next()) is not None]
        for rank, lane in chosen:
            rank.run(*lane)
        left -= len(chosen)
    return Schedule(name, placement, num_microbatches, tuple(tuple(rank.row) for rank in ranks))


_Done = dict[Op, list[int]]
"""F, I and W -> how many microbatches each stage is through with."""


@dataclass(slots=True)
class _OpenRow:
    """One rank's list while it is made: which actions may run in the next slot, and which of them is due first."""

    stages: tuple[int, ...]
    block: _Block
    most: int
    num_microbatches: int
    done: _Done
    row: list[Action] = field(default_factory=list)
    owed: deque[int] = field(default_factory=deque)
    """The stages of which a weight gradient is deferred, the oldest first."""

    def next(self) -> tuple[Op, int] | None:
        """The operation and the stage to run next; None if all that is left waits for other ranks."""
        down, up = self.stages
        forward, gradient, weights = self.done.values()
        held_down, held_up = forward[down] - weights[down], forward[up] - weights[up]
        room = held_down + held_up < self.most
        due: list[tuple[int, Op, int]] = []
        if room and held_down < self._most_down() and self._behind(forward, down, down - 1):
            due.append((self.block.forward_down + _INTERVAL * forward[down], Op.F, down))
        if room and self._behind(forward, up, up - 1):
            due.append((self.block.forward_up + _INTERVAL * forward[up], Op.F, up))
        if gradient[up] < forward[up] and self._behind(gradient, up, up + 1):
            due.append((self.block.gradient_up + _INTERVAL * gradient[up], Op.I, up))
        if gradient[down] < forward[down] and self._behind(gradient, down, down + 1):
            due.append((self.block.gradient_down + _INTERVAL * gradient[down], Op.I, down))
        if due:
            return min(due)[1:]
        return (Op.W, self.owed[0]) if self.owed else None

    def _most_down(self) -> int:
        """How many activations the first stage may hold, so that enough room is left for the second."""
        return self.most - max(1, -((self.block.forward_up - self.block.gradient_up) // _INTERVAL))

    def _behind(self, through: list[int], stage: int, source: int) -> bool:
        """Whether `stage` has a microbatch left to do that `source` is through with; the model's ends have all."""
        there = through[source] if 0 <= source < len(through) else self.num_microbatches
        return through[stage] < there

    def run(self, op: Op, stage: int) -> None:
        through = self.done[op]
        self.row.append(Action(op, stage, through[stage]))
        through[stage] += 1
        if op is Op.I:
            self.owed.append(stage)
        elif op is Op.W:
            self.owed.popleft()
