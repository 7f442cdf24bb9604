"""Tensors of which ranks hold parts, made whole again to be compared with one process's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ppctl.checkpoint.shards import Shard, whole_shards
from ppctl.parallel.tensor import gather_runs
from ppctl.train.session import Session
from ppctl.train.trained_weights import ShardedWeights


@torch.no_grad()
def whole_of(session: Session, name: str, own: Tensor) -> Tensor:
    """The whole of a parameter, or of a tensor of its shape; a stack has the rank's own experts. A collective."""
    if not own.dim():
        return own
    if isinstance(session.replica.weights, ShardedWeights):
        made = torch.empty(session.replica.weights.model[name].shape, dtype=own.dtype)
        session.replica.weights.start_gather([name], [own.detach()], own.dtype)([made])
        own = made
    row = session.model.rows[name]
    shape = (row.experts, *row.shape) if row.experts else row.shape
    for axis, dim in session.model.parts.splits(row).items():
        if axis != "ep":
            own = gather_runs(own, dim, shape[dim], session.groups[axis])
    return own


@contextmanager
def all_held(weights: ShardedWeights) -> Iterator[None]:
    """A context in which the weights of all stages are gathered. A collective."""
    for stage in weights.stages:
        weights.hold(stage)
    yield
    weights.release_all()


def held_shards(tensors: Mapping[str, Tensor | Sequence[Tensor]]) -> list[Shard]:
    """Whole tensors by name; a list has several of one name, as a rank may have copies."""
    each = [(name, one) for name, own in tensors.items() for one in ([own] if isinstance(own, Tensor) else own)]
    return [shard for name, one in each for shard in whole_shards({name: one})]
