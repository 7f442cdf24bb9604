"""The configuration with which a run goes on after nodes are lost: fewer replicas, then another cut. Knows the order in
which options are tried, and what no option changes: the global batch, and all keys that decide what is computed. Must
not know how nodes are lost.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import NamedTuple

from ppctl.config.argv import PLACE
from ppctl.config.keys import text_keys
from ppctl.errors import Problem
from ppctl.host.devices import machines
from ppctl.plan import Plan
from ppctl.plan.build import judged, plan_alone
from ppctl.plan.layout_choice import AUTO
from ppctl.plan.memory_limit import GRANULARITY, SHARDING
from ppctl.plan.profile import read_profile
from ppctl.plan.schedule_choice import CSV, SCHEDULE
from ppctl.plan.sizes import CALL, derive_batch, derive_world
from ppctl.plan.violations import ConfigValues, Overrides, Violations
from ppctl.search.answer import BAND
from ppctl.search.branch import Search
from ppctl.search.space import SearchSpace

INSIDE = ("tp", "cp", "etp", "mbs")
"""Sizes that no cut changes: how ranks divide a layer, and which samples make up a microbatch."""


class Whole(NamedTuple):
    """A run with all of its nodes."""

    values: ConfigValues
    plan: Plan

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return machines(self.values["nodes"], self.values["gpus_per_node"], self.plan.sizes.world)[0]

    @property
    def per_node(self) -> int:
        """The number of ranks on each node."""
        return self.plan.sizes.world // self.nodes

    def on(self, nodes: int) -> ConfigValues:
        """The config on `nodes` nodes, with the replicas that follow. Values typed for the whole run may change."""
        sources = {key: "the run" if text.startswith(PLACE) else text for key, text in self.values.provenance.items()}
        words: Overrides = {"nodes": nodes, "gpus_per_node": self.per_node, "dp": None}
        return ConfigValues(self.values.config, sources).overridden(words)


class Remaining(NamedTuple):
    """A configuration for the remaining nodes."""

    nodes: int
    """Nodes that take part; other remaining nodes stand by."""
    words: Overrides
    """Dotted key -> its value, where it differs from the whole run's."""
    plan: Plan
    why: str
    """Why there are fewer replicas of the whole run's cut than the nodes have room for; empty if there are not."""


def remaining(whole: Whole, nodes: int) -> Remaining | None:
    """The configuration for the `nodes` that remain, with the global batch of the whole run; None if nothing fits.

    It has the most replicas of the present cut that divide the batch and fit. If that leaves nodes over, a cut that is
    faster by more than plans err (`BAND`) replaces it; if no number of replicas fits, any other cut that fits.
    """
    fewer, why = _fewer_replicas(whole, nodes)
    if fewer is not None and fewer.nodes == nodes:
        return fewer
    cut = _another_cut(whole, nodes, inf if fewer is None else (1 - BAND) * fewer.plan.step_time_s)
    return fewer if cut is None else cut._replace(why=why)


def least_nodes(whole: Whole, nodes: int) -> int:
    """The least number of nodes above `nodes` for which there is a configuration, at most all."""
    more = range(nodes + 1, whole.nodes)
    return nodes + 1 + bisect_left(more, True, key=lambda number: remaining(whole, number) is not None)


def nothing_fits(whole: Whole, nodes: int) -> Problem:
    """The problem of too few nodes for any configuration, with the least number that suffices."""
    least, batch = least_nodes(whole, nodes), whole.values["gbs"]
    message = f"nothing fits {nodes:,} of {whole.nodes:,} nodes"
    message += f": at least {least:,} are needed for the global batch of {batch:,} samples"
    remedy = f"--lost {whole.nodes - least}" if least < whole.nodes else ""
    return Problem("PP-E230", message, remedy, whole.values.cite("nodes", "gpus_per_node", "gbs"))


def _fewer_replicas(whole: Whole, nodes: int) -> tuple[Remaining | None, str]:
    """(the present cut with the most replicas that work, why not with more). If one schedule call with more
    microbatches does not work, several calls with the present number are tried."""
    layout = {"layout": whole.plan.layout} if whole.values["layout"] == AUTO else {}
    calls = {CALL: whole.plan.num_microbatches * whole.values["mbs"]}
    replica, why = whole.plan.sizes.world // whole.plan.sizes.dp, ""
    for used in range(nodes, 0, -1):
        if used * whole.per_node % replica:
            why = why or f"{used} x {whole.per_node} ranks are no multiple of the {replica} of a replica"
            continue
        for words in (layout, layout | calls):
            values = whole.on(used).overridden(words)
            obstacle = _obstacle(values)
            plan = None if obstacle else plan_alone(values)
            if plan is not None and not plan.problems:
                return Remaining(used, _changed(whole, values), plan, why), why
            why = why or obstacle or (plan.problems[0].message if plan is not None else "")
    return None, why


def _obstacle(values: ConfigValues) -> str:
    """The first rule that a configuration breaks, memory included; empty if it breaks none."""
    violations: Violations = []
    sizes, _ = derive_world(values, violations)
    if sizes is not None and derive_batch(values, sizes.dp, violations) is not None:
        violations += judged(values)  # a hundred times slower, so last
    return violations[0].message if violations else ""


def _another_cut(whole: Whole, nodes: int, limit: float) -> Remaining | None:
    """The fastest other cut that takes less than `limit` seconds a step: with another pp, vpp and ep; if none fits,
    with another sharding, recomputation and schedule as well. Assumes that fewer nodes do no more work per node."""
    measured = read_profile(whole.values, [])
    inside = (*INSIDE, *["ep"] * (measured is not None))
    searched = whole.values[SCHEDULE] == AUTO or whole.values[CSV] is not None  # made for the present cut alone
    for kept in ((*inside, SHARDING, GRANULARITY, *[SCHEDULE] * (not searched)), inside):
        best = None
        for used in range(nodes, 0, -1):
            if whole.plan.step_time_s * whole.nodes / used >= limit:
                break
            values = whole.on(used).overridden({CSV: None, **({SCHEDULE: "1f1b", "layout": None} if searched else {})})
            space = SearchSpace(values, kept)
            search = Search(space, measured)
            for _ in search.run():
                if search.counted and search.tree.heap and search.tree.heap[0].seconds >= limit:
                    break
            if search.found and search.found[0].plan.step_time_s < limit:
                first = search.found[0]
                limit = first.plan.step_time_s
                best = Remaining(used, _changed(whole, space.values_of(first.configuration)), first.plan, "")
        if best is not None:
            return best
    return None


def _changed(whole: Whole, values: ConfigValues) -> Overrides:
    before, now = whole.values.config, values.config
    return {key: now[key] for key in text_keys() if now[key] != before[key]}
