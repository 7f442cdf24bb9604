"""Sums over ranks, taken out one by one: each mutant is a patch that a rank enters before it builds its session.

A mutant keeps shapes and the order of collectives, so that only numbers are wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from axis_runs import train_all

from ppctl.geometry.rows import tp_sums
from ppctl.model import router
from ppctl.parallel import context, dispatch, shard
from ppctl.parallel.axis_groups import AxisGroups
from ppctl.parallel.context import GatherAttention, RingAttention
from ppctl.parallel.replicate import GradientReducer
from ppctl.parallel.tensor import SharedTokens, TensorParallel
from ppctl.parallel.ties import TiedGradients
from ppctl.train import replica, trained_weights

Mutant = Callable[[], AbstractContextManager[Any]]


def _without_gradients(kind: str) -> Any:
    """Of tensor-parallel ranks' parts of whole parameters: of one kind of `Parameter.gradient`."""

    def some(row: Any, tp: int, *, sequence_parallel: bool) -> bool:
        return row.gradient != kind and tp_sums(row, tp, sequence_parallel=sequence_parallel)

    return patch.object(replica, "tp_sums", some)


@contextmanager
def _without_reduction(which: str) -> Iterator[None]:
    """Of replicas' gradients: those of `group`, or of `expert_group`."""
    start = GradientReducer._start

    def some(self: GradientReducer, parameters: Any, group: Any) -> None:
        if group is not getattr(self, which):
            start(self, parameters, group)

    with patch.object(GradientReducer, "_start", some):
        yield


def _own_parts(
    tensors: Any, widths: Any, group: Any, device: Any = None, dtype: torch.dtype = torch.float32
) -> shard.Sums:
    """What `scatter_sums` returns, of this rank's gradients alone."""
    flat = torch.empty(group.size(), sum(widths), dtype=dtype, device=device)
    for tensor, rows in zip(tensors, flat.split(list(widths), dim=1), strict=True):
        shard._cut(tensor, rows)
    return lambda: [each.clone() for each in flat[group.rank()].split(list(widths))]


class _OwnTokens:
    """As SharedTokens, with a sum that adds nothing."""

    def __init__(self, others: SharedTokens) -> None:
        self.ranks = others.ranks

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x


@contextmanager
def _without_counts_of_losses() -> Iterator[None]:
    balance = router.balance_loss

    def own(scores: Any, topk: int, others: Any = None) -> torch.Tensor:
        return balance(scores, topk, None if others is None else _OwnTokens(others))

    with patch.object(router, "balance_loss", own):
        yield


@contextmanager
def _without_a_row(number: int) -> Iterator[None]:
    """Of the vocabulary's sums: exponentials (0), labels' logits (1)."""
    add_up = TensorParallel.add_up

    def some(self: TensorParallel, x: torch.Tensor) -> torch.Tensor:
        own = x[number].clone()
        add_up(self, x)[number] = own
        return x

    with patch.object(TensorParallel, "add_up", some):
        yield


