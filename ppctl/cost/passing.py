"""State that lives only while a stage computes: its weights and gradients under `full` sharding (decision 21).

Knows in which order `train/gathered.py` and `train/sharded.py` make and free things, in bytes. Must not know layers'
activations or models.

Weights are gathered beside the forward before the stage's first one, whole from there, and freed behind its last
backward. Gradients are made by its first backward, and freed when the sums of the rank's next stage (or the step's
end) have waited for theirs. Each comes with a copy on its way, bucket by bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ppctl.cost.memory import Precision, Spread, shared
from ppctl.cost.parameters import Count
from ppctl.schedule.action import LIFE_ENDS, WEIGHT_GRADIENTS, Action, Op
from ppctl.schedule.sync import gathers_ahead

BUCKET_ELEMENTS = 32 * 1024 * 1024
"""What data-parallel ranks send each other at once, unless one tensor is larger: bounds the copies beside state."""


class Passing(NamedTuple):
    """Bytes of one stage."""

    weights: int
    gradients: int
    parts: int
    """This rank's part of the summed gradients, from their summing to the step's end."""
    arriving: int
    """Beside the weights until they are whole: what this rank sends, and a bucket's copy."""
    leaving: int
    """Beside the gradients while they are summed: a bucket's copy."""


class Most(NamedTuple):
    """The most bytes at once, over a rank's list of actions."""

    weights: int
    gradients: int
    total: int
    """Of these with activations and what is on its way."""


def passing(count: Count, spread: Spread, precision: Precision, bucket: int) -> Passing:
    """Of a stage's parameters; `bucket` are the most elements that travel at once."""
    dense, experts = count.on_device(spread.tp, spread.ep, spread.etp)
    whole, part = dense + experts, shared(dense, experts, spread)
    copied = min(max(dense, experts), bucket)
    weight, gradient = precision.weight, precision.gradient
    return Passing(whole * weight, whole * gradient, part * gradient, (part + copied) * weight, copied * gradient)


def most(actions: Sequence[Action], kept: Sequence[int], again: Sequence[int], stages: Mapping[int, Passing]) -> Most:
    """Over the list of a rank that has `stages`; `kept` and `again` are activations by stage, as `peaks` takes them."""
    rank, ahead = _Rank(stages), gathers_ahead(actions)
    backwards = Counter(action.stage for action in actions if action.op in WEIGHT_GRADIENTS)
    for action in actions:
        op, stage, _ = action
        if op is Op.F:
            rank.gather(stage)
            if action in ahead:
                rank.begin(ahead[action])
            rank.activations += kept[stage]
            rank.note()
        if op in LIFE_ENDS:
            rank.note(again[stage])
            rank.activations -= kept[stage]
        if op in WEIGHT_GRADIENTS:
            rank.gradients[stage] = stages[stage].gradients
            rank.note()
            backwards[stage] -= 1
            if not backwards[stage]:
                rank.reduce(stage)
    return rank.most


class _Rank:
    """What a rank holds at a moment of its list, and the most so far."""

    def __init__(self, stages: Mapping[int, Passing]) -> None:
        self.stages = stages
        self.weights: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.activations = 0
        self.parts = 0
        self.leaving: int | None = None
        self.gathered: set[int] = set()
        self.most = Most(0, 0, 0)

    def begin(self, stage: int) -> None:
        self.weights[stage] = self.stages[stage].weights

    def gather(self, stage: int) -> None:
        if stage not in self.gathered:
            self.gathered.add(stage)
            self.begin(stage)
            self.note(self.stages[stage].arriving)

    def reduce(self, stage: int) -> None:
        """Weights go, the sums of the stage before are there, and this one's leave."""
        del self.weights[stage]
        self.gradients.pop(self.leaving if self.leaving is not None else -1, None)
        self.leaving = stage
        self.note(self.stages[stage].leaving)
        self.parts += self.stages[stage].parts
        self.note()

    def note(self, more: int = 0) -> None:
        weights, gradients = sum(self.weights.values()), sum(self.gradients.values())
        total = weights + gradients + self.parts + self.activations + more
        self.most = Most(*map(max, self.most, (weights, gradients, total)))
