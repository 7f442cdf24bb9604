"""Over how many equal parts of all experts a token's experts are spread, and which runs of experts are summed first."""

from __future__ import annotations

from math import comb, gcd
from typing import NamedTuple

from ppctl.config.schema import ModelConfig

_RUNS = 8
"""The number of runs if the router has no groups and this number divides that of the experts."""


class ExpertRuns(NamedTuple):
    """Neighbouring experts in equal runs. Results of each run are summed first, then these sums in the order of runs:
    an order that does not depend on the ranks that hold the experts."""

    number: int
    size: int
    """Experts of a run."""
    most: int
    """Runs that hold experts of one token, at most."""


def expert_runs(model: ModelConfig) -> ExpertRuns:
    """The runs of a model with experts: the router's groups, else gcd(8, experts)."""
    experts = model.num_moe_experts or 1
    count = model.moe_router_num_groups or gcd(experts, _RUNS)
    limit = (model.moe_router_group_topk if model.moe_router_num_groups else None) or count
    return ExpertRuns(count, experts // count, min(model.moe_router_topk, limit))


def reached(model: ModelConfig, parts: int) -> float:
    """The expected number of parts that hold one of a token's experts, if the experts are cut into `parts` equal parts
    and all choices are equally likely.

    A part with s of E experts holds none of K different ones with the probability C(E - s, K) / C(E, K) of the
    hypergeometric distribution (Feller, An Introduction to Probability Theory and Its Applications I, II.6), and
    expectations add up. If a token may use only some of the router's groups, their number is an upper bound.
    """
    experts, topk = model.num_moe_experts or 1, model.moe_router_topk
    expected = parts * (1 - comb(experts - experts // parts, topk) / comb(experts, topk))
    limit = model.moe_router_group_topk if model.moe_router_num_groups else None
    return min(expected, limit or expected)
