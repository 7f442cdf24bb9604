"""Lines of a plan on how tokens reach experts on other ranks, straight or by node, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ppctl.config.schema import RunConfig
from ppctl.geometry.expert_reach import reached
from ppctl.plan.dispatch_nodes import BY_NODE, FLAT, dispatch_nodes, dispatch_obstacle, ranks_per_node
from ppctl.plan.memory_limit import amount, device_limit
from ppctl.plan.types import Derived, RankCost
from ppctl.plan.violations import ConfigValues, Violation, Violations
from ppctl.topology import ParallelSizes

DISPATCH = "parallel.expert_dispatch"


def derive_dispatch(values: ConfigValues, sizes: ParallelSizes, violations: Violations) -> Iterator[Derived]:
    """The line on how tokens reach experts, with the reason; nothing if no token leaves its rank. Adds a violation if
    `by_node` is impossible."""
    config, chosen = values.config, values[DISPATCH]
    obstacle = dispatch_obstacle(config, sizes)
    if chosen == BY_NODE and obstacle is not None:
        place = values.cite(DISPATCH, "ep", "etp", "nodes", "gpus_per_node", "model.num_moe_experts")
        message = f"tokens cannot go to their experts by node: {obstacle}"
        violations.append(Violation("PP-E227", DISPATCH, message, place, {DISPATCH: "auto"}, {DISPATCH: FLAT}))
    if sizes.ep == 1:
        return
    source = f"{DISPATCH}={chosen}, {values.source(DISPATCH)}"
    topk, nodes = config.model.moe_router_topk, dispatch_nodes(config, sizes)
    reason = "" if obstacle is None or chosen == FLAT else f": {obstacle}"
    text = f"all {topk} copies of a token go straight to their ranks{reason}"
    if nodes > 1:
        reach = f"{reached(config.model, nodes):.3g} of {nodes} nodes of {ranks_per_node(config, sizes.world)} ranks"
        text = f"a token goes once to each of {reach}, in place of {topk} copies, and on from there"
    yield Derived("expert_dispatch", BY_NODE if nodes > 1 else FLAT, f"dispatch to experts ({source}): {text}")


def exchanged_again(
    config: RunConfig, sizes: ParallelSizes, held: Callable[[RunConfig], Sequence[RankCost]]
) -> tuple[Derived, ...]:
    """A line on exchanges that recomputing `moe` repeats, and on whether the device has the memory for `experts`
    instead; nothing if none is repeated. `held` prices the pp_ranks of another config."""
    train, limit = config.train, device_limit(config, sizes)
    modules = train.recompute_modules or ()
    if train.recompute_granularity != "selective" or "moe" not in modules or sizes.ep * sizes.etp == 1:
        return ()
    instead = ["experts" if name == "moe" else name for name in modules]
    peak = max(cost.peak_bytes for cost in held(replace(config, train=replace(train, recompute_modules=instead))))
    fits = "" if limit is None else ", which fits" if peak <= limit.available_bytes else ", more than a device has"
    text = "recomputing moe exchanges rows of experts again: 6 times a layer and microbatch in place of 4; "
    text += f"with train.recompute_modules=[{','.join(instead)}] a rank needs at most {amount(peak)}{fits}"
    return (Derived("exchanged_again", 6, text),)
