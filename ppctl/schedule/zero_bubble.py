"""Schedules that split the backward: input gradients early, weight gradients where a rank would idle.

ZB-H1 and ZB-H2 (Qi et al., arXiv 2401.10241) and torch's three: interleaved zero-bubble (ZB-H1 for several chunks), ZBV
(the same authors, arXiv 2405.15362) and DualPipeV (DeepSeek), the last two on a V of two stages per rank and written as
phases of short words, `F1` for a forward of the rank's second stage. V-Half and V-Min (arXiv 2405.15362) repeat a
building block, the four starts of one microbatch on a rank, every six slots: the block determines how late a rank runs
its forwards, and so how many activations it holds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, islice
from typing import NamedTuple

from ppctl.schedule.action import INPUT_GRADIENTS, Action, I, Op, Pair, Placement, Schedule, W, lane
from ppctl.schedule.schedule_table import get_schedule_table


def interleaved_zero_bubble(pp: int, vpp: int, num_microbatches: int, group: int) -> Schedule:
    """Interleaved 1F1B with half its warm-up: weight gradients run `pp_rank` backwards late and fill the gap."""
    return _on_a_loop("interleaved_zero_bubble", pp, vpp, num_microbatches, group)


def zb_h1(pp: int, vpp: int, num_microbatches: int, group: int) -> Schedule:
    """ZB-H1: 1F1B whose last rank runs its weight gradients so late that it holds as much as the first. One chunk.
    Bubble time (pp - 1)(tf + tb - tw) if tw is at most tf and tb, with as much memory as 1F1B's first rank."""
    return _on_a_loop("zb_h1", pp, 1, num_microbatches, group)


def zb_h2(pp: int, vpp: int, num_microbatches: int, group: int) -> Schedule:
    """ZB-H2: ZB-H1 with twice the forwards ahead and weight gradients twice as late. One chunk. No bubble but filling
    and draining (pp - 1 forwards in front, none after the first rank) if F, I and W take equal times and
    num_microbatches is at least 2 pp - 1, with activations of 2 pp - 1 microbatches on every rank."""
    return _on_a_loop("zb_h2", pp, 1, num_microbatches, group, times=2)


def _on_a_loop(name: str, pp: int, vpp: int, num_microbatches: int, group: int, times: int = 1) -> Schedule:
    """The schedule in which rank r warms up with `times` forwards per rank after it, and runs Ws `times` r backwards
    late."""
    table = get_schedule_table(num_microbatches, vpp, group)
    rows = []
    for pp_rank in range(pp):
        stages = range(pp_rank, pp * vpp, pp)
        ahead = [Action(Op.F, stages[chunk], mb) for mb, chunk in table]
        back = [(stages[vpp - 1 - chunk], mb) for mb, chunk in table]
        warmup = min((vpp - 1) * group + times * (pp - 1 - pp_rank), len(table))
        row, forwards, late = ahead[:warmup], iter(ahead[warmup:]), iter(back)
        for number, (stage, mb) in enumerate(back):
            row += [*islice(forwards, 1), Action(Op.I, stage, mb)]
            row += [Action(Op.W, *unit) for unit in islice(late, int(number >= times * pp_rank))]
        rows.append((*row, *(Action(Op.W, *unit) for unit in late)))
    return Schedule(name, Placement("loop", pp, pp * vpp), num_microbatches, tuple(rows))


def fills_zbv(pp: int) -> int:
    """The fewest microbatches that fill ZBV's V."""
    return 2 * pp - 1


def zbv_zero_bubble(pp: int, vpp: int, num_microbatches: int, group: int) -> Schedule:
    """ZBV: down and up a V with as many activations in flight as 1F1B, every backward split."""
    full = max(num_microbatches, fills_zbv(pp))
    """Fewer cannot fill the V: the list for this many is made, and missing microbatches are left out."""

    def row(pp_rank: int, words: _Words) -> None:
        words.add("F0", 2 * (pp - pp_rank) - 1)
        words.add("F1 F0", pp_rank)
        words.add("F1 I1 W1", pp - pp_rank)
        words.add("F0 I0 W0 F1 I1 W1", full - words.made["F0"])
        words.add("I0 W0 F1 I1 W1", full - words.made["F1"])
        words.add("I0 I1", pp_rank)
        words.add("I0 W0", pp - pp_rank)
        words.add("W1", full - words.made["W1"])
        words.add("W0", full - words.made["W0"])

    return _on_a_v("zbv_zero_bubble", pp, num_microbatches, row)


