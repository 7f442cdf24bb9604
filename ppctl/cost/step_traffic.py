"""Bytes that one rank sends once a step: for sums of gradients, updated weights, and the numbers that ranks report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.cost.parameter_counts import held
from ppctl.cost.traffic import COUNT, Traffic
from ppctl.geometry.canonical_names import embedding_uses, stage_parameters, uses_of_embedding
from ppctl.geometry.layers import Layer, holds_final_norm, layer_kinds, routers_with_losses
from ppctl.geometry.matrix_owners import owned_runs
from ppctl.geometry.rows import Parameter, Parts, Place, tp_sums
from ppctl.topology import BUCKET_ELEMENTS, ParallelSizes

REPORTED = 14
"""Numbers of a rank's report, its rank among them, without those of stages and routers (`train/reports.py`)."""
_NUMBER = 8
"""Bytes of one number of a rank's report."""


class Sums(NamedTuple):
    """How gradients are summed and weights are sharded."""

    sharding: str
    """How optimizer state and weights are sharded over replicas; `none` also if there is only one replica."""
    gradient: int
    """Bytes of an element of a gradient, a sum or a master."""
    weight: int
    scatters: bool
    """Whether the backend sums in parts; gloo sums the whole."""
    muon: bool = False
    """Whether Muon moves matrices of hidden layers."""

    @property
    def owned(self) -> bool:
        """Whether each matrix that Muon updates is owned by one rank."""
        return self.muon and self.sharding != "none"


class Stages(NamedTuple):
    """The layers of all stages, by pp_rank and chunk, and the pp_rank whose traffic is computed."""

    of: Sequence[Sequence[Sequence[Layer]]]
    normed: Sequence[Sequence[Parameter]]
    """By pp_rank, the parameters that enter the gradient norm; tied ones only where their owner is."""
    uses: Sequence[int]
    """By pp_rank, how often the token embedding is used."""
    routers: int
    """Routers with a loss, the most on any pp_rank."""
    pp_rank: int

    @classmethod
    def each(cls, model: ModelConfig, stages: Sequence[Sequence[Sequence[Layer]]]) -> Iterator[Stages]:
        """Yield the stages as seen from each pp_rank, in order."""
        kinds = [tuple((*layer_kinds(model, held), holds_final_norm(model, held)) for held in own) for own in stages]
        alike = {
            kind: {
                name: row
                for layers in own
                for name, row in stage_parameters(model, layers).items()
                if row.gradient != "none" and row.copy_of in (None, name)
            }
            for kind, own in dict(zip(kinds, stages, strict=True)).items()
        }
        normed = [[*alike[kind].values()] for kind in kinds]
        uses = [sum(len(embedding_uses(model, layers)) for layers in own) for own in stages]
        routers = max(sum(routers_with_losses(model, layers) for layers in own) for own in stages)
        return (cls(stages, normed, uses, routers, pp_rank) for pp_rank in range(len(stages)))

    @property
    def own(self) -> Sequence[Sequence[Layer]]:
        """The layers of each of the rank's stages."""
        return self.of[self.pp_rank]


def once_a_step(
    model: ModelConfig, stages: Stages, sizes: ParallelSizes, sums: Sums, *, sequence_parallel: bool
) -> Traffic:
    """The traffic of a rank of this pp_rank after its microbatches; if a cut is uneven, that of the first rank."""
    found = step_sums(model, stages.own, sizes, sums, sequence_parallel)
    if sums.owned:
        _matrices(found, model, stages.own, sizes, sums)
    _reports(found, stages, sizes)
    _norms(found, stages, sizes, sums)
    _tied(found, model, stages, sizes, sums)
    _biases(found, model, stages, sizes, sequence_parallel=sequence_parallel)
    return found


def _reports(found: Traffic, stages: Stages, sizes: ParallelSizes) -> None:
    """Add to `found` the reports of ranks, gathered along one axis after another (`comm/groups.py`)."""
    size = _NUMBER * (REPORTED + sizes.vpp + stages.routers)
    for axis in ("pp", "dp", "cp", "tp"):
        if (ranks := getattr(sizes, axis)) > 1:
            found.note(axis, "all_gather", size * (ranks - 1))
            size *= ranks


