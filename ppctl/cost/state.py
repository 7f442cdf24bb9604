"""Bytes of model state on one device, all the time or only while a stage computes, and peaks over a schedule.

Knows the precision recipes of `train/mixed_precision.py`, how sharding divides state, and in which order
`train/trained_weights.py` makes and frees weights that `full` sharding gathers (decision 21). Must not know layers'
activations, or more of schedules than their order of F, B and W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.cost.operands import Operands
from ppctl.cost.parameter_counts import Count, Orthogonalised, on_device
from ppctl.geometry.layers import Layer, layer_kinds
from ppctl.geometry.parameters import Sizes, kind_parameters
from ppctl.schedule.action import (
    INPUT_GRADIENTS,
    LIFE_ENDS,
    WEIGHT_GRADIENTS,
    Action,
    B,
    F,
    I,
    Op,
    W,
    stages_with_backwards,
)
from ppctl.schedule.sync_events import gathers_ahead
from ppctl.topology import BUCKET_ELEMENTS, ParallelSizes


class Precision(NamedTuple):
    """Bytes per parameter and per activation element."""

    dtype: str
    weight: int
    gradient: int
    optimizer: int
    """AdamW's two moments, and the fp32 master weight if weights are narrower."""
    activation: int

    @property
    def shared_optimizer(self) -> int:
        """Bytes of a shard's master and AdamW's two moments."""
        return max(self.optimizer, 3 * self.weight)


PRECISIONS = {
    "float32": Precision("float32", 4, 4, 8, 4),
    "bfloat16": Precision("bfloat16", 2, 4, 12, 2),
    "float16": Precision("float16", 2, 4, 12, 2),
    "float64": Precision("float64", 8, 8, 16, 8),
}


class State(NamedTuple):
    """Bytes on one device."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of weights, gradients and optimizer state together."""
        return sum(self)


ADAMW_ALONE = Orthogonalised(Counter())


def state_bytes(
    count: Count, sizes: ParallelSizes, precision: Precision, sharding: str, muon: Orthogonalised = ADAMW_ALONE
) -> State:
    """Weights, gradients and optimizer state of `count` parameters while a step uses them.

    Matrices that Muon updates have one moment, as wide as a gradient, instead of two.

    Sharding divides the optimizer's state, which then has a master of every weight. Weights and gradients are whole,
    since gradients are summed once a step; with `full` they are whole only as long as `Passing` says.
    """
    dense, experts = on_device(count, sizes)
    whole = dense + experts
    weights, gradients = whole * precision.weight, whole * precision.gradient
    if sharding == "none":
        less = sum(muon.on(sizes)) * precision.gradient
        return State(weights, gradients, whole * precision.optimizer - less)
    return State(weights, gradients, saved_bytes(count, sizes, precision, sharding, muon))


def saved_bytes(
    count: Count, sizes: ParallelSizes, precision: Precision, sharding: str, muon: Orthogonalised = ADAMW_ALONE
) -> int:
    """Bytes of optimizer state that a rank writes to a checkpoint: the masters and moments of `count` parameters. Under
    sharding only the rank's part of them counts. Muon's matrices have one moment, AdamW's two."""
    dense, experts = on_device(count, sizes)
    if sharding == "none":
        return (dense + experts) * precision.shared_optimizer - sum(muon.on(sizes)) * precision.gradient
    return shared(dense, experts, sizes, muon) * precision.shared_optimizer - muon.owned * precision.gradient