def fills_dualpipev(pp: int) -> int:
    """The fewest microbatches for which DualPipeV has lists."""
    return 2 * pp


def dualpipev(pp: int, vpp: int, num_microbatches: int, group: int) -> Schedule:
    """DualPipeV: in its main phase a rank's two stages take turns, one's forward paired with the other's backward. At
    most 2 pp + 1 activations of half a rank each are in flight. At its end rank r defers r + 1 weight gradients;
    `passes.run_weights_sooner` can reduce this."""

    def row(pp_rank: int, words: _Words) -> None:
        behind = pp - 1 - pp_rank
        words.add("F0", 2 * behind)
        words.add("F0 F1", pp_rank + 1)
        words.add("I1 W F1", behind)
        words.add("F0 B1 F1+B0", 1 - min(behind, 1))  # the last rank's comes first: all others wait for it
        words.add("F0+B1 F1+B0", num_microbatches - fills_dualpipev(pp) + pp_rank + min(behind, 1))
        words.add("B1 F1+B0", behind)
        whole = (pp_rank + 1) // 2  # whole backwards of the last pairs; the others leave W for the end
        words.add("B1 B0", whole)
        words.add("B1 I0" if pp_rank % 2 == 0 else "I1 I0")
        words.add("I1 I0", pp_rank - whole)
        words.add("W I0", behind)
        words.add("W", pp_rank + 1)

    return _on_a_v("dualpipev", pp, num_microbatches, row)


_new_pair = partial(tuple.__new__, Pair)


class _Words:
    """A rank's list while it is made: every word counts its own microbatches. A bare `W` is the oldest deferred weight
    gradient, and `F0+B1` is a pair."""

    def __init__(self, stages: tuple[int, ...], count: int) -> None:
        self.stages, self.count = stages, count
        self.made: Counter[str] = Counter()
        self.owed: deque[Action] = deque()
        self.actions: list[Action] = []
        self.pairs: list[Pair] = []

    def add(self, phase: str, times: int = 1) -> None:
        words = phase.split()
        if "W" not in words:
            self._rounds(words, times)
            return
        for word in words * times:
            if word != "W":
                self._rounds([word], 1)
            elif self.owed:
                self.actions.append(self.owed.popleft())

    def _rounds(self, words: list[str], times: int) -> None:
        """Add `times` rounds of words at C speed; each word counts its own microbatches."""
        columns, owed = list[Sequence[Action]](), list[Sequence[Action]]()
        for word in words:
            own = list[Sequence[Action]]()
            for op, chunk, counted in map(_parsed, word.split("+")):
                stage, first = self.stages[chunk], self.made[counted]
                self.made[counted] += times
                end = max(first, first + times)
                own.append(lane(op, stage, self.count)[first:end])
                if op is I:
                    owed.append(lane(W, stage, self.count)[first:end])
            if len(own) > 1:
                self.pairs += map(_new_pair, zip(*own, strict=True))
            columns += own
        self.actions += chain.from_iterable(zip(*columns, strict=True))
        self.owed += chain.from_iterable(zip(*owed, strict=True))


@cache
def _parsed(word: str) -> tuple[Op, int, str]:
    """(the operation of a word, the chunk, the series whose microbatches it counts); B and I are one series."""
    op = Op(word[0])
    return op, int(word[1]), ("I" if op in INPUT_GRADIENTS else op) + word[1]


def _on_a_v(name: str, pp: int, num_microbatches: int, fill: Callable[[int, _Words], None]) -> Schedule:
    """The schedule on a V whose rows `fill` writes, without microbatches that the step does not have."""
    placement = Placement("v", pp, 2 * pp)
    rows = []
    pairs: list[Pair] = []
    for pp_rank in range(pp):
        words = _Words(placement.stages_of(pp_rank), max(num_microbatches, 2 * pp))
        fill(pp_rank, words)
        full = num_microbatches == words.count
        rows.append(tuple(words.actions if full else [each for each in words.actions if each.mb < num_microbatches]))
        pairs += words.pairs
    return Schedule(name, placement, num_microbatches, tuple(rows), pairs=frozenset(pairs))


_INTERVAL = 6
"""Slots from one microbatch to the next: F, I and W on each of a rank's two stages, one slot each."""