@contextmanager
def _without_sum_in(function: str) -> Iterator[None]:
    """Of hidden states and their gradients: those that are summed while `function` runs."""
    start_sum = TensorParallel.start_sum

    def some(self: TensorParallel, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        if not _inside(function):
            return start_sum(self, x)
        own = x.chunk(self.size, 1)[self.rank].contiguous() if self.sequence else x
        return lambda: own

    with patch.object(TensorParallel, "start_sum", some):
        yield


def _inside(function: str) -> bool:
    frame = sys._getframe(2)
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_qualname == function:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextmanager
def _without_norms_over(axis: str) -> Iterator[None]:
    """Of the norms of parts."""
    shared = replica.norm_groups

    def some(rows: Any, parts: Any, groups: Any, **how: bool) -> list[Any]:
        return [(names, group) for names, group in shared(rows, parts, groups, **how) if group is not groups[axis]]

    with patch.object(replica, "norm_groups", some):
        yield


@contextmanager
def _without_rows_in(function: str) -> Iterator[None]:
    """Of rows of experts that etp divides: those that are summed while `function` runs."""
    scatter = dispatch._scatter_rows

    def some(rows: torch.Tensor, shared: list[int], group: Any) -> torch.Tensor:
        found = scatter(rows, shared, group)
        return rows.split(shared)[group.rank()].clone() if _inside(function) else found

    with patch.object(dispatch, "_scatter_rows", some):
        yield


@contextmanager
def _without_gradients_of_others(kind: type[RingAttention | GatherAttention]) -> Iterator[None]:
    """Of keys and values: those that other ranks' queries give them, which make their exchange with nothing in it."""
    summed = kind.summed

    def own_alone(parts: Iterator[Any]) -> Iterator[Any]:
        yield next(parts)
        for gradients in parts:
            yield [(block, of_keys * 0, of_values * 0) for block, of_keys, of_values in gradients]

    with patch.object(kind, "summed", lambda self, own, parts: summed(self, own, own_alone(parts))):
        yield


@contextmanager
def _without_merged_blocks() -> Iterator[None]:
    """Of attention over ranks that share sequences: what comes from other blocks than a rank's own."""
    merge = context._merge

    def own(merged: Any, log_sums: Any, out: Any, log_sum: Any, *, first: bool) -> None:
        if first:
            merge(merged, log_sums, out, log_sum, first=first)

    with patch.object(context, "_merge", own):
        yield


MUTANTS: dict[str, tuple[Mutant, str, dict[str, Any]]] = {
    "gradients of norms over tp": (partial(_without_gradients, "tokens"), "grouped", dict(tp=2, sp=True)),
    "gradients of routers over tp": (partial(_without_gradients, "tokens"), "experts", dict(tp=2, sp=True)),
    "gradients of q and k norms over tp": (partial(_without_gradients, "heads"), "grouped", dict(tp=2)),
    "gradients of repeated groups over tp": (partial(_without_gradients, "complete"), "grouped", dict(tp=4)),
    "gradients over cp": (partial(_without_reduction, "group"), "grouped", dict(cp=2)),
    "gradients over dp": (partial(_without_reduction, "group"), "latent", dict(dp=2)),
    "gradients over edp": (partial(_without_reduction, "expert_group"), "experts", dict(cp=2)),
    "gradients of shards": (
        lambda: patch.object(trained_weights, "scatter_sums", _own_parts),
        "grouped",
        dict(dp=2, data_parallel_sharding="optimizer_gradients"),
    ),
    "counts of auxiliary losses over tp": (_without_counts_of_losses, "experts", dict(tp=2, sp=True)),
    "counts of auxiliary losses over cp": (_without_counts_of_losses, "experts", dict(cp=2)),
    "counts that move biases": (
        lambda: patch.object(AxisGroups, "other_tokens", property(lambda self: SharedTokens([]))),
        "deepseek",
        dict(dp=2),
    ),
    "the largest logit": (lambda: patch.object(TensorParallel, "largest", lambda self, x: x), "grouped", dict(tp=2)),
    "exponentials of the vocabulary": (partial(_without_a_row, 0), "grouped", dict(tp=2)),
    "logits of labels": (partial(_without_a_row, 1), "grouped", dict(tp=2)),
    "embeddings": (partial(_without_sum_in, "Embedding.forward"), "grouped", dict(tp=2)),
    "embeddings of own tokens": (partial(_without_sum_in, "Embedding.forward"), "grouped", dict(tp=2, sp=True)),
    "outputs of blocks": (partial(_without_sum_in, "from_columns"), "grouped", dict(tp=2)),
    "gradients of blocks' inputs": (partial(_without_sum_in, "_Columns.backward"), "grouped", dict(tp=2, sp=True)),
    "gradients of shared keys": (partial(_without_sum_in, "_Enter.backward"), "latent", dict(tp=2)),
    "outputs of experts over etp": (partial(_without_rows_in, "_Share.forward"), "experts", dict(tp=2, sp=True)),
    "gradients of experts' rows over etp": (
        partial(_without_rows_in, "_Share.backward"),
        "experts",
        dict(tp=2, sp=True),
    ),
    "gradients of keys on their way round": (
        partial(_without_gradients_of_others, RingAttention),
        "grouped",
        dict(cp=2),
    ),
    "gradients of gathered keys": (
        partial(_without_gradients_of_others, GatherAttention),
        "grouped",
        dict(cp=2, ways="all_gather"),
    ),
    "blocks of other ranks' keys": (_without_merged_blocks, "grouped", dict(cp=2)),
    "gradients over dp beside ep": (partial(_without_reduction, "group"), "experts", dict(dp=2, ep=2)),
    "gradients of experts over edp beside ep": (
        partial(_without_reduction, "expert_group"),
        "experts",
        dict(dp=4, ep=2),
    ),
    "norms over tp": (partial(_without_norms_over, "tp"), "grouped", dict(tp=2)),
    "norms over etp": (partial(_without_norms_over, "etp"), "experts", dict(tp=2, sp=True)),
    "norms over ep": (partial(_without_norms_over, "ep"), "experts", dict(dp=2, ep=2)),
    "norms of shards": (
        partial(_without_norms_over, "dp"),
        "grouped",
        dict(dp=2, data_parallel_sharding="optimizer_gradients"),
    ),
    "norms of experts' shards": (
        partial(_without_norms_over, "edp"),
        "experts",
        dict(cp=2, data_parallel_sharding="optimizer_gradients"),
    ),
    "uses of a tied weight": (
        lambda: patch.object(TiedGradients, "sum", lambda self: None),
        "biases",
        dict(pp=2, layout="Et*2|t*2L"),
    ),
}
"""What is not summed -> (the patch, a model, axes where it is needed)."""


def train_mutants(runs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Runs in a rank: each (mutant, config) as `train_all` does."""
    found = []
    for name, mapping in runs:
        with MUTANTS[name][0]():
            found += train_all([mapping])
    return found