def _norms(found: Traffic, stages: Stages, sizes: ParallelSizes, sums: Sums) -> None:
    """Add to `found` the sums of squared norms of divided gradients, then each parameter's norm from its pp_rank."""
    rows, width = stages.normed[stages.pp_rank], max(4, sums.weight)
    if sums.sharding != "none":
        for axis, ranks, own in _groups(list(rows), sizes):
            found.note(axis, "all_reduce", 2 * width * len(own) * (ranks - 1) / ranks)
    parts = Parts(*(Place(0, getattr(sizes, axis)) for axis in Parts._fields))
    for axis in ("tp", "etp", "ep"):
        divided = sum(axis in parts.splits(row) for row in rows)
        if divided:
            ranks = getattr(sizes, axis)
            found.note(axis, "all_reduce", 2 * width * divided * (ranks - 1) / ranks)
    if sizes.pp > 1:
        found.note("pp", "all_gather", width * max(map(len, stages.normed)) * (sizes.pp - 1))


def _tied(found: Traffic, model: ModelConfig, stages: Stages, sizes: ParallelSizes, sums: Sums) -> None:
    """Add to `found` the gradients of a table that several pp_ranks use: each use's gradient goes to the others."""
    uses = stages.uses
    ranks = sum(1 for number in uses if number)
    if ranks < 2 or not uses[stages.pp_rank]:
        return
    row = stage_parameters(model, [Layer("embedding")])[uses_of_embedding(model)[0]]
    shared = 1 if sums.sharding == "none" else sizes.dp * sizes.cp
    elements = -(-held(row.elements, row.axes, sizes) // shared)
    found.note("ties", "broadcast", sum(uses) * elements * sums.gradient * (ranks - 1) / ranks, sum(uses))


def _biases(
    found: Traffic, model: ModelConfig, stages: Stages, sizes: ParallelSizes, *, sequence_parallel: bool
) -> None:
    """Add to `found` the all-reduces of tokens per expert, from which each router updates its experts' biases."""
    routers = sum(kind.moe for layers in stages.own for kind in layer_kinds(model, layers))
    if not (routers and model.moe_router_enable_expert_bias and model.moe_router_bias_update_rate):
        return
    assert model.num_moe_experts is not None  # a model with routers has experts
    for axis in (*("tp",) * sequence_parallel, "cp", "dp"):
        if (ranks := getattr(sizes, axis)) > 1:
            found.note(axis, "all_reduce", 2 * COUNT * routers * model.num_moe_experts * (ranks - 1) / ranks)


def step_sums(
    model: ModelConfig, stages: Sequence[Sequence[Layer]], sizes: ParallelSizes, sums: Sums, sequence_parallel: bool
) -> Traffic:
    """Traffic of the step's end on a rank with these stages: sums of gradients over replicas and tensor-parallel ranks,
    and gathers of weights. Of uneven runs the first rank's counts. Buckets are those of `parallel/replicate.py`."""
    found, every, partial = Traffic(), [], []
    for layers in stages:
        rows = [row for row in stage_parameters(model, layers).values() if row.gradient != "none"]
        every += rows
        in_parts = [row for row in rows if not (sums.owned and row.hidden_matrix)]
        for axis, ranks, own in _groups(in_parts, sizes):
            for bucket in buckets([held(row.elements, row.axes, sizes) for row in own]):
                _note_gradient_sum(found, axis, ranks, bucket, sums)
    for row in every:
        if tp_sums(row, sizes.tp, sequence_parallel=sequence_parallel):
            ranks = 1 if sums.sharding == "none" else sizes.edp if row.experts else sizes.dp * sizes.cp
            partial.append(-(-held(row.elements, row.axes, sizes) // ranks))
    for bucket in buckets(partial):
        found.note("tp", "all_reduce", 2 * sum(bucket) * sums.gradient * (sizes.tp - 1) / sizes.tp)
    return found


def copied_for_sums(model: ModelConfig, layers: Sequence[Layer], sizes: ParallelSizes, width: int) -> int:
    """The most bytes of a stage's gradients, each `width` wide, that are copied to be summed over replicas. A bucket's
    copy is made beside its gradients; a tensor that is a bucket by itself is summed in place."""
    rows = [row for row in stage_parameters(model, layers).values() if row.gradient != "none"]
    sums = [
        bucket
        for *_, own in _groups(rows, sizes)
        for bucket in buckets([held(row.elements, row.axes, sizes) for row in own])
    ]
    return width * max((sum(bucket) for bucket in sums if len(bucket) > 1), default=0)


def _matrices(
    found: Traffic, model: ModelConfig, stages: Sequence[Sequence[Layer]], sizes: ParallelSizes, sums: Sums
) -> None:
    """Add to `found` what is sent for Muon's matrices: gradients go to their owners, and weights come back, for each
    bucket by one reduce and one broadcast per owner (`parallel/shard.py`)."""
    named = [
        {n: row for n, row in stage_parameters(model, layers).items() if row.hidden_matrix and row.gradient != "none"}
        for layers in stages
    ]
    every = {name: row for own in named for name, row in own.items()}
    size = {name: held(row.elements, row.axes, sizes) for name, row in every.items()}
    for axis, ranks, shared in _groups(list(every.values()), sizes):
        shapes = {n: (size[n] // prod(row.shape[-2:]), *row.shape[-2:]) for n, row in every.items() if row in shared}
        owners = owned_runs(shapes, ranks)
        passes = [("reduce", own, sums.gradient) for own in named]
        passes += [("broadcast", own, sums.weight) for own in named]
        for kind, names, width in passes:
            left = [name for name in names if name in owners]
            for bucket in buckets([size[name] for name in left]):
                some, left = left[: len(bucket)], left[len(bucket) :]
                number = len({rank for name in some for rank in owners[name]})
                found.note(axis, kind, sum(bucket) * width * (ranks - 1) / ranks, number)


def _groups(rows: list[Parameter], sizes: ParallelSizes) -> Iterator[tuple[str, int, list[Parameter]]]:
    """Yield (axis, ranks, rows) of the groups that hold the same parameters, without groups of one rank."""
    # Otherwise copies of experts are on the ranks of the other weights' copies.
    apart = any(getattr(sizes, axis) > 1 for axis in ("tp", "cp", "ep", "etp"))
    dense = "cp-dp" if sizes.cp > 1 else "dp"
    for axis, ranks, spread in ((dense, sizes.dp * sizes.cp, False), ("edp", sizes.edp, True)):
        own = [row for row in rows if (apart and bool(row.experts)) == spread]
        if ranks > 1 and own:
            yield axis, ranks, own


def _note_gradient_sum(found: Traffic, axis: str, ranks: int, bucket: Sequence[int], sums: Sums) -> None:
    """Add to `found` the sum of one bucket of gradients over `ranks` ranks, and the gather of the weights that follow.
    `bucket` holds the number of elements of each parameter. Under sharding each is padded to a multiple of `ranks`."""
    if sums.sharding == "none":
        found.note(axis, "all_reduce", 2 * sum(bucket) * sums.gradient * (ranks - 1) / ranks)
        return
    sent = sum(-(-elements // ranks) for elements in bucket) * (ranks - 1)
    if sums.scatters:
        found.note(axis, "reduce_scatter", sent * sums.gradient)
    else:
        found.note(axis, "all_reduce", 2 * sent * sums.gradient)
    found.note(axis, "all_gather", sent * sums.weight)


def buckets(elements: Iterable[int], limit: int = BUCKET_ELEMENTS) -> Iterator[list[int]]:
    """Yield neighbouring parameters in groups of at most `limit` elements; a larger parameter is a bucket by itself."""
    bucket: list[int] = []
    for size in elements:
        if bucket and sum(bucket) + size > limit:
            yield bucket
            bucket = []
        bucket.append(size)
    if bucket:
        yield bucket