def shared(dense: int, experts: int, sizes: ParallelSizes, muon: Orthogonalised = ADAMW_ALONE) -> int:
    """The number of parameters in the largest shard of a rank: an equal part of AdamW's, and Muon's matrices of the
    rank that owns most."""
    matrices = muon.on(sizes)
    return -((matrices[0] - dense) // (sizes.dp * sizes.cp)) - ((matrices[1] - experts) // sizes.edp) + muon.owned


_FUSED = {"wk": "wq", "wv": "wq", "w3": "w1"}
"""Matrices that Megatron stacks on another matrix, so that one product computes both."""


def dummy_gradient_bytes(model: ModelConfig, layers: Iterable[Layer], sizes: ParallelSizes) -> int:
    """One 16-bit weight gradient for every distinct shape of a weight in these layers, as TE 2.11 keeps them. Of
    decoder layers the weights of attention and feed-forward count, not the router's; of the loss layer the head's."""
    shapes = set()
    for kind in set(layer_kinds(model, layers)):
        rows = kind_parameters(Sizes.of(model), kind) if kind.name != "embedding" else ()
        if kind.name != "loss":
            blocks = ("attention", "feed_forward", "moe")
            rows = tuple(row for row in rows if row.role in ("matrix", "expert") and any(map(row.inside, blocks)))
        stacked: Counter[str] = Counter()
        for row in rows:
            block, dot, name = row.name.removesuffix(".weight").rpartition(".")
            stacked[f"{block}{dot}{_FUSED.get(name, name)}"] += row.shape[0]
        for row in rows:
            outputs = stacked.get(row.name.removesuffix(".weight"))
            if outputs is not None:
                split = {dim - bool(row.experts): getattr(sizes, axis) for axis, dim in row.splits if axis != "ep"}
                shapes.add((outputs // split.get(0, 1), row.shape[1] // split.get(1, 1)))
    return 2 * sum(map(prod, shapes))


class Ends(NamedTuple):
    """Bytes that the operations of a backward free and need, by stage."""

    frees: Mapping[Op, Sequence[int]]
    """Bytes of its microbatch that an operation frees: B or W frees all that is left, I all but what waits for W."""
    needs: Mapping[Op, Sequence[int]]
    """Further bytes while the operation runs."""


def _whole(kept: Sequence[int], while_backward: Sequence[int] | None) -> Ends:
    """The Ends of backwards that free everything in B or W."""
    needs = [0] * len(kept) if while_backward is None else while_backward
    return Ends(dict.fromkeys(LIFE_ENDS, kept), dict.fromkeys(LIFE_ENDS, needs))


def ends_of(
    kept: Sequence[int], while_backward: Sequence[int], while_inputs: Sequence[int], deferred: Sequence[Operands]
) -> Ends:
    """The Ends of stages that keep `kept` from their F on, and `deferred` for W. A B needs `while_backward` further
    bytes, an I `while_inputs`. An I frees its layers' bytes while it adds their operands: it needs most at the first or
    the last."""
    later = [each.kept for each in deferred]
    grown = [
        more + max(0, each.kept - own) if each.in_inputs is None else each.in_inputs
        for more, each, own in zip(while_inputs, deferred, kept, strict=True)
    ]
    freed = [own - wait for own, wait in zip(kept, later, strict=True)]
    return Ends({B: kept, I: freed, W: later}, {B: while_backward, I: grown, W: [each.in_weights for each in deferred]})


def fetched_at_once(held: Sequence[int]) -> Ends:
    """The Ends of stages that hold `held` on the host: B or I fetches all of it, and nothing is left for W."""
    none = [0] * len(held)
    return Ends({B: held, I: held, W: none}, dict.fromkeys((B, I, W), none))


def peaks(
    actions: Sequence[Action],
    bytes_of: Sequence[int],
    while_forward: Sequence[int] | None = None,
    while_backward: Sequence[int] | None = None,
    ends: Ends | None = None,
) -> tuple[int, int]:
    """(the most activations in flight, their most bytes) of one rank.

    A (stage, microbatch) lives from the start of its F to the end of its B, or of its W if the backward is split, and
    holds `bytes_of[stage]`; `while_forward[stage]` instead while its forward runs, and `while_backward[stage]` more
    (what is computed again) while its backward does. Exact, since a rank runs its list in order. One loop finds both,
    since lists are long. `ends` says what the halves of split backwards free; else all is free after W.
    """
    frees, needs = _whole(bytes_of, while_backward) if ends is None else ends
    alive = most = held = largest = 0
    trained = stages_with_backwards(actions)
    in_forward = bytes_of if while_forward is None else while_forward
    for op, stage, _ in actions:
        if op is F:
            alive += 1
            if alive > most:
                most = alive
            if held + in_forward[stage] > largest:
                largest = held + in_forward[stage]
            if stage in trained:
                held += bytes_of[stage]
            else:
                alive -= 1
        elif op in frees:
            if held + needs[op][stage] > largest:
                largest = held + needs[op][stage]
            alive -= op in LIFE_ENDS
            held -= frees[op][stage]
    return most, largest


class Passing(NamedTuple):
    """Bytes of one stage's state, under sharding of gradients, that live only while the stage computes.

    Its first backward makes gradients; they are freed once they are summed, for which the rank waits when it sums its
    next stage's gradients, or at the step's end. Under `full` sharding weights are gathered during the forward before
    the stage's first, and freed after its last backward. Both need a copy on the way, bucket by bucket.
    """

    weights: int
    """Bytes of whole weights; 0 if they are always whole."""
    gradients: int
    parts: int
    """This rank's part of the summed gradients, from their summing to the step's end."""
    arriving: int
    """Further bytes until the weights are whole: the bytes that this rank sends, and a bucket's copy."""
    leaving: int
    """Further bytes while gradients are summed: a bucket's copy, and the parts of earlier buckets."""


class Most(NamedTuple):
    """The most bytes at once, over a rank's list of actions."""

    weights: int
    gradients: int
    total: int
    """The peak of weights, gradients, activations and copies on the way."""


def passing(
    count: Count,
    sizes: ParallelSizes,
    precision: Precision,
    matrices: tuple[int, int],
    limit: int = BUCKET_ELEMENTS,
    muon: Orthogonalised = ADAMW_ALONE,
) -> Passing:
    """The Passing of a stage's parameters, of which `limit` elements, or one larger tensor, travel together. `matrices`
    are the elements of the largest dense tensor and of the largest stack of experts. Dense tensors travel first: they
    come first in a layer, and are shared with other ranks than experts are."""
    every, part = on_device(count, sizes), shared(*on_device(count, sizes), sizes, muon)
    owned, ways = muon.on(sizes), (sizes.dp * sizes.cp, sizes.edp)
    equal = [
        (elements - moved, matrix, 1, ranks)
        for elements, moved, matrix, ranks in zip(every, owned, matrices, ways, strict=True)
    ]
    # Muon's matrices travel in buckets of their own; an owner is assumed to have the same share of each.
    groups = [*equal, (sum(owned), max(matrices), muon.owned, sum(owned))] if muon.owned else equal
    whole, copied, leaving, most = sum(every), 0, 0, 0
    for elements, matrix, some, of in groups:
        copy = min(elements, max(limit, matrix))
        copied = max(copied, copy)
        # A bucket's copy is made beside its tensors; when the rank's part is made, all tensors but the last are free.
        making = max(copy, min(matrix, copy) - -copy * some // of)
        leaving = max(leaving, most - -(elements - copy) * some // of + making)
        most -= -elements * some // of
    weight, gradient = precision.weight, precision.gradient
    return Passing(whole * weight, whole * gradient, part * gradient, (part + copied) * weight, leaving * gradient)


def most(
    actions: Sequence[Action],
    bytes_of: Sequence[int],
    while_forward: Sequence[int],
    while_backward: Sequence[int],
    stages: Mapping[int, Passing],
    ends: Ends | None = None,
    *,
    received: Sequence[int] | None = None,
    calls: int = 1,
) -> Most:
    """The Most over the list of a rank that has `stages`, run `calls` times a step; activations by stage are as in
    `peaks`. Gradients are summed in the last call. Of a microbatch, `received[stage]` bytes came as a message: their
    memory is reused, never freed."""
    frees, needs = _whole(bytes_of, while_backward) if ends is None else ends
    returned = INPUT_GRADIENTS if I in frees else LIFE_ENDS
    came = [0] * len(bytes_of) if received is None else received
    rank, ahead = _RankMoments(stages), gathers_ahead(actions)
    left = Counter(stage for op, stage, _ in actions if op in WEIGHT_GRADIENTS)
    trained = stages_with_backwards(actions)
    held = waiting = pool = total = now = 0
    """Bytes of activations; of received ones among them; of memory for received ones; and the most of all so far."""
    for call in range(calls - min(calls, 3), calls):  # calls between the first and the last are alike
        for action in actions:
            op, stage, _ = action
            beside = held + pool - waiting
            if op is F:
                rank.gather(stage, beside)
                if ahead and action in ahead:
                    rank.begin(ahead.pop(action))
                now = rank.held + beside + while_forward[stage]
                waiting += came[stage]
                pool = waiting if waiting > pool else pool
                if stage in trained:
                    held += bytes_of[stage]
                else:
                    waiting -= came[stage]
            elif op in frees:
                now = rank.held + beside + needs[op][stage]
                held -= frees[op][stage]
                waiting -= came[stage] if op in returned else 0
            total = now if now > total else total
            if op in WEIGHT_GRADIENTS:
                beside = held + pool - waiting
                rank.grow(stage)
                total = max(total, rank.held + beside)
                left[stage] -= call == calls - 1
                if not left[stage]:
                    rank.reduce(stage, beside)
    return Most(*rank.state, max(total, rank.total))


class _RankMoments:
    """Bytes that a rank holds at a moment of its list, and the most so far."""

    def __init__(self, stages: Mapping[int, Passing]) -> None:
        self.stages = stages
        self.weights: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.parts = self.held = self.total = 0
        """Bytes of summed parts; of weights, gradients and parts; and the most of all together so far."""
        self.leaving: int | None = None
        self.gathered: set[int] = set()
        self.state = 0, 0
        """The most bytes of weights, and of gradients."""

    def begin(self, stage: int) -> None:
        self.weights[stage] = self.stages[stage].weights
        self._changed()

    def gather(self, stage: int, beside: int) -> None:
        if stage not in self.gathered:
            self.gathered.add(stage)
            self.begin(stage)
            self.total = max(self.total, self.held + beside + self.stages[stage].arriving)

    def grow(self, stage: int) -> None:
        if stage not in self.gradients:
            self.gradients[stage] = self.stages[stage].gradients
            self._changed()

    def reduce(self, stage: int, beside: int) -> None:
        """Sum a stage's gradients: frees its weights, and the gradients of the previous stage, which are summed now."""
        self.weights.pop(stage, None)
        self.gradients.pop(self.leaving if self.leaving is not None else -1, None)
        self.leaving = stage
        self._changed()
        self.total = max(self.total, self.held + beside + self.stages[stage].leaving)
        self.parts += self.stages[stage].parts
        self._changed()
        self.total = max(self.total, self.held + beside)

    def _changed(self) -> None:
        weights, gradients = sum(self.weights.values()), sum(self.gradients.values())
        self.held = weights + gradients + self.parts
        self.state = max(weights, self.state[0]), max(gradients, self.state[1])
