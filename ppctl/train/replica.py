"""The trained state of one rank: weights, the sums of their gradients over other ranks, the norm and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ppctl.config.precision import weight_dtype
from ppctl.config.schema import RunConfig
from ppctl.geometry.matrix_owners import owned_runs
from ppctl.geometry.rows import Parameter, Parts, tp_sums
from ppctl.model.stage_model import StageModel
from ppctl.parallel.axis_groups import AxisGroups
from ppctl.parallel.replicate import GradientReducer
from ppctl.parallel.shard import Runs
from ppctl.parallel.tensor import sum_partial_gradients
from ppctl.parallel.ties import TiedGradients, tied_uses
from ppctl.plan import Plan
from ppctl.tensors.wide_dtype import wide_dtype
from ppctl.topology import RankGrid
from ppctl.train.bad_steps import NormLimit
from ppctl.train.grad_norm import GradientNorm, GradNorm, clip_gradients, locate_parameters
from ppctl.train.mixed_precision import LossScale, unscale
from ppctl.train.optimizer import AdamW, Muon, make_optimizer
from ppctl.train.rank_model import RankModel
from ppctl.train.trained_weights import GatheredWeights, GradientScatter, ShardedWeights, Weights


@dataclass(frozen=True)
class Replica:
    """This rank's part of one replica of the model, as it is trained."""

    weights: Weights
    optimizer: AdamW | Muon
    reducer: GradientReducer | GradientScatter
    """Sums gradients over the replicas."""
    partial_gradients: Sequence[nn.Parameter]
    """Masters that are whole on each rank, but whose gradients must be summed over tensor-parallel ranks."""
    tp_group: ProcessGroup | None
    ties: TiedGradients
    norm: GradientNorm
    limit: NormLimit
    loss_scale: LossScale | None
    """The loss scale, in float16 only."""

    @property
    def gathered(self) -> ShardedWeights | None:
        """The weights, if a stage's first forward in a step gathers other ranks' parts of them; else None."""
        return self.weights if isinstance(self.weights, ShardedWeights) else None

    @property
    def scale(self) -> float:
        """The factor of the objective whose gradients are accumulated."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def sum_gradients(self) -> None:
        """Complete the gradients after the pipeline: sum them over replicas, tensor-parallel ranks and tied uses, and
        unscale them. A collective of these ranks."""
        self.reducer.finish()
        if self.partial_gradients:
            assert self.tp_group is not None  # set if ranks have parts
            sum_partial_gradients(self.partial_gradients, self.tp_group)
        self.ties.sum()
        unscale(self.weights.master, self.loss_scale)

    def update(self, norm: GradNorm, lr: float, clip_grad: float, left_out: Tensor | None = None) -> None:
        """Clip gradients, step the optimizer (`left_out` as in `AdamW.step`), and publish new weights to the model."""
        clip_gradients(self.weights.master, norm, clip_grad)
        self.optimizer.lr = lr
        self.optimizer.step(left_out)
        self.weights.publish()


def make_replica(
    config: RunConfig, plan: Plan, rank: int, model: RankModel, groups: AxisGroups, device: torch.device
) -> Replica:
    """The replica of a rank's stages. A collective: the tied parameters' ranks make a group."""
    rows = model.rows
    weights, reducer = weights_and_sums(config, plan, model.stages, rows, groups)
    if model.kernels.adds_gradients:
        weights.let_products_add()
    sp = config.parallel.sequence_parallel
    uses = tied_uses(plan.stages, config.model, RankGrid(plan.sizes).group_of("pp", rank))
    partial = [name for name in weights.master if tp_sums(rows[name], plan.sizes.tp, sequence_parallel=sp)]
    return Replica(
        weights,
        make_optimizer(weights.master, config.optim, rows),
        reducer,
        [weights.master[name] for name in partial],
        groups.get("tp"),
        TiedGradients(uses, weights.master, rank),
        GradientNorm(
            locate_parameters(plan.stages, config.model),
            device=device,
            dtype=wide_dtype(getattr(torch, weight_dtype(config.parallel))),
            group=groups["pp"] if plan.sizes.pp > 1 else None,
            parts=norm_groups(rows, model.parts, groups, sharded=isinstance(weights, ShardedWeights)),
        ),
        NormLimit(config.train),
        LossScale.of(config.optim) if config.parallel.fp16 else None,
    )


def norm_groups(
    rows: Mapping[str, Parameter], parts: Parts, groups: Mapping[str, ProcessGroup], *, sharded: bool
) -> list[tuple[set[str], ProcessGroup]]:
    """(names of parameters, the group whose ranks hold the other parts of their gradients)."""
    shared = []
    if sharded:
        dp_group, edp_group, spread = _copies(rows, groups)
        shared = [(rows.keys() - spread, dp_group), (spread, edp_group)]
    for axis in ("tp", "etp", "ep"):
        if axis in groups:
            shared.append(({name for name, row in rows.items() if axis in parts.splits(row)}, groups[axis]))
    return shared


def _copies(
    rows: Mapping[str, Parameter], groups: Mapping[str, ProcessGroup]
) -> tuple[ProcessGroup, ProcessGroup, set[str]]:
    """(the group with copies of a parameter, the group with copies of an expert, the names of experts' parameters if
    the two groups differ)."""
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
    """This rank's parameters, whole or in parts, and the object that sums their gradients: over dp and cp, those of
    experts over the ranks with the same experts."""
    sizes = plan.sizes
    names = {number: list(stage.canonical_parameters()) for number, stage in stages.items()}
    model = {name: p for stage in stages.values() for name, p in stage.canonical_parameters().items()}
    dp_group, edp_group, spread = _copies(rows, groups)
    if sizes.dp * sizes.cp > 1 and config.parallel.data_parallel_sharding != "none":
        full = config.parallel.data_parallel_sharding == "full"

        def group_of(name: str) -> ProcessGroup:
            return edp_group if name in spread else dp_group

        owned = _owned(config, rows, model, group_of)
        sharded = (GatheredWeights if full else ShardedWeights)(names, model, group_of, owned)
        sharded.release_all()
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
    """Name -> runs of Muon's matrices, each owned whole by one rank: dealt to owners over all stages of a rank."""
    shapes: dict[ProcessGroup, dict[str, tuple[int, ...]]] = {}
    for name, parameter in model.items() if config.optim.name == "muon" else ():
        if rows[name].hidden_matrix:
            shapes.setdefault(group_of(name), {})[name] = tuple(parameter.shape)
    owned: dict[str, Runs] = {}
    for group, shared in shapes.items():
        owned |= owned_runs(shared, group.size())
    return owned
