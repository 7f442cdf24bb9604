"""How this rank's parameters belong together with those of other ranks: their gradients' sums, and the norm's.

Knows which groups hold copies of a parameter, and which its other parts. Must not know the order of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.distributed import ProcessGroup

from ppctl.config.schema import RunConfig
from ppctl.geometry.matrix_owners import owned_runs
from ppctl.geometry.parts import Parts
from ppctl.geometry.rows import Parameter
from ppctl.model.stage_model import StageModel
from ppctl.parallel.owned import Runs
from ppctl.parallel.replicate import GradientReducer
from ppctl.plan import Plan
from ppctl.train.precision import Weights
from ppctl.train.sharded import GatheredWeights, GradientScatter, ShardedWeights


def norm_groups(
    rows: Mapping[str, Parameter], parts: Parts, groups: Mapping[str, ProcessGroup], *, sharded: bool
) -> list[tuple[set[str], ProcessGroup]]:
    """Names of parameters, and the ranks that hold the other parts of their gradients."""
    found = []
    if sharded:
        dp_group, edp_group, spread = _copies(rows, groups)
        found = [(rows.keys() - spread, dp_group), (spread, edp_group)]
    for axis in ("tp", "etp", "ep"):
        if axis in groups:
            found.append(({name for name, row in rows.items() if axis in parts.splits(row)}, groups[axis]))
    return found


def _copies(
    rows: Mapping[str, Parameter], groups: Mapping[str, ProcessGroup]
) -> tuple[ProcessGroup, ProcessGroup, set[str]]:
    """The ranks that have copies of a parameter; those that have copies of experts; and which parameters are experts',
    where these are other ranks."""
    dp_group = groups.get("cp-dp", groups["dp"])
    spread = {name for name, row in rows.items() if row.experts} if "edp" in groups else set()
    return dp_group, groups.get("edp", dp_group), spread


def weights_and_sums(
    config: RunConfig,
    plan: Plan,
    stages: Mapping[int, StageModel],
    rows: Mapping[str, Parameter],
    groups: Mapping[str, ProcessGroup],
) -> tuple[Weights, GradientReducer | GradientScatter]:
    """This rank's parameters, and what sums their gradients, whole or in parts.

    Sums go over dp and cp; of experts, where these are other ranks, over those that hold the same ones.
    """
    sizes = plan.sizes
    names = {number: list(stage.canonical_parameters()) for number, stage in stages.items()}
    model = {name: p for stage in stages.values() for name, p in stage.canonical_parameters().items()}
    dp_group, edp_group, spread = _copies(rows, groups)
    if sizes.dp * sizes.cp > 1 and config.parallel.data_parallel_sharding != "none":
        full = config.parallel.data_parallel_sharding == "full"

        def group_of(name: str) -> ProcessGroup:
            return edp_group if name in spread else dp_group

        owned = _owned(config, rows, model, group_of)
        sharded = GatheredWeights(names, model, group_of, owned) if full else ShardedWeights(model, group_of, owned)
        return sharded, GradientScatter(names, sharded)
    weights = Weights(model)
    masters = {number: [weights.master[name] for name in own] for number, own in names.items()}
    experts = [weights.master[name] for name in spread]
    whole, spread_over = dp_group if sizes.dp * sizes.cp > 1 else None, edp_group if sizes.edp > 1 else None
    return weights, GradientReducer(masters, whole, experts, spread_over)


def _owned(
    config: RunConfig,
    rows: Mapping[str, Parameter],
    model: Mapping[str, nn.Parameter],
    group_of: Callable[[str], ProcessGroup],
) -> dict[str, Runs]:
    """What belongs whole to single ranks: the matrices that Muon moves, shared out over all stages of a rank."""
    shapes: dict[ProcessGroup, dict[str, tuple[int, ...]]] = {}
    for name, parameter in model.items() if config.optim.name == "muon" else ():
        if rows[name].hidden_matrix:
            shapes.setdefault(group_of(name), {})[name] = tuple(parameter.shape)
    owned: dict[str, Runs] = {}
    for group, shared in shapes.items():
        owned |= owned_runs(shared, group.size())
    return owned
