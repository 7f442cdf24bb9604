"""Tensors of which ranks hold parts, made whole again to be compared with one process's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

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
        session.replica.weights.start_gather([name], [own.detach()], own.dtype).into([made])
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
