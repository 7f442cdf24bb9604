"""A few rounds of a schedule, and what a rank holds at its fullest moment.

Knows how lists of actions fill a pipeline. Must not know prices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

from ppctl.cost.parameter_counts import trained_count, untrained_bytes
from ppctl.geometry.layers import Kind, alike, layer_kinds, parse_layers
from ppctl.layout import PipelineParallelLayerLayout
from ppctl.plan.schedule_choice import Choice, compute_only, presumed
from ppctl.plan.stages import precision_of
from ppctl.plan.violations import ConfigValues
from ppctl.schedule.action import INPUT_GRADIENTS, WEIGHT_GRADIENTS, Action, F, Placement, Schedule
from ppctl.schedule.policies import POLICIES

FILLED, STEADY = 3, 6
"""After FILLED rounds of the pipeline, every schedule has reached its peak memory; after STEADY rounds, it keeps its
pace or slows down. Tests check this for every policy; it is not derived."""
_ALL_AT_ONCE = "gpipe"
"""The policy that holds all microbatches."""


class Cut:
    """The layers of a layout's stages."""

    def __init__(self, values: ConfigValues, layout: PipelineParallelLayerLayout) -> None:
        model, count, precision = values.config.model, len(layout.stages), precision_of(values.config)
        self.pp, self.vpp = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
        self.layers = [parse_layers(layout.layer_names(stage)) for stage in range(count)]
        self.like: list[Hashable] = [
            (stage == count - 1, alike(model, values.config.train, stage, held))
            for stage, held in enumerate(self.layers)
        ]
        """Stage -> a key, equal for stages of equal costs."""
        self.kinds = [Counter(layer_kinds(model, held)) for held in self.layers]
        self.trained = [trained_count(model, held) for held in self.layers]
        self.untrained = [
            untrained_bytes(model, held, weight=precision.weight, gradient=precision.gradient) for held in self.layers
        ]
        self.frozen = next((stage for stage, number in enumerate(self.trained) if number.total()), 0)
        """The number of first stages that train nothing, and so have no backward."""

    @cached_property
    def ranks(self) -> dict[str, list[tuple[int, ...]]]:
        """Placement -> the stages of each rank, in chunk order."""
        places = [Placement(kind, self.pp, len(self.layers)) for kind in ("loop", "v")]
        return {place.kind: [place.stages_of(rank) for rank in range(self.pp)] for place in places}


class FullestMoment(NamedTuple):
    """A rank at a moment of its list, before a backward, when it holds many microbatches."""

    begun: tuple[int, ...]
    """Chunk -> how many are between their F and their B or I."""
    put_off: tuple[int, ...]
    """Chunk -> how many are between their I and their W."""
    runs: int
    """The chunk whose backward comes next."""
    summing: tuple[bool, ...]
    """Chunk -> whether it has made weight gradients, and will make more."""


class Filled(NamedTuple):
    """A rank at its fullest moment."""

    rank: int
    moment: FullestMoment
    layers: dict[Kind, tuple[int, int]]
    """Kind of layer -> how many microbatches all its layers hold together: (begun, deferred)."""


def few_rounds(policy: str, pp: int, num_microbatches: int, rounds: int) -> int:
    """The number of microbatches in `rounds` rounds (or the policy's least); if STEADY, with the last partial round."""
    row = POLICIES[policy]
    least = -(-max(row.needs_microbatches(pp), row.least_microbatches(pp)) // pp) * pp
    return min(num_microbatches, num_microbatches % pp * (rounds == STEADY) + max(rounds * pp, least))


class Rounds:
    """A few rounds of a policy's schedule on a pipeline, as the plan of a config makes it."""

    def __init__(self, values: ConfigValues, policy: str, cut: Cut, number: int) -> None:
        self.values, self.number, self.cut, self.row = values, number, cut, POLICIES[policy]
        self._make = partial(compute_only, values, Choice(policy), cut.vpp)
        self.plain = self._make(number)
        self.every = policy == _ALL_AT_ONCE
        self._lowered: dict[int, Schedule] = {}

    def lowered(self, number: int) -> Schedule:
        """The schedule with its messages, for `number` microbatches."""
        if number not in self._lowered:
            self._lowered[number] = presumed(self.values, self._make(number), self.cut.frozen).schedule
        return self._lowered[number]

    @cached_property
    def filled(self) -> list[Filled]:
        """Of ranks with alike stages, the one that holds most: by begun microbatches, and if a policy splits backwards
        also by begun and deferred ones."""
        ranks: dict[Hashable, Filled] = {}
        for rank, (own, row) in enumerate(zip(self.cut.ranks[self.row.placement], self.plain.actions, strict=True)):
            for at, moment in enumerate(_fullest(row, own, self.number)):
                key = at, *(self.cut.like[stage] for stage in own)
                if key not in ranks or _size(ranks[key].moment) < _size(moment):
                    ranks[key] = Filled(rank, moment, self._by_kind(own, moment))
        return list(ranks.values())

    def _by_kind(self, own: Sequence[int], moment: FullestMoment) -> dict[Kind, tuple[int, int]]:
        begun, put_off = Counter[Kind](), Counter[Kind]()
        for stage, started, later in zip(own, moment.begun, moment.put_off, strict=True):
            for kind, number in self.cut.kinds[stage].items() if stage >= self.cut.frozen else ():
                begun[kind] += number * (bool(started) if self.every else started)
                put_off[kind] += number * later
        return {kind: (number, put_off[kind]) for kind, number in begun.items()}


def _size(moment: FullestMoment) -> int:
    return sum(moment.begun) + sum(moment.put_off)


def _fullest(row: Sequence[Action], own: tuple[int, ...], number: int) -> list[FullestMoment]:
    """The moment with most begun microbatches, and for split backwards the moment with most begun or deferred ones."""
    chunk = {stage: at for at, stage in enumerate(own)}
    begun, put_off, made = [0] * len(own), [0] * len(own), [0] * len(own)
    most, held = [FullestMoment((), (), 0, ())] * 2, [0, 0]
    for op, stage, _ in row:
        at = chunk[stage]
        if op is F:
            begun[at] += 1
            continue
        splits = op not in WEIGHT_GRADIENTS or op not in INPUT_GRADIENTS
        for which, now in ((0, sum(begun)), (1, sum(begun) + sum(put_off) if splits else 0)):
            if now and now >= held[which]:
                summing = tuple(0 < done < number for done in made)
                most[which], held[which] = FullestMoment(tuple(begun), tuple(put_off), at, summing), now
        begun[at] -= op in INPUT_GRADIENTS
        put_off[at] += (op in INPUT_GRADIENTS) - (op in WEIGHT_GRADIENTS)
        made[at] += op in WEIGHT_GRADIENTS
    return most if held[1] else most[:1]