class _Block(NamedTuple):
    """The slots in which microbatch 0 starts on a rank: `down` is the rank's first stage, `up` its second."""

    forward_down: int
    forward_up: int
    gradient_up: int
    gradient_down: int


def v_half(pp: int, vpp: int, num_microbatches: int, group: int) -> Schedule:
    """V-Half: at most 2 (pp // 2 + 1) chunks in flight, about half of 1F1B's, and for equal F, I and W at most half of
    its bubble. The bubble does not grow with the number of microbatches if 2 F <= W + 2 I and 2 I <= W + 2 F."""
    gap = 3 if pp % 2 == 0 else 0
    blocks = [_Block(2 * r, 3 * pp - r - 2, 3 * pp + gap + 2 * r - 1, 6 * pp + gap - r - 2) for r in range(pp)]
    return _repeated("v_half", blocks, 2 * ((pp + 2) // 2), num_microbatches)


def v_min(pp: int, vpp: int, num_microbatches: int, group: int) -> Schedule:
    """V-Min: at most 2 ((pp + 4) // 3) chunks in flight, about a third of 1F1B's, and two thirds of its bubble if F, I
    and W take equal times. The bubble is then 2 (pp - 1) such times, and (pp - 4) / 6 more if pp is 1 more than a
    multiple of 3. For different times it grows with the number of microbatches."""
    gap = 2 if pp % 3 == 0 else 0
    blocks = [_Block(r, 2 * pp - r - 1, 2 * pp + gap + r, 4 * pp + gap - r - 1) for r in range(pp)]
    return _repeated("v_min", blocks, 2 * ((pp + 4) // 3), num_microbatches)


def _repeated(name: str, blocks: list[_Block], most: int, num_microbatches: int) -> Schedule:
    """The block repeated, and squeezed: slot by slot every rank runs the runnable action that is due first. A weight
    gradient runs if nothing else can. A rank holds at most `most` (stage, microbatch) activations; its first stage
    leaves room for as many of the second as the block has between the second's F and I. So nothing can hang: the oldest
    unfinished microbatch has its inputs, and room on either stage.
    """
    placement = Placement("v", len(blocks), 2 * len(blocks))
    done: _Done = {op: [0] * placement.num_stages for op in (Op.F, Op.I, Op.W)}
    ranks = [
        _OpenRow(placement.stages_of(pp_rank), block, most, num_microbatches, done)
        for pp_rank, block in enumerate(blocks)
    ]
    left = 3 * placement.num_stages * num_microbatches
    while left:
        # All ranks choose before any finishes: results of this slot can be used from the next slot on.
        chosen = [(rank, unit) for rank in ranks if (unit := rank.next()) is not None]
        for rank, unit in chosen:
            rank.run(*unit)
        left -= len(chosen)
    return Schedule(name, placement, num_microbatches, tuple(tuple(rank.row) for rank in ranks))


_Done = dict[Op, list[int]]
"""F, I and W -> how many microbatches each stage has finished."""


@dataclass(slots=True)
class _OpenRow:
    """One rank's list while it is made: the actions that may run in the next slot, and which is due first."""

    stages: tuple[int, ...]
    block: _Block
    most: int
    num_microbatches: int
    done: _Done
    row: list[Action] = field(default_factory=list)
    owed: deque[int] = field(default_factory=deque)
    """The stages of the deferred weight gradients, the oldest first."""

    def next(self) -> tuple[Op, int] | None:
        """The operation and the stage to run next; None if all remaining actions wait for other ranks."""
        down, up = self.stages
        forward, gradient, weights = self.done.values()
        held_down, held_up = forward[down] - weights[down], forward[up] - weights[up]
        room = held_down + held_up < self.most
        due: list[tuple[int, Op, int]] = []
        # Enough room is left for the second stage.
        most_down = self.most - max(1, -((self.block.forward_up - self.block.gradient_up) // _INTERVAL))
        if room and held_down < most_down and self._behind(forward, down, down - 1):
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

    def _behind(self, through: list[int], stage: int, source: int) -> bool:
        """Whether `stage` has a microbatch left that `source` has finished; the model's ends have all."""
        finished = through[source] if 0 <= source < len(through) else self.num_microbatches
        return through[stage] < finished

    def run(self, op: Op, stage: int) -> None:
        through = self.done[op]
        self.row.append(Action(op, stage, through[stage]))
        through[stage] += 1
        if op is Op.I:
            self.owed.append(stage)
        elif op is Op.W:
            self.owed.popleft()
