"""Bytes that context-parallel ranks send for attention, and that they keep beyond a rank with whole sequences."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.geometry.parameters import Sizes
from ppctl.topology import ParallelSizes

Levels = tuple[int, int]
"""The sizes of `a2a+p2p`: neighbours that exchange heads, and groups of these that make a ring."""


class ContextTraffic(NamedTuple):
    """Bytes that a device sends for one layer's attention to one microbatch."""

    ring: float = 0.0
    """Keys and values from rank to rank, beside blocks of scores; in the backward again, with their gradients."""
    gathered: float = 0.0
    """Keys and values to all ranks, before most scores. The backward sends them again, and their gradients."""
    heads: float = 0.0
    """Queries, keys, values and results, of which each rank gets some heads. The backward sends their gradients."""
    exchanging: int = 1
    """Neighbours that exchange heads."""


def context_traffic(
    model: ModelConfig, cp_comm_type: str, size: float, sizes: ParallelSizes, levels: Levels | None
) -> ContextTraffic:
    """Bytes that one layer of this `cp_comm_type` sends; `size` is a device's tokens times the bytes of an element."""
    ranks = exchanging(cp_comm_type, sizes, levels)
    heads, groups, width = _heads(model, sizes)
    if cp_comm_type == "all_gather":
        return ContextTraffic(gathered=size * groups * width * (sizes.cp - 1))
    groups *= _repeats(groups, ranks)
    exchanged = size * (heads + groups) * width * (ranks - 1) / ranks
    return ContextTraffic(size * groups * width * (sizes.cp // ranks - 1), heads=exchanged, exchanging=ranks)


def exchanging(cp_comm_type: str, sizes: ParallelSizes, levels: Levels | None) -> int:
    """How many ranks exchange heads; 1 if none do."""
    if cp_comm_type == "a2a":
        return sizes.cp
    return levels[0] if cp_comm_type == "a2a+p2p" and levels else 1


def kept_more(model: ModelConfig, ranks: int, axes: ParallelSizes) -> float:
    """Further elements per token kept by each of `ranks` that exchange heads: the result by heads, and repeated keys
    and values. Other exchanges keep nothing further."""
    if ranks == 1:
        return 0.0
    heads, groups, width = _heads(model, axes)
    return heads * Sizes.of(model).value_head + groups * (_repeats(groups, ranks) - 1) * width


def live_more(model: ModelConfig, cp_comm_type: str, axes: ParallelSizes, levels: Levels | None, wide: float) -> float:
    """The most elements per token that live while attention's backward runs, beside the gradients of queries, keys and
    values, on the rank with most. `wide` is how many elements fill the bytes of one in float32 (or wider).

    A ring holds keys and values twice (one pair arrives), sums of their gradients three times (own, leaving, arriving),
    a block's own gradients, and queries' in float32. Gathering: first all keys and values and the gradients of what
    both halves see; then the sum of these, and its parts in the ranks' order. Exchanging heads: gradients before and
    after reordering.
    """
    if axes.cp == 1:
        return 0.0
    ranks = exchanging(cp_comm_type, axes, levels)
    heads, groups, width = _heads(model, axes)
    sizes, pairs = Sizes.of(model), groups * _repeats(groups, ranks) * width
    queries, results, cp = heads * sizes.query_head, heads * sizes.value_head, axes.cp // ranks
    if cp == 1:
        most = 0.0
    elif cp_comm_type == "all_gather":
        most = queries * wide + max((2.5 * cp + 1) * pairs, queries / 2 + (2 * cp + 0.5) * pairs)
    else:
        later = 5 * pairs + max(queries + pairs / 2, queries / 2 + pairs) if cp > 2 else 0.0
        most = queries * wide + max(queries + 4 * pairs, later)
    if ranks > 1:
        most = max(most + results, 2 * (queries + pairs))
    return most - queries - groups * width


def _repeats(groups: int, ranks: int) -> int:
    """How often groups of keys and values are repeated so that their number is a multiple of the ranks."""
    return ranks // gcd(groups, ranks)


def _heads(model: ModelConfig, axes: ParallelSizes) -> tuple[int, int, int]:
    """On one device: heads, groups of keys and values, and a head's widths of keys (or queries) and values together."""
    sizes = Sizes.of(model)
    groups = sizes.heads if sizes.latent else sizes.groups
    return sizes.heads // axes.tp, max(1, groups // axes.tp), sizes.query_head + sizes.value_head
