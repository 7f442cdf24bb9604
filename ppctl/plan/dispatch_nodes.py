"""The number of nodes over which a token's copies are sent to its experts, from a config and its sizes."""

from __future__ import annotations

from ppctl.config.schema import RunConfig
from ppctl.geometry.expert_reach import expert_runs
from ppctl.host.devices import machines
from ppctl.topology import ParallelSizes

FLAT, BY_NODE = "flat", "by_node"


def ranks_per_node(config: RunConfig, world: int) -> int:
    """How many ranks share a machine: `launch.gpus_per_node`, else world / `launch.nodes`, else all."""
    return machines(config.launch.nodes, config.launch.gpus_per_node, world)[1]


def dispatch_obstacle(config: RunConfig, sizes: ParallelSizes) -> str | None:
    """Why tokens cannot go to the experts by nodes; None if they can."""
    per_node, runs = ranks_per_node(config, sizes.world), expert_runs(config.model)
    if sizes.ep == 1 or not config.model.num_moe_experts:
        return "no token leaves its rank for an expert: ep is 1"
    nodes = sizes.nodes_along("ep", per_node)
    if nodes is None:
        return f"groups of ep {sizes.ep} ranks, {sizes.stride('ep')} apart, do not fill nodes of {per_node}"
    if nodes == 1:
        return f"all ep {sizes.ep} ranks of a group are on one node of {per_node}"
    if runs.number % nodes:
        return (
            f"a node sums whole runs of experts, or router groups, but {nodes} nodes cannot share {runs.number} evenly"
        )
    return None


def dispatch_nodes(config: RunConfig, sizes: ParallelSizes) -> int:
    """The number of nodes in a dispatch by node (with `auto` wherever possible); 1 if every copy of a token goes
    straight to its rank."""
    if config.parallel.expert_dispatch == FLAT or dispatch_obstacle(config, sizes) is not None:
        return 1
    return sizes.nodes_along("ep", ranks_per_node(config, sizes.world)) or 1
