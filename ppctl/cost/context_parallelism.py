"""Bytes that context-parallel ranks send for attention, and bytes that they keep beyond a rank with whole sequences."""

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
    """Keys and values from rank to rank, beside blocks of scores. In the backward again, and their gradients."""
    gathered: float = 0.0
    """Keys and values to all ranks, before most scores. In the backward again, and their gradients."""
    heads: float = 0.0
    """Queries, keys, values and results, of which each rank gets some heads. In the backward their gradients."""
    exchanging: int = 1
    """Neighbours that exchange heads."""


def context_traffic(
    model: ModelConfig, cp_comm_type: str, size: float, over: ParallelSizes, levels: Levels | None
) -> ContextTraffic:
    """Bytes that one layer of this `cp_comm_type` sends; `size` is a device's tokens times the bytes of an element."""
    ranks = exchanging(cp_comm_type, over, levels)
    heads, groups, width = _heads(model, over)
    if cp_comm_type == "all_gather":
        return ContextTraffic(gathered=size * groups * width * (over.cp - 1))
    groups *= _repeats(groups, ranks)
    exchanged = size * (heads + groups) * width * (ranks - 1) / ranks
    return ContextTraffic(size * groups * width * (over.cp // ranks - 1), heads=exchanged, exchanging=ranks)


def exchanging(cp_comm_type: str, over: ParallelSizes, levels: Levels | None) -> int:
    """How many ranks exchange heads; 1 if none do."""
    if cp_comm_type == "a2a":
        return over.cp
    return levels[0] if cp_comm_type == "a2a+p2p" and levels else 1


def kept_more(model: ModelConfig, ranks: int, over: ParallelSizes) -> float:
    """Elements per token that `ranks` which exchange heads keep: the result by heads, and keys and values repeated. By
    the other ways each rank keeps of its own what it would keep of whole sequences."""
    if ranks == 1:
        return 0.0
    heads, groups, width = _heads(model, over)
    return heads * Sizes.of(model).value_head + groups * (_repeats(groups, ranks) - 1) * width


def live_more(model: ModelConfig, cp_comm_type: str, over: ParallelSizes, levels: Levels | None, wide: float) -> float:
    """Elements per token that live while attention's backward runs, at most, beside the gradients of queries, keys and
    values. The most of any rank; `wide` is how many elements one in float32 or wider is.

    A ring holds keys and values twice (one pair arrives), sums of their gradients three times (its own, one that
    leaves, one that arrives), a block's own gradients, and queries' in float32. Gathering: first all keys and values
    and the gradients of what both halves see; then the sum of these, and its parts in the ranks' order. Exchanging
    heads: gradients before and after a step that puts them into order.
    """
    if over.cp == 1:
        return 0.0
    ranks = exchanging(cp_comm_type, over, levels)
    heads, groups, width = _heads(model, over)
    sizes, pairs = Sizes.of(model), groups * _repeats(groups, ranks) * width
    queries, results, cp = heads * sizes.query_head, heads * sizes.value_head, over.cp // ranks
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
    """How often groups of keys and values are repeated, until the ranks divide them."""
    return ranks // gcd(groups, ranks)


def _heads(model: ModelConfig, over: ParallelSizes) -> tuple[int, int, int]:
    """On one device: heads, groups of keys and values, and a head's widths of keys (or queries) and values together."""
    sizes = Sizes.of(model)
    groups = sizes.heads if sizes.latent else sizes.groups
    return sizes.heads // over.tp, max(1, groups // over.tp), sizes.query_head + sizes.value_head
